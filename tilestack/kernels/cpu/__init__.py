"""Kernels in C++ for CPUs, compiled on first use where there is a compiler; everything works without them."""
