"""Continuous batching from buffers that never move."""
