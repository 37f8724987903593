"""What is to be spoken, by whom, and with which prompt."""
