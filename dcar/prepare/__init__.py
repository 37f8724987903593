"""`dcar prepare`: corpus → phonemes, speech tokens and voice features on disk."""
