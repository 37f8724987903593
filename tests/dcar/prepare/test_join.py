"""`dcar prepare mode=join`: whose utterances are joined, and what a joined one says."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny_data import write_prepared

from dcar.cli import main
from dcar.prepare.join import COMMA, MOST, SPACE, STOP, JoinConfig, groups, join, joined
from dcar.prepare.prepared import (
    load_prepared,
    load_split,
    prepared_info,
    save_splits,
    with_recorded,
)
from dcar.prompts.chooser import PromptChooser
from dcar.text.english.phonemes import text_to_ids

SPEAKERS = [f"s{i % 3}" for i in range(90)]
SECONDS = np.random.default_rng(0).uniform(2, 8, 90).tolist()


@pytest.mark.parametrize("settings", [{}, {"share": 1.0}, {"max_seconds": 9.0}, {"seed": 3}])
def test_every_row_once_with_others_of_its_speaker(settings):
    config = JoinConfig(**settings)
    found = groups(SPEAKERS, SECONDS, config)
    assert Counter(row for group in found for row in group) == Counter(range(90))
    assert all(len({SPEAKERS[row] for row in group}) == 1 for group in found)
    several = [group for group in found if len(group) > 1]
    assert max(map(len, several)) <= MOST
    assert all(sum(SECONDS[row] for row in group) <= config.max_seconds for group in several)
    alone = 90 * (1 - config.share)
    assert alone - 1 <= len(found) - len(several) <= alone + (3 if config.max_seconds > 9 else 30)
    assert (
        found
        == groups(SPEAKERS, SECONDS, config)
        != groups(SPEAKERS, SECONDS, replace(config, seed=9))
    )


def row(name: str, text: str, speech: list[int]) -> dict:
    return {
        "id": name,
        "text": text,
        "text_ids": text_to_ids(text),
        "speech": speech,
        "duration": len(speech) / 50,
        "audio": f"{name}.wav",
        "voice": [float(len(speech))],
        "speaker": "s",
    }


@pytest.mark.parametrize(
    ("commas", "text"),
    [
        (0.0, "The tide came in. Who saw it? We left."),
        (1.0, "The tide came in, Who saw it? We left."),
    ],
)
def test_a_joined_row_says_all_of_its_texts(commas, text):
    rows = [
        row("a", "The tide came in.", [1, 2]),
        row("b", "Who saw it?", [3]),
        row("c", "We left.", [4, 5]),
    ]
    one = joined(rows, np.random.default_rng(0), commas)
    assert (one["id"], one["text"], one["speech"], one["audio"]) == (
        "a+b+c",
        text,
        [1, 2, 3, 4, 5],
        "",
    )
    assert one["duration"] == pytest.approx(0.1) and one["voice"] == [2.0]
    assert one["text_ids"] == text_to_ids(text)
    assert one["text_ids"].count(COMMA) == commas and one["text_ids"].count(STOP) == 2 - commas
    assert SPACE in one["text_ids"] and rows[0]["text_ids"] == text_to_ids("The tide came in.")
    assert joined(rows[:1], np.random.default_rng(0), 1.0) == row("a", "The tide came in.", [1, 2])


def test_the_command_writes_a_prepared_corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_prepared(tmp_path / "data", train=24)
    assert (
        main(["prepare", "mode=join", f"data={data}", "out=long", "share=1", "max_seconds=2"])
        is None
    )
    info, before = prepared_info("long"), load_prepared(data, "train")
    after = load_prepared("long", "train")
    assert info.content["joined"]["from"] == [str(data)]
    assert info.content["joined"]["settings"]["share"] == 1
    assert info.counts["train"]["utterances"] == len(after) < 12
    assert (
        info.counts["train"]["tokens"]
        == sum(map(len, before["speech"]))
        == sum(map(len, after["speech"]))
    )
    assert load_prepared("long", "dev").to_list() == load_prepared(data, "dev").to_list()
    whole = {r["id"]: r for r in before}
    for r in after:
        parts = r["id"].split("+")
        assert list(r["speech"]) == [t for name in parts for t in whole[name]["speech"]]
        assert r["voice"] == whole[parts[0]]["voice"] and {whole[p]["speaker"] for p in parts} == {
            r["speaker"]
        }


@pytest.mark.parametrize("there", [True, False])
def test_an_out_that_is_a_link_stays_one(tmp_path, there):
    """The link was once replaced by a folder on its own disk; one to nothing failed at the end."""
    data, target, link = (
        write_prepared(tmp_path / "data"),
        tmp_path / "disk" / "both",
        tmp_path / "l",
    )
    if there:
        target.mkdir(parents=True)
    link.symlink_to(target)
    main(["prepare", "mode=join", f"data={data}", f"out={link}/"])
    assert link.is_symlink() and (target / "prepared.json").is_file()
    assert [p.name for p in target.parent.iterdir()] == ["both"]


def test_equal_names_of_different_corpora_are_named(tmp_path, caplog):
    first = write_prepared(tmp_path / "first")
    rows = load_prepared(first, "train").map(lambda row: {"id": f"other_{row['id']}"})
    content = prepared_info(first).content
    for name, corpus in (("same", content["corpus"]), ("other", {"kind": "folder", "path": "/b"})):
        save_splits(tmp_path / name, [("train", rows)], content | {"corpus": corpus})
        caplog.clear()
        join(JoinConfig([str(first), str(tmp_path / name)], str(tmp_path / f"{name}2"), share=0))
        noted = "2 speakers have the same name in several corpora" in caplog.text
        assert noted == (name == "other") == ("s0, s1" in caplog.text)


def test_the_training_splits_of_several_corpora_and_the_other_splits_of_the_first(tmp_path):
    first = write_prepared(tmp_path / "first")
    second = write_prepared(tmp_path / "second", train=5, dev=2)
    rows = load_prepared(second, "train").map(lambda row: {"id": f"other_{row['id']}"})
    save_splits(tmp_path / "renamed", [("train", rows)], prepared_info(second).content)
    out = join(
        JoinConfig([str(first), str(tmp_path / "renamed")], str(tmp_path / "both"), share=0.0)
    )
    assert load_prepared(out, "train").to_list() == [*load_prepared(first, "train"), *rows]
    assert load_prepared(out, "dev").to_list() == load_prepared(first, "dev").to_list()


def test_prompts_of_a_distilled_corpus_remain_recordings(tmp_path):
    """The column `recorded` was once dropped, so prompts were what a decoder had spoken."""
    plain = write_prepared(tmp_path / "plain")
    rows = load_prepared(plain, "train").map(lambda row: {"id": f"d_{row['id']}"})
    rows = with_recorded(rows).map(lambda row: {"speech": [1] * len(row["speech"])})
    info = prepared_info(plain).content
    save_splits(tmp_path / "distilled", [("train", rows)], info)
    for data in ([tmp_path / "distilled", plain], [plain, tmp_path / "distilled"]):
        out = tmp_path / f"out-{data[0].name}"
        join(JoinConfig(list(map(str, data)), str(out), share=1.0))
        whole = {
            r["id"]: r for folder in data for r in with_recorded(load_prepared(folder, "train"))
        }
        made = load_prepared(out, "train")
        assert len(made) < 16 == len(whole)
        for row in made:
            parts = [whole[name] for name in row["id"].split("+")]
            for column in ("speech", "recorded"):
                assert row[column] == [token for part in parts for token in part[column]]
        assert PromptChooser(load_split(out, "train"), 5).speech[0] == made[0]["recorded"]
