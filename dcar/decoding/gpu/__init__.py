"""Kernels for decoding on a GPU."""
