"""What a comparison found: records, rows, tests, curves."""
