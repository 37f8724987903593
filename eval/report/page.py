"""One self-contained report.html of a comparison: table, plot, training curves, chunk timelines, audio.

    dcar report compare=runs/quickstart training_log=runs/quickstart/policy/log.jsonl

The file needs nothing beside it: plots and audio are embedded. It is plain HTML and CSS and reads well on a phone.
"""

from __future__ import annotations

import difflib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config import load_config, setting
from dcar.errors import ConfigError, DataError
from dcar.process import run_command
from dcar.text.wer import normalize_transcript
from eval.report.html import data_uri, escape, file_uri, paragraphs, table
from eval.report.methods_section import equal_speed_section, error_figures, lively_section, papers_section, verification
from eval.report.papers import papers_text
from eval.report.table import main_columns, notes
from eval.results.store import RECORDING, RESYNTHESIS

FORMAT_VERSION = 2  # of compare.json; 2: acceptance by position, families, comparison at equal speed
# one hue, light to dark: chunk sizes are ordered
CHUNK_COLORS = ["#dbe7f5", "#b3cfe9", "#84b3da", "#5595c9", "#2f75b2", "#185593", "#0a386b"]
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; margin: 0 auto; max-width: 62rem;
  padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0 0 .3rem; } p { margin: .4rem 0 .8rem; } .soft { color: #5b6570; font-size: .9rem; }
img { width: 100%; max-width: 52rem; height: auto; display: block; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .8rem; }
.scroll { overflow-x: auto; border: 1px solid #d9dee3; border-radius: 8px; }
table { border-collapse: collapse; font-size: .88rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid #e8ebee; }
th { background: #f4f6f8; font-weight: 600; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; font-weight: 600; }
th:first-child { background: #f4f6f8; } tr.reference td { color: #5b6570; } tr.dcar td { background: #fdf3f0; }
tr.reference td:first-child { max-width: 11rem; white-space: normal; }
.card { border: 1px solid #d9dee3; border-radius: 8px; padding: .9rem; margin: 1rem 0; }
.voice { border-top: 1px solid #e8ebee; padding: .7rem 0 .3rem; } .voice:last-child { padding-bottom: 0; }
.voice .name { font-weight: 600; }
audio { width: 100%; max-width: 26rem; height: 2.4rem; display: block; margin: .35rem 0; }
.bar { display: flex; height: 1.15rem; border-radius: 3px; overflow: hidden; margin: .35rem 0; }
.bar span { display: block; min-width: 0; border-right: 1px solid #fff; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .9rem; font-size: .85rem; } .legend i { display: inline-block;
  width: 1rem; height: .8rem; border-radius: 2px; margin-right: .3rem; vertical-align: -1px; }
ins { text-decoration: none; background: #fbe0d8; border-radius: 2px; padding: 0 .15em; }
del { color: #8b949d; } details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
.lengths { display: grid; grid-template-columns: minmax(6rem, 10rem) 1fr 3rem; gap: .2rem .8rem; align-items: center; }
.lengths .bar { margin: .15rem 0; } .lengths .name { font-size: .88rem; font-weight: 600; }
.matrix td { text-align: center; } .matrix td.better { background: #eaf2fb; } .matrix td.worse { background: #fcebe7; }
.matrix td.sure { font-weight: 700; } .matrix td.none { color: #a8b0b8; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
pre { font-size: .78rem; overflow-x: auto; background: #f4f6f8; border-radius: 8px; padding: .7rem; }
"""


@dataclass
class ReportConfig:
    """Settings of `dcar report`."""

    compare: str = setting("runs/compare", "Folder of a comparison (compare.json, audio/).", place="folder")
    training_log: str | None = setting(None, "log.jsonl of DCPO.")
    out: str | None = setting(None, "File to write; null = report.html in the folder.", place="file")


def write_report(compare: str | Path, training_log: str | Path | None = None, out: str | Path | None = None) -> Path:
    """Write the report of the comparison in folder `compare`; returns its path. DataError if there is none."""
    folder = Path(compare)
    result = read_comparison(folder)
    log = read_log(Path(training_log)) if training_log else []
    path = Path(out) if out else folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        text = page(result, folder, log)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{folder}: no report can be made of compare.json and what lies beside it "
                        f"({type(error).__name__}: {error}); run the comparison again, finished records are kept"
                        ) from error
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    part.replace(path)
    return path


def read_comparison(folder: Path) -> dict[str, Any]:
    """compare.json of a comparison's folder; DataError where it is missing, broken or of another format."""
    try:
        result = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{folder}/compare.json: cannot be read ({error}); run `dcar compare` first") from error
    version = result.get("format_version") if isinstance(result, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{folder}/compare.json: format {version}, this version reads {FORMAT_VERSION}; run the "
                        f"comparison again (`dcar compare --config {folder}/config.yaml`): it speaks anew what it "
                        "needs")
    return result


def page(result: dict[str, Any], folder: Path, log: Sequence[dict[str, Any]] = ()) -> str:
    """The whole HTML text; `folder` holds the files that `result` names."""
    rows = result["rows"]
    curves = training_plots(log)
    sections = [
        f"<h1>DCAR: how many tokens a step?</h1>{_summary(result)}",
        f"<h2>Comparison</h2>{_table(rows)}{paragraphs(notes(rows, result))}",
        error_figures(rows, folder),
        equal_speed_section(result),
        verification(rows, folder),
        lively_section(rows),
        papers_section(result),
        "" if not curves else "<h2>Training of the policy (DCPO)</h2><div class=panels>"
        + "".join(f"<img alt='{escape(title)}' src='{data_uri(png, 'image/png')}'>" for title, png in curves)
        + "</div><p class=soft>Thin: as logged; thick: running mean. Forced rollouts follow a fixed "
        "chunk size of the guidance range; sampled ones follow the policy. The policy exceeds its guides where the "
        "sampled curve passes the forced one.</p>",
        _listen(result, folder),
        _details(result),
    ]
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>DCAR comparison</title><style>{STYLE}</style></head><body>"
            + "\n".join(s for s in sections if s) + "</body></html>\n")


def _summary(result: dict[str, Any]) -> str:
    rows = result["rows"]
    methods, seeds = sum(r["kind"] == "method" for r in rows), len(result["seeds"])
    sentences = [f"{result['utterances']} held-out sentences, spoken by {methods} methods with {seeds} random "
                 f"seed{'s' if seeds > 1 else ''}, judged by a speech recogniser."]
    for row in (r for r in rows if r["method"].startswith("dcar")):
        text = (f"{row['method']} makes {100 * row['wer']:.1f} % word errors at {row['tokens_per_pass']:.2f} tokens "
                "a pass")
        best = next((r for r in rows if r["method"] == row.get("best_car")), None)
        if best and row.get("p_vs_best_car") is not None:
            p = row["p_vs_best_car"]
            better = "better" if row["wer"] < best["wer"] else "worse"
            verdict = "a difference that could be chance" if p > 0.05 else f"the policy is significantly {better}"
            text += (f"; the best fixed size, {best['method']}, {100 * best['wer']:.1f} % ({verdict}, "
                     f"{'p < 0.001' if p < 0.001 else f'p = {p:.3f}'})")
        sentences.append(text + ".")
    corpus = result.get("corpus", {}).get("corpus", {})
    if corpus.get("kind") == "starter":
        sentences.append("The starter corpus is itself synthetic speech: the “recordings” here were made by a "
                         "text-to-speech system, no person was recorded.")
    sentences.append("Synthetic means: every voice below, except in the rows called recording and prompt, was "
                     "generated by the models of this run from text and a short voice prompt.")
    return "<p>" + " ".join(map(escape, sentences)) + "</p>"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    def kind(row: dict[str, Any]) -> str:
        return "reference" if row["kind"] == "reference" else "dcar" if row["method"].startswith("dcar") else "plain"

    columns = main_columns(rows)
    return table([title for title, _ in columns], [[of(r) for _, of in columns] for r in rows],
                 [kind(r) for r in rows])


def _shade(size: int) -> str:
    return CHUNK_COLORS[min(size, len(CHUNK_COLORS)) - 1]


def timeline(emitted: Sequence[int], actions: Sequence[int]) -> str:
    """Chunks along time: a block's width is what was spoken in one pass, its shade the size that was asked for.

    A method that verifies drafts asks for no size (`actions` is empty): there the shade is what was spoken.
    """
    blocks = "".join(
        f"<span style='flex:{int(n)} 1 0;background:{_shade(int(a))}' "
        f"title='{f'{int(a)} asked, ' if actions else ''}{int(n)} spoken'></span>"
        for n, a in zip(emitted, actions or emitted, strict=True) if n > 0)
    return f"<div class=bar role=img aria-label='{len(emitted)} chunks'>{blocks}</div>"


def marked(reference: str, hypothesis: str) -> str:
    """The judge's words as HTML; wrong or extra ones marked, missing ones struck out."""
    a, b = normalize_transcript(reference).split(), normalize_transcript(hypothesis).split()
    parts = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            parts += [escape(" ".join(b[b0:b1]))]
            continue
        if a1 > a0:
            parts.append(f"<del>{escape(' '.join(a[a0:a1]))}</del>")
        if b1 > b0:
            parts.append(f"<ins>{escape(' '.join(b[b0:b1]))}</ins>")
    return " ".join(parts) or "<span class=soft>(nothing)</span>"


def _listen(result: dict[str, Any], folder: Path) -> str:
    samples = result.get("samples", [])
    if not samples:
        return ""
    sizes = sorted({a for s in samples for v in s["voices"] for a in v["actions"] or ()})
    legend = "".join(f"<span><i style='background:{_shade(a)}'></i>{a}</span>" for a in sizes)
    cards = "".join(_card(s, folder) for s in samples)
    return ("<h2>Listen</h2><p>Under every player: the chunks in which the tokens were spoken, and what the recogniser "
            "heard (<ins>wrong or extra words</ins>, <del>missing words</del>).</p>"
            f"<div class=legend><span>tokens asked for in one pass:</span>{legend}</div>{cards}")


def _card(sample: dict[str, Any], folder: Path) -> str:
    prompt = ""
    if sample.get("prompt_audio"):
        prompt = ("<div class=voice><span class=name>prompt</span> <span class=soft>the voice to imitate</span>"
                  f"<audio controls preload=none src='{file_uri(folder / sample['prompt_audio'])}'></audio></div>")
    voices = "".join(_voice(v, sample["text"], folder) for v in sample["voices"])
    return (f"<div class=card><h3>{escape(sample['text'])}</h3><p class=soft>{escape(sample['id'])}, speaker "
            f"{escape(sample['speaker'])}</p>{prompt}{voices}</div>")


def _voice(voice: dict[str, Any], text: str, folder: Path) -> str:
    s, d, i, n = voice["words"]
    facts = [f"{voice['duration']:.1f} s", f"{s + d + i} of {n} words wrong"]
    if voice["emitted"]:
        facts.append(f"{sum(voice['emitted']) / len(voice['emitted']):.2f} tokens a pass")
    if voice["truncated"]:
        facts.append("cut off by the length limit")
    hint = {RECORDING: "as recorded", RESYNTHESIS: "the recording's own tokens through the vocoder"}
    audio = ("<p class=soft>no audio: nothing was spoken</p>" if not voice["audio"] else
             f"<audio controls preload=none src='{file_uri(folder / voice['audio'])}'></audio>")
    bar = timeline(voice["emitted"], voice["actions"]) if voice["emitted"] else ""
    if voice["method"] in hint:
        facts.insert(0, hint[voice["method"]])
    return (f"<div class=voice><span class=name>{escape(voice['method'])}</span> "
            f"<span class=soft>{escape(', '.join(facts))}</span>{audio}{bar}"
            f"<div>{marked(text, voice['hypothesis'])}</div></div>")


def _details(result: dict[str, Any]) -> str:
    shown = {k: v for k, v in result.items() if k not in ("rows", "samples", "equal_speed")}
    return ("<h2>How it was made</h2><details><summary>Judge, sampling, checksums, versions, machine</summary>"
            f"<pre>{escape(json.dumps(shown, indent=1, ensure_ascii=False))}</pre></details>")


# ------------------------------------------------------------------------------------------------- training curves


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a trainer's log.jsonl; an incomplete last line of a running job is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot read the training log ({error})") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError(f"a {type(entry).__name__}, not an object")
            entries.append(entry)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or not UTF-8
            if number < len(lines):
                raise DataError(f"{path}:{number}: not a line of JSON ({error})") from error
    return entries


def series(log: Sequence[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of one logged quantity; of a step the first (a run ends with a second evaluation, of its best
    checkpoint, not of its last step)."""
    found: dict[float, float] = {}
    for i, e in enumerate(log):
        if isinstance(e.get(key), int | float) and not isinstance(e.get(key), bool):
            found.setdefault(float(e.get("step", i)), float(e[key]))
    return list(found), list(found.values())


def curve_keys(log: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Panels (title, keys) that this log can fill: rewards of sampled and forced rollouts first."""
    keys = sorted({k for e in log for k in e})
    train = [k for k in keys if not k.startswith("eval")]
    reward = [k for k in train if "reward" in k and ("sampled" in k or "forced" in k) and "std" not in k]
    panels = [("reward", reward)]
    for title, word in (("tokens per pass", "tokens_per_pass"), ("entropy, nats", "entropy"), ("KL, nats", "kl")):
        panels.append((title, [k for k in train if k == word or k.endswith(("/" + word, "_" + word)) or
                               (word != "kl" and k.startswith(word))]))
    panels.append(("share of actions outside the range", [k for k in train if k == "out_of_range"]))
    panels.append(("dev WER (reward recogniser)", [k for k in keys if k in ("eval_wer", "eval_wer_sampled")]))
    return [(title, found) for title, found in panels if found]


def training_plots(log: Sequence[dict[str, Any]]) -> list[tuple[str, bytes]]:
    """(title, PNG) of every panel that the log can fill. Thin: as logged; thick: running mean."""
    from matplotlib.figure import Figure

    made = []
    for title, keys in curve_keys(log):
        figure = Figure(figsize=(4.4, 3.0), dpi=170, layout="constrained")
        axes = figure.subplots()
        for key in keys:
            steps, values = series(log, key)
            color = "#3b6fb6" if len(keys) > 1 and "sampled" not in key else "#c8442b"
            axes.plot(steps, values, lw=0.8, alpha=0.35, color=color)
            window = max(1, len(values) // 15)
            pieces = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
            axes.plot(steps, [sum(p) / len(p) for p in pieces], lw=1.8, color=color, label=LABELS.get(key, key))
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(keys) > 1:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        made.append((title, buffer.getvalue()))
    return made


LABELS = {"reward_sampled": "sampled by the policy", "reward_forced": "forced sizes", "eval_wer": "greedy",
          "eval_wer_sampled": "sampled"}


def main(arguments: list[str] | None = None) -> None:
    config = load_config(ReportConfig, arguments)
    if not config.compare:
        raise ConfigError("compare: give the folder of a comparison")
    path = write_report(config.compare, config.training_log, config.out)
    print(f"{papers_text(read_comparison(Path(config.compare)))}\n\nwrote {path}")


if __name__ == "__main__":
    sys.exit(run_command("eval.report.page", main))
