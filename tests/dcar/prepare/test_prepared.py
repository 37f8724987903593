"""Prepared corpora on disk: what loading checks, which formats it reads, what the columns hold."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from tiny_corpora import rows_of, toy_prepare, toy_settings

from dcar.doctor import verify
from dcar.errors import DataError
from dcar.prepare import prepared
from dcar.prepare.prepared import copy_name, load_prepared, recording_of
from dcar.sources.shipped import ASSETS


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """The corpus, prepared; nobody changes it."""
    out = tmp_path_factory.mktemp("whole") / "p"
    toy_prepare(toy_settings(corpus, out))
    return out


@pytest.fixture
def out(whole, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "speed"), [("a", 1.0), ("a", 0.85), ("a@1", 1.0), ("a@0.9", 1.17), ("a@0.9", 1.0)]
)
def test_a_row_names_its_recording(name: str, speed: float):
    """Ids of a corpus may look like those of copies."""
    row = {"id": copy_name(name, speed), "speed": float(np.float32(speed))}
    assert recording_of(row) == (name, speed)


def test_loading_reads_what_was_written(corpus, out):
    """A flipped bit, a cut file, a file that is gone: sizes and digests of prepared.json are
    compared at loading."""
    [arrow] = (out / "train").glob("*.arrow")
    whole, state = arrow.read_bytes(), (out / "train" / "state.json").read_text()
    assert load_prepared(out, "train").num_rows == 10
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for broken, message in ((bytes(flipped), "digest"), (whole[:-100], "bytes"), (b"", "has 0 of")):
        arrow.write_bytes(broken)
        with pytest.raises(DataError, match=rf"train/{arrow.name} .*{message}.*`dcar doctor`"):
            load_prepared(out, "train")
        assert load_prepared(out, "dev").num_rows == 3  # another split is as it was
    arrow.write_bytes(whole)
    assert load_prepared(out, "train").num_rows == 10
    (out / "train" / "state.json").unlink()
    with pytest.raises(DataError, match="train/state.json "):
        load_prepared(out, "train")
    (out / "train" / "state.json").write_text(state)
    arrow.write_bytes(whole[:-100])
    toy_prepare(toy_settings(corpus, out))  # made again
    assert load_prepared(out, "train").num_rows == 10


def test_the_shipped_corpus_and_models_list_their_digests():
    verdicts = {path.parent.name: verdict for path, verdict in verify(ASSETS).items()}
    assert verdicts["starter_prepared"][0] == 9 and {
        "policy_t1.0",
        "policy_t0.4",
        "recognizer",
    } <= set(verdicts)
    assert not [(name, found) for name, (_, found) in verdicts.items() if found]


def test_compressed_is_smaller_and_the_same(corpus, whole, tmp_path):
    toy_prepare(toy_settings(corpus, tmp_path / "b", compress=True))
    a, b = (
        json.loads((folder / "prepared.json").read_text()) for folder in (whole, tmp_path / "b")
    )
    table = f"train/{prepared.TABLE}"
    assert a["fingerprint"] == b["fingerprint"]
    assert b["files"][table]["size"] < a["files"][table]["size"]
    assert rows_of(whole) == rows_of(tmp_path / "b")
    plain = datasets.load_from_disk(str(tmp_path / "b/train"))  # by the library alone
    assert plain.to_list() == load_prepared(tmp_path / "b", "train").to_list()


def test_the_smallest_integers_that_hold_a_vocabulary():
    for bits in (8, 16):
        assert prepared.integer_type(2**bits) == f"uint{bits}"
        assert prepared.integer_type(2**bits + 1) == f"uint{2 * bits}"
