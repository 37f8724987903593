"""Methods of a comparison, by name."""
