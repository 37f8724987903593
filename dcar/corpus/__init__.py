"""Readers of corpora, one module per format."""
