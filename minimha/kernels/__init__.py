"""How fast attention can be computed: two ladders of kernels, on CPU and on CUDA."""
