"""Statistics and bounds of a decoder, a tokenizer, a vocoder."""
