"""Fixtures of several rooms of `eval`."""

import pytest
from tiny_data import counting, write_prepared
from tiny_decoders import tiny_decoder

from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from eval.analysis import fit_verifiers as fitting


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A decoder, a prepared corpus and what `fit-verifiers` makes of them, on disk."""
    path = tmp_path_factory.mktemp("fit")
    write_prepared(path / "data", train=6, dev=5, speech=counting)
    model = tiny_decoder(
        text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="tiny@abc", phonemes=PHONEME_VERSION
    )
    model.save_pretrained(path / "decoder")
    fitting.main(
        [
            f"decoder={path / 'decoder'}",
            f"data={path / 'data'}",
            f"out={path / 'stats'}",
            "prompt_tokens=5",
            "thresholds=6",
            "ranks=4",
            "max_tokens=40",
            "min_tokens=20",
        ]
    )
    return path
