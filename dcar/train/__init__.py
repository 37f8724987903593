"""Stage one: training of CAR, FAR and draft models."""
