"""Recognisers: waveform → words; `load` knows them all."""
