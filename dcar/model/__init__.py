"""Decoders: CAR with K heads, drafts of it, pretrained language models; `load` knows them all."""
