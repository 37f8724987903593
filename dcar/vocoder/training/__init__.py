"""How our own vocoder is trained."""
