"""The methods of a comparison by name."""
