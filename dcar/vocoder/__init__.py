"""Vocoders: speech tokens and a voice → waveform; `load` knows them all."""
