"""Prepared corpora on disk: what loading checks, which formats it reads, what the columns hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tiny_corpora import rows_of, toy_prepare, toy_settings

from dcar.doctor import verify
from dcar.errors import DataError
from dcar.prepare import prepared
from dcar.prepare.prepared import copy_name, load_prepared, recording_of
from dcar.prepare.recordings import source_utterances
from dcar.sources.shipped import ASSETS, shipped
from dcar.text.inventory import PHONEME_VERSION


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


def test_the_corpus_that_ships_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepared.prepared_info("starter") == prepared.prepared_info(shipped("prepared"))
    assert load_prepared("starter", "dev")["id"] == load_prepared(shipped("prepared"), "dev")["id"]
    assert source_utterances("starter")


@pytest.mark.parametrize(
    ("name", "speed"), [("a", 1.0), ("a", 0.85), ("a@1", 1.0), ("a@0.9", 1.17), ("a@0.9", 1.0)]
)
def test_a_row_names_its_recording(name: str, speed: float):
    """Ids of a corpus may look like those of copies."""
    row = {"id": copy_name(name, speed), "speed": float(np.float32(speed))}
    assert recording_of(row) == (name, speed)


def test_loading_checks_versions(out, monkeypatch):
    with pytest.raises(DataError, match="p/none: .*prepared.json.*`dcar prepare`"):
        load_prepared(out / "none", "train")
    with pytest.raises(DataError, match="'other'.* train, dev, test"):
        load_prepared(out, "other")
    whole = json.loads((out / "prepared.json").read_text())
    lacking = {
        name: {k: v for k, v in whole.items() if k != name}
        for name in ("phonemes", "tokenizer", "counts")
    }
    for written, message in (
        *((json.dumps(info), f"prepared.json .*{name}") for name, info in lacking.items()),
        *((broken, "prepared.json") for broken in ("[]", "null", b"caf\xe9", "{")),
        (json.dumps({**whole, "format_version": 99}), "format version 99"),
    ):
        (out / "prepared.json").write_bytes(
            written if isinstance(written, bytes) else written.encode()
        )
        with pytest.raises(DataError, match=message):
            load_prepared(out, "dev")
    (out / "prepared.json").write_text(json.dumps(whole))
    monkeypatch.setattr(prepared, "PHONEME_VERSION", "dcar-en-us-2")
    with pytest.raises(DataError, match=f"{PHONEME_VERSION}.*dcar-en-us-2"):
        load_prepared(out, "dev")


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


def test_digests_are_computed_once_a_process(out, monkeypatch):
    counted: list[Path] = []
    real = prepared.digest
    monkeypatch.setattr(prepared, "digest", lambda path: counted.append(path) or real(path))
    for _ in range(3):
        load_prepared(out, "train")
    assert len(counted) == len(set(counted)) == 4
    monkeypatch.setattr(prepared, "MOST_DIGESTED", 100)  # larger files are left to `dcar doctor`
    counted.clear()
    monkeypatch.setattr(prepared, "_digested", {})
    assert load_prepared(out, "train").num_rows == 10 and not any(
        p.suffix == ".arrow" for p in counted
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"files": ["train"]},
        {"files": {}},
        {"files": {"train/state.json": 5}},
        {"files": {"train/\x00": {"size": 1, "sha256": ""}}},
        {"format_version": 2},
    ],
)
def test_a_broken_list_of_files_or_another_format_is_not_finished_work(
    changes: dict[str, Any], corpus, out
):
    info = json.loads((out / "prepared.json").read_text())
    (out / "prepared.json").write_text(json.dumps({**info, **changes}))
    with pytest.raises(DataError, match=f"{out}.*prepare again"):
        load_prepared(out, "train")
    toy_prepare(toy_settings(corpus, out))  # made again
    assert load_prepared(out, "train").num_rows == 10


def test_the_shipped_corpus_and_models_list_their_digests():
    verdicts = {path.parent.name: verdict for path, verdict in verify(ASSETS).items()}
    assert verdicts["starter_prepared"][0] == 9 and {"policy", "policy_t0.4", "recognizer"} <= set(
        verdicts
    )
    assert not [(name, found) for name, (_, found) in verdicts.items() if found]


def test_compressed_is_smaller_and_the_same(corpus, whole, tmp_path):
    toy_prepare(toy_settings(corpus, tmp_path / "b", compress=True))
    a, b = (
        json.loads((folder / "prepared.json").read_text()) for folder in (whole, tmp_path / "b")
    )
    table = f"train/{prepared.TABLE}"
    assert (
        a["fingerprint"] == b["fingerprint"]
        and b["files"][table]["size"] < a["files"][table]["size"]
    )
    assert rows_of(whole) == rows_of(tmp_path / "b")
    plain = datasets.load_from_disk(str(tmp_path / "b/train"))  # by the library alone
    assert plain.to_list() == load_prepared(tmp_path / "b", "train").to_list()


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (61, "uint8"),
        (256, "uint8"),
        (257, "uint16"),
        (65536, "uint16"),
        (65537, "uint32"),
        (151_936, "uint32"),
    ],
)
def test_the_smallest_integers_that_hold_a_vocabulary(size: int, name: str):
    assert prepared.integer_type(size) == name
    assert np.iinfo(name).max >= size - 1
