"""Verifying methods: a draft is proposed, the decoder checks it in one pass, what passes the rule is kept.

Each method is a file whose acceptance rule is one function that reads like its equation. All are methods of the one
loop (`dcar.decoding.decode`), so prompts, sampling, cache and clock are the same for all.
"""
