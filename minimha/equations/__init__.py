"""What is computed: the problem, who sees whom, and the two ways to write attention in NumPy."""
