"""Decoding methods that verify drafts, or choose among the heads' candidates, without training anything."""
