"""HTML page of a comparison, with its tables and figures."""
