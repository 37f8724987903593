"""Text as it is spoken: numbers and abbreviations, phonemes, and what a recogniser got wrong of it."""
