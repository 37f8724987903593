"""Training of this project's own vocoder."""
