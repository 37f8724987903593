"""Stacks of layers as one call of our own kernels."""
