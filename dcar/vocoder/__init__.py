"""Vocoders: speech tokens and a voice → waveform; `load` creates them by name."""
