"""The comparison end to end on a random tiny decoder: rows, resuming, number of processes,
refusals."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from compare_worker import (
    SHORT,
    LevelJudge,
    ToneVocoder,
    loudness,
    records_of,
    spoken,
    tiny_config,
    tiny_tools,
    transcribed,
)
from launched import ROOT, two_processes
from tiny_pretrained import save_ctc

from dcar.decoding import decode
from dcar.errors import ConfigError, DataError, ProcessError
from dcar.methods import Entry, make_methods
from dcar.prompts.texts import read_texts, text_prompts
from dcar.recognition.load import load_recognizer
from dcar.text.base import TextUnits
from dcar.text.bootstrap import FEWEST_UTTERANCES
from eval.compare.config import CompareConfig
from eval.compare.maker import Maker
from eval.compare.plan import BatchJob, choose_items
from eval.compare.processes import Meeting, threads_of
from eval.compare.run import check_alike, plan, run
from eval.report.summary import terminal_text, verdict
from eval.results.store import RecordStore
from eval.results.types import (
    RECORD_VERSION,
    RECORDING,
    RESYNTHESIS,
    Record,
    Row,
    ScorerInfo,
    read_result,
)
from eval.scorers.load import Scorer
from eval.verifiers.drafters import HeadDrafter
from eval.verifiers.sd import SpeculativeDecoding


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    return out, run(tiny_config(out, timing_utterances=2), tiny_tools())


def test_rows_hold_errors_tests_and_times_of_every_method(compared):
    out, result = compared
    rows = {row.method: row for row in result.first.rows}
    assert list(rows) == [
        RECORDING,
        RESYNTHESIS,
        "far",
        "car-1",
        "car-3",
        "random-2-3",
        "dcar",
        "dcar-sampled",
    ]
    for row in list(rows.values())[2:]:
        low, high = row.wer.ends
        assert low <= row.wer.value <= high
        assert row.wer.value == row.errors.errors / row.errors.reference_words
        assert row.wer_capped <= row.wer.value
        assert (row.n, row.seeds, row.records) == (6, 2, 12)
        assert 0 < row.speed.lm_rtf < row.speed.rtf
    assert rows[RECORDING].wer.value == rows[RESYNTHESIS].wer.value == 0
    assert rows["far"].speedups["far"].total == rows["car-1"].speedups["car1"].total == 1
    assert "far" not in rows["far"].tests
    assert rows["dcar"].tests["best_car"].p_value is not None
    against = rows["dcar"].tests["random"]
    assert against.baseline == "random-2-3"
    assert against.difference == pytest.approx(
        rows["dcar"].wer.value - rows["random-2-3"].wer.value
    )
    assert 0 < rows["dcar-sampled"].tests["random"].p_value <= 1
    assert not {"random"} & (rows["car-3"].tests.keys() | rows["random-2-3"].tests.keys())
    assert set(rows["random-2-3"].sizes) == {2, 3}
    assert read_result(out) == result
    for name in ("compare.txt", "compare.png", "compare_speed.png", "report.html", "config.yaml"):
        assert (out / name).stat().st_size > 0
    # pairs of far, car, random, dcar, dcar-sampled
    assert Counter(pair.axis for pair in result.first.pairs) == {"far": 10, "tokens_per_pass": 10}
    # sounds are kept of as many utterances as asked for
    assert [len(sample.voices) for sample in result.first.samples] == [8, 8]
    voices = [voice for sample in result.first.samples for voice in sample.voices]
    assert all((out / voice.audio).exists() for voice in voices if voice.audio)


class LengthOfWords(TextUnits):
    """Units of which each stands for a word."""

    def __call__(self, text):
        return [1 + len(word) for word in text.split()]


def test_a_list_of_texts_is_spoken_alike_by_every_method(tmp_path, monkeypatch):
    """Two texts without recordings: the same prompts for all, errors by category, and no rows
    that need a recording."""
    path, asked = tmp_path / "my.tsv", {}
    path.write_text("easy\tThe tide came in.\nhard\tSix sick sheep.\n")
    tools = tiny_tools()
    texts = read_texts(path, LengthOfWords())
    tools.sets = {str(path): {0: text_prompts(texts, tools.items)}}
    tools.corpus = {"texts": [{"name": str(path)}]}

    def listening(entry, prompts, *more):
        asked.setdefault(entry.name, []).extend(prompts)
        return decoded(entry, prompts, *more)

    decoded = Entry.decode
    monkeypatch.setattr(Entry, "decode", listening)
    result = run(tiny_config(tmp_path / "out", texts=[str(path)], seeds=[0]), tools)
    assert len(asked) == 6  # within a batch the shorter text is first
    assert all(set(prompts) == set(tools.items) and len(prompts) == 2 for prompts in asked.values())
    rows = {row.method: row for row in result.first.rows}
    assert RECORDING not in rows and RESYNTHESIS not in rows
    assert rows["dcar"].duration_ratio is None
    bins = result.first.by_category
    assert (bins.labels, bins.sizes) == (["easy", "hard"], [1, 1])
    records = records_of(tmp_path / "out")
    easy = next(r for r in records if (r.method, r.id) == ("dcar", "easy-0001"))
    assert bins.rates["dcar"][0].value == easy.words.errors / 4
    assert re.search(r"easy +95 % CI \(n = 1\) +hard", (tmp_path / "out/compare.txt").read_text())
    assert "Errors by category" in (tmp_path / "out" / "report.html").read_text()


def test_every_table_has_one_set_of_utterances(tmp_path):
    """Sentences, a part of them that `sd` decodes too, and a list of three texts: three comparisons
    and their verdicts from one command, which continues where it stopped."""
    texts = [
        replace(item, utterance_id=f"hard-{i}", duration=0.0, reference_tokens=[])
        for i, item in enumerate(tiny_tools(count=5).items[2:])
    ]
    asked = {
        "texts": ["split", "hard"],
        "methods": ["far", "car-1", "car-2", "car-3", "dcar", {"method": "sd", "limit": 2}],
        "seeds": [0, 1],
        "references": True,
        "report": True,
        "timing_utterances": 1,
        "audio_utterances": 1,
    }

    def tools(**changes):
        whole = tiny_tools(**changes)
        return replace(whole, sets={**whole.sets, "hard": {0: texts}})

    with pytest.raises(KeyboardInterrupt):
        spoken(tmp_path, tools(judge=LevelJudge(fail_after=70)), **asked)
    result = spoken(tmp_path, tools(), **asked)
    whole, part, hard = result.comparisons
    common = ["far", "car-1", "car-2", "car-3", "dcar"]
    assert [row.method for row in whole.spoken] == [row.method for row in hard.rows] == common
    assert [row.method for row in part.spoken] == [*common, "sd"]
    assert [(of.texts, of.limit, of.utterances) for of in result.comparisons] == [
        ("split", 0, 6),
        ("split", 2, 2),
        ("hard", 0, 3),
    ]
    assert all(row.n == of.utterances for of in result.comparisons for row in of.rows)
    records = records_of(tmp_path)
    assert Counter(r.texts for r in records) == {"split": 2 * 6 + 5 * 12 + 4, "hard": 5 * 6}
    # the part is made of what the whole has made
    (shard,) = (tmp_path / "records").glob("*.jsonl")
    assert len(shard.read_text().splitlines()) == len(records)
    alone = spoken(
        tmp_path / "alone",
        replace(tiny_tools(), sets={"hard": {0: texts}}),
        **{**asked, "texts": ["hard"], "methods": asked["methods"][:-1]},
    )

    def untimed(row):
        return replace(row, speed=None, speedups={})

    assert list(map(untimed, hard.rows)) == list(map(untimed, alone.first.rows))
    few = spoken(
        tmp_path / "few",
        tools(),
        **{**asked, "texts": ["split"], "limit": 2, "methods": [*common, "sd"]},
    )
    assert list(map(untimed, part.rows)) == list(map(untimed, few.first.rows))
    # what the whole says is not said of the part, and what all lack is said once
    whole, of_part, of_hard = verdict(result)
    assert [s.split(":")[0] for s in (*whole.sentences, *of_hard.sentences)] == [
        "Sentences",
        "How much speech varies was not measured, and fewer errors may come from less variety",
        "Hard texts",
    ]
    assert not of_part.sentences and of_part.tests is None
    alone_said = verdict(alone)[0]
    assert alone_said.sentences[0].split(" and ")[0] == of_hard.sentences[0].split(" and ")[0]
    assert alone_said.tests.rows[0] == of_hard.tests.rows[0]
    said = [*whole.sentences, *of_hard.sentences]
    # by every method, one sentence
    assert [len(of.samples) for of in result.comparisons] == [0, 1, 0]
    assert len(part.samples[0].voices) == 8
    text, page = terminal_text(result, tmp_path), (tmp_path / "report.html").read_text()
    assert "Hard texts:" in text and all(s in " ".join(text.split()) for s in said)
    assert all(s in page for s in said) and 'id="hard-texts"' in page
    assert 'id="2-of-the-sentences"' in page
    assert transcribed(tmp_path, tools(), **asked) == 0


def test_interrupted_run_goes_on(tmp_path, compared):
    """Ctrl-C in the judge loses nothing: what was judged is not judged again, and the result is
    the same."""
    judge = LevelJudge(fail_after=31)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_config(tmp_path), tiny_tools(judge))
    (shard,) = (tmp_path / "records").glob("*.jsonl")
    finished = len(shard.read_text().splitlines())
    # empty outputs need no judge, so there may be a few more records than transcripts
    assert finished >= 28
    with shard.open("a") as file:
        file.write('{"method": "car-1", "se')  # the process died while writing
    again = {"seeds": [0, 1], "audio_utterances": 2, "references": True}
    assert 0 < transcribed(tmp_path, **again) <= len(records_of(tmp_path)) - finished
    assert records_of(tmp_path) == records_of(compared[0])
    assert transcribed(tmp_path, **again) == 0


class RoundingVocoder(ToneVocoder):
    """Arithmetic whose last digits depend on the shapes of a call, magnified until a judge hears
    them."""

    def synthesize(self, token_lists, speaker):
        rounding = 0.02 * len(token_lists) + 0.001 * max(map(len, token_lists))
        return [
            wave / np.float32(1 + rounding) for wave in super().synthesize(token_lists, speaker)
        ]


def test_what_is_heard_of_tokens_does_not_depend_on_their_company(tmp_path):
    """Whatever shares the batch, and whatever an earlier run has finished: the same tokens are
    the same sound."""
    found = []
    for name, batch_size, limits in (
        ("alone", 1, [6]),
        ("together", 6, [6]),
        ("in pieces", 3, [2, 5, 6]),
    ):
        for limit in limits:
            spoken(
                tmp_path / name,
                replace(tiny_tools(), vocoder=RoundingVocoder()),
                methods=["car-1", "car-2"],
                batch_size=batch_size,
                limit=limit,
                references=True,
            )
        found.append(records_of(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert len({r.hypothesis for r in found[0]}) > 6


def test_every_scorer_is_a_column(compared):
    """Mean over records, interval over utterances; what has no score is left out and said."""
    out, result = compared
    records = records_of(out)
    text = (out / "compare.txt").read_text()
    for row in result.first.rows:
        scores = [r.scores["loudness"] for r in records if r.method == row.method]
        known = [s for s in scores if s is not None]
        score = row.scores["loudness"]
        assert len(known) < len(scores) and score.records == len(known)
        assert score.mean.value == pytest.approx(sum(known) / len(known))
        if score.utterances < FEWEST_UTTERANCES:
            assert score.mean.ends is None
        else:
            low, high = score.mean.ends
            assert low < score.mean.value < high
            assert f"{score.mean.value:.3f}  {low:.3f}–{high:.3f}" in text
        assert f"{row.method} {len(scores) - len(known)}" in text  # not scored
    assert any(row.scores["loudness"].mean.ends for row in result.first.rows)
    assert result.scorers == {"loudness": ScorerInfo("similarity", "loudness")}
    assert "<th scope=col>loudness</th>" in (out / "report.html").read_text()


def of_split(items):
    return {"split": {0: items}}


AGAIN = {"again": Scorer("again", "similarity", "again", loudness)}


@pytest.mark.parametrize(
    ("change", "settings", "all_again"),
    [
        (lambda tools: {}, {}, False),
        (lambda tools: {"scorers": {}}, {}, False),
        (lambda tools: {}, {"sampling": replace(SHORT, temperature=0.5)}, True),
        (
            lambda tools: {
                "sets": of_split(
                    [replace(i, speaker_embedding=2 * i.speaker_embedding) for i in tools.items]
                )
            },
            {},
            True,
        ),
        (lambda tools: {"recognizer": LevelJudge("other")}, {}, True),
        (lambda tools: {"scorers": tools.scorers | AGAIN}, {}, True),
    ],
    ids=["nothing", "fewer scorers", "sampling", "prompt", "judge", "more scorers"],
)
def test_what_makes_new_records(tmp_path, change, settings, all_again):
    spoken(tmp_path, methods=["car-1"], seeds=[0, 1])
    tools = tiny_tools()
    tools = replace(tools, **change(tools))
    (row,) = spoken(tmp_path, tools, methods=["car-1"], seeds=[0, 1], **settings).first.rows
    # all twelve, less empty ones
    assert (10 <= tools.recognizer.calls <= 12) if all_again else tools.recognizer.calls == 0
    assert len(records_of(tmp_path)) == 12 and set(row.scores) == set(tools.scorers)


def test_a_recogniser_of_the_same_folder_name_transcribes_anew(tmp_path):
    """Transcripts of `a/final` once stood in the table of `b/final`."""
    names, texts = [], []
    for seed, run_of in enumerate(("a", "b", "a")):
        folder = tmp_path / run_of / "final"
        if not folder.exists():
            save_ctc(folder, seed=seed)
        tools = replace(tiny_tools(count=2), recognizer=load_recognizer(f"ctc:{folder}"))
        result = spoken(tmp_path / "out", tools, methods=["car-1"])
        records = records_of(tmp_path / "out")
        assert {r.recognizer for r in records} == {result.recognizer}
        names.append(result.recognizer)
        texts.append([r.hypothesis for r in records])
    assert names[0] == names[2] != names[1] and texts[0] == texts[2] != texts[1]
    assert all(name.startswith("ctc:final@") for name in names)
    shards = list((tmp_path / "out" / "records").iterdir())
    # two utterances each for a and b; the third run found those of the first
    assert sum(len(shard.read_text().splitlines()) for shard in shards) == 4


def test_one_utterance_gives_neither_intervals_nor_tests(tmp_path):
    tools = tiny_tools(count=1)
    result = spoken(tmp_path, tools, methods=["far", "car-1", "car-3"], report=True)
    for row in result.first.rows:
        assert row.wer.ends is None
        assert all(test.p_value is test.detectable is None for test in row.tests.values())
    assert result.first.power is None
    text = (tmp_path / "compare.txt").read_text()
    assert "95 % CI" not in text and "Detectable difference" not in text


def test_two_processes_give_the_same_result(tmp_path, compared):
    assert two_processes(ROOT / "tests/toys/compare_worker.py", tmp_path).count("processes 2") == 2
    shards = sorted((tmp_path / "records").glob("*.jsonl"))
    assert len(shards) == 2
    assert all(s.stat().st_size for s in shards)
    assert records_of(tmp_path) == records_of(compared[0])

    def timeless(folder: Path) -> list[Row]:
        return [replace(row, speed=None, speedups={}) for row in read_result(folder).first.rows]

    assert timeless(tmp_path) == timeless(compared[0])
    two, one = (read_result(folder).first.pairs for folder in (tmp_path, compared[0]))
    assert two == [pair for pair in one if pair.axis == "tokens_per_pass"]


def test_batches_of_a_gpu_give_the_records_of_single_utterances_and_are_always_the_same(tmp_path):
    tools = tiny_tools(count=5)
    (entry,) = make_methods(["car-2"], tools.models, SHORT)
    job = BatchJob(entry, 0, tools.items, 0)

    def made(folder: Path, together: int, done: Sequence[Record] = ()) -> list[Record]:
        store = RecordStore(folder)
        store.lines.open()
        store.records = {(record.fingerprint, record.seed): record for record in done}
        maker = Maker(tools, tmp_path, store)
        assert maker.together == 1  # on a CPU
        maker.together = together
        maker.run(job, lambda count: None)
        return [replace(record, seconds={}) for record in store.records.values()]

    alone = made(tmp_path / "alone", 1)
    assert len(alone) == 5 and any(record.hypothesis for record in alone)
    assert made(tmp_path / "together", 2) == alone
    before = tools.recognizer.calls
    again = made(tmp_path / "again", 2, [r for r in alone if r.id != "utt<1>"])
    assert again[-1] == alone[1]
    # its whole batch, nothing else
    assert tools.recognizer.calls == before + sum(bool(r.duration) for r in alone[:2])


def test_unfinished_shards_are_an_error_not_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.compare.maker.Maker.run", lambda self, job, progress: None)
    with pytest.raises(DataError, match="recording, seed 0, utt<0>"):
        run(tiny_config(tmp_path), tiny_tools())


def test_verifying_methods_carry_their_accounting(tmp_path):
    result = spoken(tmp_path, methods=["car-2", "sd", "ssd-{0,0.4}"])
    rows = {row.method: row for row in result.first.rows}
    assert list(rows) == ["car-2", "sd", "ssd-0", "ssd-0.4"]
    tools = tiny_tools()
    sd = SpeculativeDecoding(drafter=HeadDrafter(3))
    direct = decode(tools.models.decoder, tools.items, sd, SHORT, seed=0)
    accepted, proposed = sum(sum(r.accepted) for r in direct), sum(sum(r.proposed) for r in direct)
    assert 0 < accepted < proposed
    assert rows["sd"].acceptance.share.value == accepted / proposed
    assert rows["sd"].acceptance.by_position[1].position == 2 and rows["sd"].draft_passes == 0
    assert rows["ssd-0"].tests["sd"].p_value == 1.0  # the same tokens
    assert "sd" not in rows["sd"].tests and "sd" not in rows["car-2"].tests
    assert "accepted %" in (tmp_path / "compare.txt").read_text()


def test_records_of_another_version_are_refused(tmp_path):
    spoken(tmp_path, methods=["car-1"])
    (shard,) = (tmp_path / "records").glob("*.jsonl")
    records = [json.loads(line) for line in shard.read_text().splitlines()]
    shard.write_text(
        "".join(json.dumps({**r, "version": RECORD_VERSION - 1}) + "\n" for r in records)
    )
    with pytest.raises(
        DataError, match=rf"records: .*version {RECORD_VERSION - 1}.* {RECORD_VERSION}; .*`out`"
    ):
        spoken(tmp_path, methods=["car-1"])


def test_limits_are_nested_and_ids_unique():
    items = tiny_tools(count=12).items
    small, large = (choose_items(items, n) for n in (4, 9))
    assert {i.utterance_id for i in small} < {i.utterance_id for i in large}
    assert len(choose_items(items, 0)) == 12
    with pytest.raises(DataError, match=" id"):
        choose_items([items[0], items[0]], 0)


@pytest.mark.parametrize(
    ("set_", "parameters", "load", "processes", "used"),
    [
        (0, 5_000_000, 0.0, 1, 1),
        (3, 5_000_000, 0.0, 1, 3),
        (0, 10**9, 0.1, 1, 7),
        (0, 10**9, 0.1, 3, 2),
        (0, 10**9, 9.0, 1, 1),
    ],
)
def test_no_more_threads_than_pay(monkeypatch, set_, parameters, load, processes, used):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    before = torch.get_num_threads()
    with threads_of(set_, parameters, processes):
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == before


def test_processes_that_do_not_see_each_other_are_refused(tmp_path, monkeypatch):
    """Each would do all the work and write the same shard, which once happened on CPUs without
    `device: cpu`."""
    monkeypatch.setattr(
        "eval.compare.processes.PartialState", lambda **_: SimpleNamespace(num_processes=1)
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes .*ACCELERATE_USE_CPU"):
        run(CompareConfig(out=str(tmp_path)))


def test_processes_with_other_code_or_models_are_refused():
    """One whose code was changed while a run began would make all records of a method again."""

    class Main(Meeting):
        def share(self, value):
            return {**value, **changed}

    tools, changed = tiny_tools(), {}
    compared = plan(tiny_config("out", methods=["far", "car-1"]), tools, [], PartialState(cpu=True))
    check_alike(compared, Main(1))
    changed = {"car-1": {"code": "another"}}
    with pytest.raises(ProcessError, match="code of car-1 differ from those of process 0"):
        check_alike(compared, Main(1))
