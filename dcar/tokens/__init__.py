"""Speech tokenizers: waveform → discrete codes at a fixed rate."""
