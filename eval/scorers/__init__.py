"""Opinions on audio: similarity of voices, quality."""
