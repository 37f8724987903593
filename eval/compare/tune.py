"""Every method at its own best sampling: development sentences spoken over methods × samplings.

    dcar tune --config launch/recipes/tune_starter.yaml
    accelerate launch -m eval.compare.tune --config launch/recipes/tune_starter.yaml out=runs/tune

What holds at one temperature need not hold at another: CAR-5 loses a quarter of its word errors
between temperature 0.8 and 0.4 where next-token decoding hardly moves. So the sampling of a method
is chosen for that method, on other sentences than it is compared on. Writes tuned.json (which `dcar
compare tuned=…` takes). It is a comparison of `car-5@t0.4` and its like: the same records, so an
interrupted run continues, and more methods, samplings, seeds or utterances only add what is
missing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from dcar.config import check, load_config, save_config, setting
from dcar.errors import ConfigError
from dcar.process import run_claimed, run_command
from dcar.speak.defaults import NUM_CANDIDATES
from dcar.storage import writing
from dcar.tracking import write_json
from eval.compare.run import CompareConfig, load_tools, run, start
from eval.compare.tuned import FORMAT_VERSION
from eval.methods.families import parse_method
from eval.methods.registry import Models
from eval.methods.sweeps import read_methods, read_samplings
from eval.results.rows import compare_records
from eval.results.store import Record, Tools, by_method, read_jsonl


@dataclass
class TuneConfig(CompareConfig):
    """Settings of the search for each method's sampling: those of a comparison, with other
    defaults, and `samplings`.

    `sampling` is the common one, from which a sampling of the grid takes what it does not say.
    """

    split: str = setting(
        "dev", "Split that is spoken; never the one on which the methods are compared."
    )
    methods: list[str | dict[str, Any]] = setting(
        [],
        "Methods without a sampling; empty = car-1 … car-K, dcar, and dcar@n4 where a policy can "
        "choose among "
        "candidates.",
    )
    samplings: list[str] = setting(
        ["t{0,0.2,0.4,0.6,0.8,1}", "t1-k0"], "As they stand behind @ in a name."
    )
    limit: int = setting(96, "Utterances; 0 = the whole split.", minimum=0)
    similarity: str = setting("", "Of voices; empty = none.")
    timing_utterances: int = setting(
        0, "Spoken by every method at batch 1; 0 = no timings.", minimum=0
    )
    audio_samples: int = setting(0, "Utterances whose audio is kept.", minimum=0)
    reasons_utterances: int = setting(
        0, "Spoken once more, watched, for why chunks end where they do; 0 = off.", minimum=0
    )
    references: bool = setting(False, "The rows of the recordings and of their resynthesis.")
    report: bool = setting(False, "Write report.html.")
    out: str = setting("runs/tune", "Folder to write.", place="folder")

    def __post_init__(self) -> None:
        check(self)
        words = [own.word for own in read_samplings(self.samplings)]
        if not words:
            raise ConfigError("samplings: nothing to choose from; write samplings=[t0,t0.4,t0.8]")
        if len(set(words)) != len(words):
            raise ConfigError(f"samplings must differ: {words}")
        if said := [str(spec) for spec in read_methods(self.methods) if spec.sampling]:
            raise ConfigError(
                f"methods {said}: tuning gives them their samplings; write them without"
            )
        if self.texts:
            raise ConfigError(
                "texts is a setting of `dcar compare`; tune on a split, never on texts that "
                "methods are "
                "compared on"
            )
        if self.tuned:
            raise ConfigError("tuned is a setting of `dcar compare`; `dcar tune` writes that file")
        CompareConfig(**self.compared([f"car-1@{words[0]}"]))  # refuses what no comparison can run

    def compared(self, methods: Sequence[str]) -> dict[str, Any]:
        """The settings of the comparison of these methods."""
        return {f.name: getattr(self, f.name) for f in fields(CompareConfig)} | {
            "methods": list(methods)
        }


POINT = (
    "temperature",
    "top_k",
    "top_p",
    "wer",
    "wer_ci",
    "tokens_per_pass",
    "variety",
    "variety_ci",
    "duration_spread",
    "longest_run",
    "longest_run_max",
    "loop_rate",
    "truncation_rate",
    "duration_ratio",
    "n",
    "records",
)


def default_methods(models: Models) -> list[str]:
    """car-1 … car-K, the policies where there are some, and those that can choose among several
    chunks drawn side by side with as many of them as they speak with."""
    sizes = range(1, models.decoder.config.num_prediction_heads + 1)
    named = {f"dcar@{name}" if name else "dcar": policy for name, policy in models.policies.items()}
    drawn = [
        f"{name}@n{NUM_CANDIDATES}"
        for name, policy in named.items()
        if policy.chunk_scorer is not None
    ]
    return [*(f"car-{k}" for k in sizes), *named, *drawn]


def tune(config: TuneConfig, tools: Tools | None = None) -> dict[str, Any]:
    """Speak the grid; returns what tuned.json holds (on every process). `tools` replaces what the
    config would load.

    Raises what a comparison raises; finished records stay in `out` and are used again.
    """
    state, meeting = start(config)
    tools = tools or load_tools(config, config.device or str(state.device))
    methods = read_methods(config.methods or default_methods(tools.models))
    grid = CompareConfig(
        **config.compared(
            [
                str(replace(spec, sampling=own.sampling))
                for spec in methods
                for own in read_samplings(config.samplings)
            ]
        )
    )
    result = run(grid, tools)
    out = Path(config.out)
    found = summary(result, list(read_jsonl(out / "records.jsonl")), config.resamples)
    if state.is_main_process:
        with writing(out):
            write_json(out / "tuned.json", found)
            save_config(config, out / "tune.yaml")
    meeting.wait("writing tuned.json")
    return found


def summary(result: dict[str, Any], records: Sequence[Record], resamples: int) -> dict[str, Any]:
    """tuned.json of a comparison over methods × samplings: of every method the grid, and the
    point of fewest errors."""
    spoken = by_method(records)
    grids: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["kind"] == "method":
            grids.setdefault(parse_method(row["method"]).base, []).append(row)
    methods = {}
    for method, rows in grids.items():
        best = min(rows, key=lambda r: (r["wer"], -r["temperature"]))  # at equal WER the livelier
        points = []
        for row in rows:
            test = compare_records(spoken[row["method"]], spoken[best["method"]], resamples)
            points.append(
                {
                    "name": parse_method(row["method"]).sampling,
                    **{k: row[k] for k in POINT},
                    "difference_to_best": test.difference,
                    "p_to_best": test.p_value if row is not best else 1.0,
                }
            )
        methods[method] = {
            "best": parse_method(best["method"]).sampling,
            "sampling": {k: best[k] for k in ("temperature", "top_k", "top_p")},
            "wer": best["wer"],
            "wer_ci": best["wer_ci"],
            # what chance could have put first
            "not_worse": [p["name"] for p in points if p["p_to_best"] > 0.05],
            "identity": {
                k: v for k, v in result["methods"][best["method"]].items() if k != "sampling"
            },
            "grid": points,
        }
    kept = (
        "asr",
        "normalizer",
        "seeds",
        "prompt_seeds",
        "utterances",
        "corpus",
        "models",
        "provenance",
    )
    return {
        "format_version": FORMAT_VERSION,
        "methods": methods,
        "common": result["sampling"],
        "split": result["corpus"].get("split", result["config"]["split"]),
        **{k: result[k] for k in kept},
    }


def table(found: dict[str, Any]) -> str:
    """WER by method and sampling; * the best, ' what does not differ from it beyond chance."""
    words = list(dict.fromkeys(p["name"] for m in found["methods"].values() for p in m["grid"]))
    wide = max(len(m) for m in found["methods"])
    lines = [
        f"{'WER %':{wide}}"
        + "".join(f"{word:>9}" for word in words)
        + "   tokens a pass at the best"
    ]
    for method, of in found["methods"].items():
        marks = {
            p["name"]: "*"
            if p["name"] == of["best"]
            else "'"
            if p["name"] in of["not_worse"]
            else " "
            for p in of["grid"]
        }
        wers = {p["name"]: f"{100 * p['wer']:8.2f}{marks[p['name']]}" for p in of["grid"]}
        speed = next(p["tokens_per_pass"] for p in of["grid"] if p["name"] == of["best"])
        lines.append(
            f"{method:{wide}}"
            + "".join(f"{wers.get(word, '–'):>9}" for word in words)
            + f"   {speed:.2f}"
        )
    seeds, prompts = (", ".join(map(str, found[k])) for k in ("seeds", "prompt_seeds"))
    return "\n".join(
        [
            *lines,
            f"* best, ' not worse beyond chance (p > 0.05). {found['utterances']} utterances of "
            f"split {found['split']} × seeds {seeds} × prompts {prompts}, ASR {found['asr']}.",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(TuneConfig, arguments)
    found = run_claimed(tune, config)
    state = PartialState()
    if state.is_main_process:
        print(table(found))
        print(f"\nwrote {config.out}/tuned.json")
    state.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_command("eval.compare.tune", main))
