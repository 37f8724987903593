"""Tables of words, written as text."""


def table(text: str) -> dict[str, str]:
    """Return the mapping of a text of entries `key: value`, separated by commas."""
    entries = (entry.split(":") for entry in text.split(","))
    return {key.strip(): value.strip() for key, value in entries}
