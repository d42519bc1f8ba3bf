"""Define attention in NumPy: the problem, visibility, and two algorithms, dense and tiled."""
