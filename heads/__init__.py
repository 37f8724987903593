"""Small PyTorch modules that read hidden states: Transformer layers, multi-token heads, the
chunk policy."""
