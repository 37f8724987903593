"""Prompts: texts to synthesise, their speakers, and the speech that gives the voice."""
