"""Voices: features that a vocoder reads, and embeddings that distinguish speakers."""
