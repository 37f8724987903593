"""Training speech for the reward recogniser: audio, text and tokens of a split, in a manifest that it can read."""

from __future__ import annotations

import json

import numpy as np
from tiny_data import tiny_vocoder, write_prepared

from dcar.prepared import load_prepared
from dcar.resynthesize import ResynthesizeConfig, run
from dcar.train_recognizer import load_manifest


def test_manifest_holds_what_the_vocoder_says_and_the_tokens_it_said_it_from(tmp_path):
    data = write_prepared(tmp_path / "data", train=5)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    settings = dict(data=str(data), split="train", vocoder=str(tmp_path / "vocoder"), batch_size=2)
    manifest = run(ResynthesizeConfig(**settings, out=str(tmp_path / "own")))
    rows = {row["key"]: row for row in map(json.loads, manifest.read_text().splitlines())}
    prepared = {row["id"]: row for row in load_prepared(data, "train")}
    assert rows.keys() == prepared.keys()
    assert all(rows[i]["tokens"] == prepared[i]["speech"] and rows[i]["text"] == prepared[i]["text"] for i in rows)
    recordings = load_manifest(manifest)
    assert [len(r.wave) for r in recordings] == [len(row["tokens"]) * 320 for row in rows.values()]  # 50 Hz at 16 kHz
    assert all(np.array_equal(r.tokens, row["tokens"]) for r, row in zip(recordings, rows.values(), strict=True))

    other = run(ResynthesizeConfig(**settings, out=str(tmp_path / "other"), other_voices=True, limit=4))
    assert len(other.read_text().splitlines()) == 4
    same = [np.array_equal(a.wave, b.wave) for a, b in zip(load_manifest(other), recordings, strict=False)]
    assert not all(same)
