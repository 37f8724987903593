"""`dcar demo`: a page to play with, on this machine."""
