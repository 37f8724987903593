"""Find the best sampling of every method: decode dev sentences over methods × samplings.

    dcar tune --config launch/recipes/tune_starter.yaml
    accelerate launch -m eval.compare.tune --config launch/recipes/tune_starter.yaml out=runs/tune

A result at one temperature need not hold at another: between temperature 0.8 and 0.4, CAR-5 loses a
quarter of its word errors, and next-token decoding hardly changes. The sampling of a method is
therefore chosen for that method, on other sentences than those of the comparison. Writes tuned.json
(for `dcar compare tuned=…`). The search is a comparison of methods such as `car-5@t0.4`, with the
same records. An interrupted run continues, and added methods, samplings, seeds or utterances only
cost what is missing.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from dcar.config import check, load_config, save_config, setting
from dcar.errors import ConfigError
from dcar.process import own_device, run_claimed, run_command
from dcar.prompts.texts import SPLIT
from dcar.speak.defaults import NUM_CANDIDATES
from dcar.storage import writing
from dcar.tracking import write_json
from eval.compare.run import CompareConfig, load_tools, run, start
from eval.compare.tuned import FORMAT_VERSION
from eval.methods.registry import Models
from eval.methods.spec import MethodSpec, expand_sweep, read_methods, sampling_word, split_sampling
from eval.results.rows import Row, compare_records
from eval.results.store import Record, Tools, by_method, read_jsonl


@dataclass
class TuneConfig(CompareConfig):
    """Settings of the search for each method's sampling: those of a comparison, with other
    defaults, and `samplings`.

    `sampling` is the common sampling; it supplies the values that an entry of `samplings` omits.
    """

    out: str = "runs/tune"
    split: str = "dev"  # never the one on which the methods are compared
    limit: int = 96
    scorers: list[str] = setting([], "See `dcar compare`.")
    timing_utterances: int = 0
    audio_utterances: int = 0
    references: bool = False
    report: bool = False
    methods: list[str | dict[str, Any]] = setting(
        [],
        "Methods without a sampling; empty = car-1 … car-K, dcar, and dcar@n4 if a policy can "
        "choose among candidates.",
    )
    samplings: list[str] = setting(
        ["t{0,0.2,0.4,0.6,0.8,1}", "t1-k0"],
        "Samplings to try, in the notation that follows @ in a method's name.",
    )

    def __post_init__(self) -> None:
        check(self)
        words = list(map(sampling_word, read_samplings(self.samplings)))
        if not words:
            raise ConfigError(
                "samplings: empty, so there is nothing to choose from; write "
                "samplings=[t0,t0.4,t0.8]"
            )
        if len(set(words)) != len(words):
            raise ConfigError(f"samplings must differ: {words}")
        if sampled := [str(spec) for spec in read_methods(self.methods) if spec.sampling]:
            raise ConfigError(
                f"methods {sampled}: tuning chooses the samplings; write these methods without one"
            )
        if self.texts != [SPLIT]:
            raise ConfigError(
                "texts is a setting of `dcar compare`; tune on a split, never on texts that "
                "methods are compared on"
            )
        if self.tuned:
            raise ConfigError("tuned is a setting of `dcar compare`; `dcar tune` writes that file")
        # raises for settings that no comparison can run with
        CompareConfig(**self.compared([f"car-1@{words[0]}"]))

    def compared(self, methods: Sequence[str | dict[str, Any]]) -> dict[str, Any]:
        """Return the settings of the comparison of these methods."""
        return {f.name: getattr(self, f.name) for f in fields(CompareConfig)} | {
            "methods": list(methods)
        }


POINT = (
    "temperature top_k top_p wer wer_ci tokens_per_pass variety variety_ci "
    "duration_spread longest_run longest_run_max loop_rate truncation_rate "
    "duration_ratio n records"
).split()


def read_samplings(words: Sequence[str]) -> list[dict[str, Any]]:
    """Read samplings such as t0.4-k10, with sweeps expanded. Raises ConfigError for one that cannot
    be read."""
    samplings = []
    for word in (expanded for item in words for expanded in expand_sweep(item)):
        try:
            samplings.append(dict(MethodSpec.parse(f"car-1@{word}").sampling))
        except ConfigError as error:
            raise ConfigError(
                f"sampling '{word}': write temperature, then top-k, then top-p, as in t0.4 or "
                "t0.8-k10-p0.9"
            ) from error
    return samplings


def default_methods(models: Models) -> list[str]:
    """Return car-1 … car-K, the policies if there are any, and the policies that can choose
    among candidates, with the default number of them."""
    sizes = range(1, models.decoder.config.num_prediction_heads + 1)
    named = {f"dcar@{name}" if name else "dcar": policy for name, policy in models.policies.items()}
    drawn = [
        f"{name}@n{NUM_CANDIDATES}"
        for name, policy in named.items()
        if policy.chunk_scorer is not None
    ]
    return [*(f"car-{k}" for k in sizes), *named, *drawn]


def tune(config: TuneConfig, tools: Tools | None = None) -> dict[str, Any]:
    """Decode the grid and return the content of tuned.json (on every process). `tools` replaces
    what the config would load.

    Raises the same errors as a comparison. Finished records stay in `out`, and the next run uses
    them.
    """
    state, meeting = start(config)
    tools = tools or load_tools(config, own_device(config.device))
    methods = read_methods(config.methods or default_methods(tools.models))
    grid = CompareConfig(
        **config.compared(
            [
                replace(spec, sampling=sampling).to_mapping()
                for spec in methods
                for sampling in read_samplings(config.samplings)
            ]
        )
    )
    result = run(grid, tools)
    out = Path(config.out)
    search = summary(result, list(read_jsonl(out / "records.jsonl")), config.resamples)
    if state.is_main_process:
        with writing(out):
            write_json(out / "tuned.json", search)
            save_config(config, out / "tune.yaml")
    meeting.wait("writing tuned.json")
    return search


def summary(result: dict[str, Any], records: Sequence[Record], resamples: int) -> dict[str, Any]:
    """Return the content of tuned.json from a comparison over methods × samplings: for every
    method the grid and the point with the fewest word errors."""
    spoken = by_method(records)
    grids: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["kind"] == "method":
            own, _ = split_sampling(row["settings"])
            grids.setdefault(str(MethodSpec.from_mapping(own)), []).append(row)
    methods = {}
    for method, rows in grids.items():
        # at equal WER, the higher temperature
        best = min(rows, key=lambda r: (r["wer"], -r["temperature"]))
        points = []
        for row in rows:
            test = compare_records(spoken[row["method"]], spoken[best["method"]], resamples)
            points.append(
                {
                    "name": _word(row),
                    **{k: row[k] for k in POINT},
                    "difference_to_best": test.difference,
                    "p_to_best": test.p_value if row is not best else 1.0,
                }
            )
        methods[method] = {
            "best": _word(best),
            "sampling": {k: best[k] for k in ("temperature", "top_k", "top_p")},
            "wer": best["wer"],
            "wer_ci": best["wer_ci"],
            # points that may be first by chance
            "not_worse": [
                p["name"] for p in points if p["p_to_best"] is None or p["p_to_best"] > 0.05
            ],
            "identity": {
                k: v for k, v in result["methods"][best["method"]].items() if k != "sampling"
            },
            "grid": points,
        }
    kept = "recognizer normalizer seeds prompt_seeds utterances corpus models provenance".split()
    return {
        "format_version": FORMAT_VERSION,
        "methods": methods,
        "common": result["sampling"],
        "split": result["corpus"].get("split", result["config"]["split"]),
        **{k: result[k] for k in kept},
    }


def _word(row: Row) -> str:
    return sampling_word(split_sampling(row["settings"])[1])


def mark(tuned: dict[str, Any], sampling: str) -> str:
    """Return the mark of a sampling in `table`, given a method's entry in tuned.json."""
    if sampling == tuned["best"]:
        return "*"
    return "'" if sampling in tuned["not_worse"] else " "


