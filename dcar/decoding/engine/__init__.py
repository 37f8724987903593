"""Continuous batching on fixed buffers."""
