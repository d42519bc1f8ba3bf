"""A folder that tests and measures the CUDA kernels on a machine where nothing can be installed.

    python -m tests.gpu_kit build FOLDER

compiles, without a GPU, the kernels of the GPU tests, the bench and the kit's check, and writes a
folder to copy there: ``sh run.sh probe check tests bench profile sanitize``, or any of these.
``check`` needs Python, NumPy and NVIDIA's driver; the others report what they lack.

build     compiles the kernels and writes the folder
tape      a call's use of the driver, recorded through the tests' stand-in for it
cases     the problems of ``check``, the same numbers on every machine
check     in the folder: plays the tape on the GPU, compares with float64, and measures
calls     in the folder: the problems of the bench, once each, to be profiled
carried   in the folder: runs a program with the compiled kernels of the folder
run.sh    in the folder: the commands
"""