def table(search: dict[str, Any]) -> str:
    """Format WER by method and sampling; * marks the best, ' those that do not differ from it
    beyond chance."""
    words = list(dict.fromkeys(p["name"] for m in search["methods"].values() for p in m["grid"]))
    wide = max(len(m) for m in search["methods"])
    lines = [
        f"{'WER %':{wide}}"
        + "".join(f"{word:>9}" for word in words)
        + "   tokens per pass at the best"
    ]
    for method, tuned in search["methods"].items():
        cells = {p["name"]: f"{100 * p['wer']:8.2f}{mark(tuned, p['name'])}" for p in tuned["grid"]}
        best = next(p for p in tuned["grid"] if p["name"] == tuned["best"])
        lines.append(
            f"{method:{wide}}"
            + "".join(f"{cells.get(word, '–'):>9}" for word in words)
            + f"   {best['tokens_per_pass']:.2f}"
        )
    seeds, prompts = (", ".join(map(str, search[k])) for k in ("seeds", "prompt_seeds"))
    return "\n".join(
        [
            *lines,
            f"* best, ' not worse beyond chance (p > 0.05). {search['utterances']} utterances of "
            f"split {search['split']} × seeds {seeds} × prompts {prompts}, recogniser "
            f"{search['recognizer']}.",
        ]
    )


CONFIG = TuneConfig


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(CONFIG, arguments)
    search = run_claimed(tune, config)
    state = PartialState()
    if state.is_main_process:
        print(table(search))
        print(f"\nwrote {config.out}/tuned.json")
    state.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_command("eval.compare.tune", main))
