"""Text normalisation, phonemes, and word error rates."""
