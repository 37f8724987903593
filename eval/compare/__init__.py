"""`dcar compare`: every method on the same utterances."""
