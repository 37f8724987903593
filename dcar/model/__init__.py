"""Decoders: CAR with K heads, draft models made from it, pretrained language models. `load`
loads all of them."""
