"""The report is one file that opens: well-formed, self-contained, escaped; its tables hold what was
measured."""

import base64
import csv
import io
import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import soundfile
from compare_worker import made_row, mapping_of, spoken, tiny_tools
from PIL import Image

from dcar.errors import DataError
from dcar.prompts.texts import titles_of
from dcar.text.english.inventory import TEXT_VOCAB_SIZE
from dcar.text.units import units_for
from dcar.text.wer import WordErrors
from dcar.tokens.alignment import PhonemeAligner
from eval.methods.families import family_of
from eval.report.blocks import Table
from eval.report.listen import legend, marked, timeline
from eval.report.page import write_report
from eval.report.plots import PLOTS, draw_plots, read_log, series
from eval.report.sections import matrix
from eval.report.summary import (
    FEW,
    Verdict,
    best_sentence,
    names_sentence,
    plain,
    terminal_text,
    unsteady_times,
    verdict,
)
from eval.report.table import column_groups, difference_cells, main_columns, percent, rivals
from eval.results.pareto import points
from eval.results.stats import PairedTest, paired_test
from eval.results.types import (
    FORMAT_VERSION,
    Decoded,
    EqualVariety,
    Pair,
    Result,
    Row,
    Sample,
    Speed,
    Speedup,
    SpokenSample,
    read_result,
    to_json,
    write_result,
)

