"""Results of a comparison: records, rows, tests, curves."""
