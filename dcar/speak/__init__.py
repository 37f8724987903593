"""`dcar speak`: text and a voice → audio, optionally while it is decoded."""