TEMPLATES = files("eval.report") / "templates"
SCRIPT, STYLE = ((TEMPLATES / name).read_text() for name in ("script.js", "style.css"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    tools = tiny_tools()
    tools.aligner = PhonemeAligner(np.full((TEXT_VOCAB_SIZE, 12), 1 / 12), units_for())
    object.__setattr__(tools.items[0], "text", "ash <script>alert(1)</script> & \"birch\" 'elm'")
    spoken(
        out,
        tools,
        methods=["far", "car-2", "dcar"],
        timing_utterances=1,
        audio_utterances=2,
        references=True,
    )
    curves = {"reward_sampled": 0.4, "reward_forced": 0.5, "entropy": 1.0, "kl": 0.1, "loss": 2.0}
    lines = [{"step": s, **curves} for s in range(10)] + [{"step": 10, "eval_wer": 0.2}]
    (out / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 11, "rew')
    return out


@pytest.fixture
def result(folder) -> Result:
    return read_result(folder)


def test_report_is_one_file_that_opens(folder, result, parse):
    page = parse(write_report(folder, [folder / "log.jsonl"]))
    assert {"table", "audio", "img", "details", "nav", "main"} <= page.tags
    assert not page.tags & {"link", "iframe", "object"}
    assert page.code.count(SCRIPT) == 1 and page.code.count(STYLE) == 1
    kinds = []
    for tag, source in page.sources:
        mime, data = re.fullmatch(r"data:([a-z/]+);base64,([A-Za-z0-9+/=]+)", source).groups()
        raw = base64.b64decode(data, validate=True)
        kinds.append((tag, mime))
        if mime == "audio/ogg":
            wave, rate = soundfile.read(io.BytesIO(raw))
            assert rate == 24_000 and len(wave)
        elif mime != "text/csv":
            Image.open(io.BytesIO(raw)).verify()
    voices = result.first.samples[0].voices
    spoken = sum(bool(voice.decoded and voice.duration) for voice in voices)
    # the comparison twice, four training curves, the first sentence of each method
    assert kinds.count(("img", "image/png")) == 2 + 4 + spoken and spoken
    assert kinds.count(("audio", "audio/ogg")) >= 2 * 5
    head = (folder / "report.html").read_text().split("<body>")[0]
    assert not re.search(r"url\(|@import|fetch\(|https?:", head)
    assert len(set(page.ids)) == len(page.ids) and set(page.links) <= set(page.ids)
    # escaped: it is text, no code
    assert "<script>alert(1)</script>" in page.text and "speaker & 0" in page.text


def test_report_of_many_methods(comparison, parse, tmp_path):
    write_result(tmp_path / "compare.json", comparison)
    rows = comparison.first.rows
    assert [p.name for p in draw_plots(rows, tmp_path)] == list(PLOTS)
    page = parse(write_report(tmp_path, out=tmp_path / "sub" / "report.html"))
    assert all(row.method in page.text for row in rows)
    assert "passes-and-acceptance" in page.ids and "listen" not in page.ids
    assert sum(tag == "img" for tag, _ in page.sources) == 2
    untimed = [replace(row, speedups={}) for row in rows]
    assert [p.name for p in draw_plots(untimed, tmp_path)] == ["compare.png"]


def test_every_comparison_of_a_page_has_anchors_and_files_of_its_own(comparison, parse, tmp_path):
    """Verifiers in each, and titles that differ in letters outside ASCII alone."""
    titles = titles_of(["split", "a/my.txt", "b/my.txt", "тексты.txt", "слова.txt"]).values()
    several = [replace(comparison.first, title=title) for title in titles]
    write_result(tmp_path / "compare.json", replace(comparison, comparisons=several))
    draw_plots(comparison.first.rows, tmp_path)
    page = parse(write_report(tmp_path))
    assert len(set(page.ids)) == len(page.ids) and set(page.links) <= set(page.ids)
    assert {"texts-of-a-my-txt", "texts-of-b-my-txt", "texts-of-тексты-txt"} <= set(page.ids)
    files = {path.stem for path in (tmp_path / "report_tables").iterdir()}
    assert {"texts-of-a-my-txt", "texts-of-b-my-txt", "texts-of-слова-txt"} <= files


def test_every_table_is_csv_too(folder, result):
    """In the page and as files beside it, with the cells that the page shows; those of an
    earlier page are gone."""
    beside = folder / "report_tables"
    beside.mkdir(exist_ok=True)
    (beside / "old.csv").write_text("x")
    text = write_report(folder).read_text()
    tables = {path.stem: list(csv.reader(path.open(encoding="utf-8"))) for path in beside.iterdir()}
    assert set(re.findall(r'download="([a-z0-9-]+)\.csv"', text)) == set(tables)
    assert text.count("<table") == len(tables) and "old" not in tables
    rows, errors = result.first.rows, tables["errors-and-speed"]
    assert [line[0] for line in errors] == ["method", *(row.method for row in rows)]
    assert errors[3][1] == f"{100 * rows[2].wer.value:.2f}"
    assert Table("A table", ["a"], [["<1>"]]).csv == "a\n<1>\n"


def test_columns_that_are_empty_everywhere_are_left_out(result):
    titles = dict(column_groups(result.first.rows))
    # no random sizes in this comparison
    assert "p random" not in [t for t, _ in titles["Significance"]]
    assert {"p FAR", "p bestCAR"} <= {t for t, _ in titles["Significance"]}
    shown = [t for columns in titles.values() for t, _ in columns]
    assert set(shown) == {t for t, _ in main_columns(result.first.rows)}


def test_best_at_which_speed():
    measured = {
        "far": (0.3, 1.0), "car-2": (0.1, 1.5), "car-3": (0.15, 2.0), "car-4": (0.18, 2.2),
        "dcar": (0.2, 2.5), "sd": (0.4, 0.9), "random-4-5-6-7-8-9-10-11-12-13-14-15-16": (0.25, 3.0),
    }  # fmt: skip
    rows = [
        made_row(name, wer, speedups={"far": Speedup("far", speed, speed, (speed, speed))})
        for name, (wer, speed) in measured.items()
    ]
    said = best_sentence(rows, "far")
    assert re.findall(r"([\w…-]+) \(([\d.]+) %, ([\d.]+) × FAR\)", said) == [
        ("car-2", "10.0", "1.50"),
        ("car-3", "15.0", "2.00"),
        ("car-4", "18.0", "2.20"),
        ("dcar", "20.0", "2.50"),
        ("random-4…16", "25.0", "3.00"),
    ]
    assert best_sentence(rows[:1], "far").count("%") == 1


def test_the_verdict_says_method_minus_baseline(folder, result, parse):
    (said,) = verdict(result)
    rows = {row.method: row for row in result.first.spoken}
    best = rows["dcar"].tests["best_car"]
    ours, fixed = rows["dcar"], rows[best.baseline]
    (gain,) = said.sentences
    assert gain == (
        f"Sentences: dcar makes {100 * ours.wer.value:.1f} % errors, the best fixed size, "
        f"{best.baseline}, {100 * fixed.wer.value:.1f} %: {points(best)}, with "
        f"{100 * (1 - ours.passes / fixed.passes):.0f} % fewer passes and "
        f"{100 * abs(1 - ours.speed.rtf / fixed.speed.rtf):.0f} % "
        f"{'less' if ours.speed.rtf < fixed.speed.rtf else 'more'} time."
    )
    tokens, times = policy_pairs(result)
    for pair, (name, where, _, *cells) in zip((tokens, times), said.tests.rows, strict=True):
        assert name == "DCAR − CAR-k"
        assert where.startswith(
            {"far": "time (", "tokens_per_pass": "tokens per pass ("}[pair.axis]
        )
        assert cells == (difference_cells(pair.test) if pair.shared else ["–"] * 4)
    assert tokens.shared is None or tokens.test.difference == pytest.approx(
        tokens.wer_a - tokens.wer_b
    )
    page, text = parse(write_report(folder)).text, terminal_text(result, folder)
    assert gain in page and gain in " ".join(text.split())
    assert all(cell in page and cell in text for row in said.tests.rows for cell in row)
    others = [p for p in result.first.pairs if "dcar" not in (p.a.method, p.b.method)]
    without = with_first(
        result, pairs=others, rows=[row for row in result.first.rows if row.method != "dcar"]
    )
    assert verdict(without) == [Verdict([])] and "Fewest errors: " in terminal_text(without, folder)


def test_a_policy_that_decodes_as_a_fixed_size_is_the_same(result):
    """A policy that always chooses one size does so."""
    rows = {row.method: row for row in result.first.spoken}
    fixed, errors, words = rows["car-2"], [1, 0, 2] * 10, [9, 8, 7] * 10
    test = replace(paired_test(errors, words, errors, words), baseline="car-2")
    constant = replace(fixed, method="dcar", spec=rows["dcar"].spec, tests={"best_car": test})
    assert plain(result.first, constant, fixed) == (
        f"Sentences: dcar makes {100 * fixed.wer.value:.1f} % errors, the best fixed size, car-2, "
        f"{100 * fixed.wer.value:.1f} %: the same in every utterance, with equal passes and equal "
        "time."
    )


def test_many_policies_are_compared_with_the_best_fixed_size_in_the_table(result):
    rows = {row.method: row for row in result.first.spoken}
    more = [
        replace(
            rows["dcar"], method=name, spec=mapping_of(name), family=family_of(mapping_of(name))
        )
        for name in (f"dcar@p{i}" for i in range(FEW))
    ]
    (said,) = verdict(with_first(result, rows=[*result.first.rows, *more]))
    best = rows["dcar"].tests["best_car"]
    assert said.sentences == [] and len(more) == FEW
    assert [row[0] for row in said.tests.rows[: FEW + 1]] == [
        f"{name} − best" for name in ("DCAR", *(f"DCAR (p{i})" for i in range(FEW)))
    ]
    assert said.tests.rows[0][1:] == [
        f"sampling ({best.baseline})",
        percent(rows[best.baseline].wer.value, 1),
        *difference_cells(best),
    ]


def test_a_difference_in_cells():
    sure = PairedTest(-0.031, [-0.0438, -0.0202], 0.0004, 0.017)
    assert difference_cells(sure) == ["−3.1", "−4.4 to −2.0", "<0.001", "–"]
    chance = PairedTest(0.0004, [-0.01, 0.0104], 0.9, 0.015)
    assert difference_cells(chance) == ["+0.0", "−1.0 to +1.0", "0.900", "1.5"]
    assert difference_cells(PairedTest(0.02, None, None, None)) == ["+2.0", "–", "–", "–"]


def policy_pairs(result: Result) -> list[Pair]:
    """Return the pairs of DCAR and CAR-k, the one at equal tokens per pass first."""
    pairs = {
        pair.axis: pair
        for pair in result.first.pairs
        if (pair.a.label, pair.b.label) == ("DCAR", "CAR-k")
    }
    return [pairs["tokens_per_pass"], pairs["far"]]


def test_fixed_sizes_of_another_decoder_stand_apart(result):
    other = made_row("car-12:big@t0.5", 0.047, tokens_per_pass=11.57)
    more = with_first(result, rows=[*result.first.rows, other])
    (said,) = verdict(more)
    assert said.sentences == [
        *verdict(result)[0].sentences,
        "Without a policy, by another decoder: car-12:big@t0.5 makes 4.7 % (11.57 tokens per pass).",
    ]
    assert said.tests == verdict(result)[0].tests
    assert "car-k:big decodes with another decoder, big" in names_sentence(more)
    pair = result.first.pairs[0]
    alone = replace(pair, b=other.family, a=family_of(mapping_of("dcar")))
    assert verdict(with_first(result, pairs=[alone]))[0].tests is None


def with_first(result: Result, **changes) -> Result:
    """Return a result whose first comparison is changed."""
    return replace(result, comparisons=[replace(result.first, **changes)])


def test_the_verdict_has_rows_for_each_temperature_of_fixed_sizes(result):
    def tested(of: Result) -> list[list[list[str]]]:
        return [v.tests.rows if v.tests else [] for v in verdict(of)]

    pairs = policy_pairs(result)
    cool = [replace(pair, b=replace(pair.b, sampling="T 0.5")) for pair in pairs]
    ((*own, first, second),) = tested(with_first(result, pairs=[*cool, *result.first.pairs]))
    assert [own] == tested(result)
    for cooler, row in zip((first, second), own, strict=True):
        assert cooler == [row[0].replace("CAR-k", "CAR-k (T 0.5)"), *row[1:]]
    # every policy has its own
    more = [replace(pair, a=replace(pair.a, words=("b",))) for pair in pairs]
    ((*ours, fourth, fifth),) = tested(with_first(result, pairs=[*more, *pairs]))
    named = {row[0] for row in (fourth, fifth)} | {row[0] for row in ours}
    assert named == {"DCAR − CAR-k", "DCAR (b) − CAR-k"} and len(ours) == len(own)
    # a part of the texts says what the whole does not
    part = replace(result.first, title="6 of the sentences", limit=6, pairs=[*cool, *pairs])
    both = replace(result, comparisons=[result.first, part])
    assert tested(both) == [own, [first, second]] and not verdict(both)[1].sentences
    # fixed sizes of the same variety take the place of those of further samplings
    test = PairedTest(-0.01, [-0.02, -0.001], 0.01, 0.01)
    of = EqualVariety("tokens_per_pass", "dcar", 7.1, 0.1, 0.05, {"car-4": 1.0}, 0.06, test)
    lacking = replace(of, axis="far", test=None)
    varied = with_first(result, pairs=[*cool, *pairs], equal_variety=[of, lacking])
    row = ["DCAR − CAR-k", "tokens, variety (0.100)", "6.0", *difference_cells(test)]
    assert tested(varied) == [[*own, row]]
    assert verdict(varied)[0].sentences == verdict(result)[0].sentences
    # nothing of the same variety at any speed
    assert "add sizes" in verdict(with_first(result, equal_variety=[lacking]))[0].sentences[-1]


def test_a_terminal_of_a_hundred_columns_shows_it_all(result):
    rows = result.first.rows
    wide = replace(rows[-1], method="dcar@" + "name" * 20 + "@n16@d-0.5")
    text = terminal_text(with_first(result, rows=[*rows, wide]), Path("runs/compare"))
    assert max(map(len, text.splitlines())) <= 100
    more = terminal_text(replace(result, seeds=[6, 7]), Path("runs/compare"))
    assert " seeds=[6,7,8]\n" in more
    table = [re.split(r"  +", line) for line in text.splitlines()]
    cells = {line[0]: line for line in table[2:] if len(line) == 7}
    far = next(row for row in rows if row.method == "far")
    for row in result.first.spoken:  # the quotient of the very columns
        assert row.speedups["far"].total == far.speed.rtf / row.speed.rtf
        assert row.speedups["far"].lm == far.speed.lm_rtf / row.speed.lm_rtf
        clock = [f"{row.speed.rtf:.3f}", f"{row.speedups['far'].total:.2f}"]
        assert cells[row.method][4:] == [*clock, str(row.n)]


def made_pair(a: str, b: str, difference: float = 0.1, p: float = 0.01) -> Pair:
    """Return a comparison of the families of two methods."""
    test = PairedTest(difference, [difference - 0.05, difference + 0.05], p, 0.1)
    sides = (family_of(mapping_of(name)) for name in (a, b))
    return Pair("tokens_per_pass", *sides, (2, 2), 0.3, 0.2, test)


def test_rivals_meet_at_the_same_sampling():
    own, cool = made_pair("car-2", "dcar"), made_pair("car-2@t0", "dcar@t0")
    verifier = made_pair("dcar@t0", "sd@t0")
    others = [made_pair("car-2", "dcar@t0"), made_pair("far", "sd@t0")]
    assert rivals([own, others[0], cool, verifier, others[1]]) == [own, cool, verifier]


def test_times_that_differ_from_sentence_to_sentence_are_said():
    def timed(name: str, low: float, high: float, utterances: int) -> Row:
        speed = Speed(0.1, 0.1, 1.0, None, utterances)
        return made_row(name, speed=speed, speedups={"far": Speedup("far", 2.0, 2.0, (low, high))})

    row = timed("car-2", 1.9, 2.1, 10)
    assert not unsteady_times([row, made_row("far")], "far")
    said = unsteady_times([row, timed("car-6", 4.0, 6.3, 2)], "far")
    assert "(2)" in said and "car-6" in said and "4.00 to 6.30" in said


def test_a_difference_that_is_written_as_nothing_is_neither_better_nor_worse():
    def looks(difference: float, p: float) -> list[tuple[str, str]]:
        pair = made_pair("car-2", "dcar", difference, p)
        (_, _, right), (_, left, _) = matrix("t", [pair], ["CAR-k", "DCAR"]).rows
        return [(right.text, right.look), (left.text, left.look)]

    assert looks(-0.0002, 0.9) == [("0.0", "even"), ("0.0", "even")]
    assert looks(0.02, 0.01) == [("+2.0", "worse sure"), ("−2.0", "better sure")]
    assert looks(0.02, 0.9) == [("+2.0", "worse"), ("−2.0", "better")]


def test_what_a_resumed_run_repeats_counts_once(tmp_path):
    lines = [{"step": s, "kl": 0.1} for s in (1, 2, 3)] + [{"step": 1, "resumed": True}]
    lines += [{"step": s, "kl": 0.2} for s in (2, 3, 4)] + [{"step": 4, "resumed": True}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert series(read_log(tmp_path / "log.jsonl"), "kl") == ([1, 2, 3, 4], [0.1, 0.2, 0.2, 0.2])


def test_marked_words():
    assert marked("The cat sat.", "the cat sat") == [("span", "the cat sat")]
    assert marked("the cat sat", "the dog sat down") == [
        ("span", "the"),
        ("del", "cat"),
        ("ins", "dog"),
        ("span", "sat"),
        ("ins", "down"),
    ]
    assert marked("the cat", "") == [("del", "the cat")]
    assert marked("a", "b") == [("del", "a"), ("ins", "b")]


def test_timeline_has_a_block_per_chunk_that_spoke_and_a_legend():
    """A method that verifies asks for no size: the shade is what its pass gave."""
    asked, drafted = timeline([2, 3, 0], [2, 4, 3]).blocks, timeline([2, 3, 0], []).blocks
    assert [width for width, _, _ in asked] == [width for width, _, _ in drafted] == [2, 3]
    assert asked[0][1] == drafted[0][1] and asked[1][1] != drafted[1][1]
    decoded = Decoded(False, 4, 0, [], [], [2, 9, 11, 12], [2, 9, 11, 12])
    words = WordErrors(0, 0, 0, 1)
    voices = [SpokenSample("m", None, None, "", words, 1.0, of) for of in (decoded, None)]
    # sizes of one colour are one entry
    entries = legend([Sample("u", "text", "s", None, voices)])
    assert [sizes for _, sizes in entries] == ["2", "9 to 11", "12"]


def test_what_no_page_can_be_made_of(tmp_path, result):
    content = json.loads(to_json(result))

    def refused(message: str, **changes):
        if changes:
            (tmp_path / "compare.json").write_text(json.dumps({**content, **changes}))
        with pytest.raises(DataError, match=message):
            write_report(tmp_path)

    refused("compare.json.*dcar compare")
    for version in (1, FORMAT_VERSION + 1, None):
        refused(f"version {version}", format_version=version)
    refused("comparisons.0: .*dcar compare", comparisons=["none"])
    refused("colour.*dcar compare", colour="red")


def test_training_log(folder, tmp_path):
    """The line that was being written is left out; of repeated ones the best counts."""
    log = read_log(folder / "log.jsonl")
    assert len(log) == 11 and series(log, "eval_wer") == ([10.0], [0.2])
    assert series([*log, {"step": 10, "eval_wer": 0.1}], "eval_wer") == ([10.0], [0.2])
    for line in ("x", "{}", '{"step": "4"}'):
        (tmp_path / "bad.jsonl").write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
        with pytest.raises(DataError, match="bad.jsonl:2"):
            read_log(tmp_path / "bad.jsonl")


def test_a_character_without_a_font_is_left_out_and_named(caplog):
    from eval.report.listen import font_with

    font_with.cache_clear()
    assert font_with("ˈk").name == "DejaVuSans.ttf" and not caplog.text
    assert font_with("\U000e0001") is None and "no font of this machine has" in caplog.text
