"""`dcar speak`: text and a voice → audio, while it is decoded if wished."""
