"""`dcar compare`: all methods on the same utterances."""
