"""Fixtures of stage two."""

import pytest
from tiny_data import tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder


@pytest.fixture
def files(tmp_path):
    """Decoder, vocoder and prepared corpus on disk, as the entry points read them."""
    tiny_decoder(tokenizer="tiny@abc").save_pretrained(tmp_path / "base")
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    write_prepared(tmp_path / "data")
    return tmp_path
