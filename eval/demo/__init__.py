"""`dcar demo`: an interactive page on this machine."""
