"""Recordings with their texts, one file a format."""
