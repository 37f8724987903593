"""Scorers of audio: speaker similarity, predicted quality."""
