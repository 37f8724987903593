"""Decoding methods that verify drafts, or choose among the heads' candidates, without training anything.

Each method is a file whose acceptance rule is one function that reads like its equation. All are methods of the one
loop (`dcar.decoding.decode`), so prompts, sampling, cache and clock are the same for all.
"""
