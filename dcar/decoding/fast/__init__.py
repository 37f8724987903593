"""The same tokens as the reference, in fewer kernels."""
