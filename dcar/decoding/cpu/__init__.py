"""Kernels in C for decoding on the CPU."""
