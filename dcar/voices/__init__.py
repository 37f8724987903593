"""What makes a voice: features that a vocoder hears, embeddings that tell speakers apart."""
