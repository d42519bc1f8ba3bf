"""Measure the speed of attention on CPUs and GPUs, and compare it with other libraries."""
