"""Fused forward passes: the same tokens as the reference in fewer kernels."""
