"""Recognisers: waveform → words. `load` lists all of them."""
