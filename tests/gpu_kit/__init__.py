"""A folder that tests and measures the CUDA kernels on a machine where nothing can be installed.

    python -m tests.gpu_kit build FOLDER

compiles here, without a GPU, what the GPU tests, the bench and the kit's own check ask for, and
writes a folder to copy there: ``sh run.sh probe check tests bench profile sanitize``, or any of
these. ``check`` needs Python, NumPy and NVIDIA's driver; what the others lack they say.

build     what is compiled, and what is put into the folder
tape      what a call does with the driver, recorded through the tests' stand-in for it
cases     the problems of ``check``, the same numbers on every machine
check     in the folder: plays the tape on the GPU, and compares with float64
calls     in the folder: the problems of the bench, once each, to be profiled
carried   in the folder: runs a program with the compiled kernels of the folder
run.sh    in the folder: the commands
"""
