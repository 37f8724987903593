"""`dcar analyse what=speed`: cost of a decoding step compared with the limit of the machine."""
