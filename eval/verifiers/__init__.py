"""Decoding methods that verify drafts or choose among the heads' proposals. None needs training.

Each rule is one function that reads like its equation. All are methods of the one step
(`dcar.decoding.decode`), so prompts, sampling, cache and clock are the same for all. A verifier of
your own extends `chain.ChainVerifier`.
"""
