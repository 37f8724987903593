"""Stage one: CAR, FAR and draft models."""
