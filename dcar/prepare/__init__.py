"""`dcar prepare`: corpus → phonemes, speech tokens and voices on disk."""
