"""Find the best sampling of every method: decode dev sentences over methods × samplings.

    dcar tune --config tune_starter
    accelerate launch -m dcar.cli tune --config tune_starter out=runs/tune

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
from dcar.methods import MethodSpec, Models, read_methods
from dcar.methods.names import expand_sweep, sampling_word, split_sampling
from dcar.process import own_device, run_claimed, run_command
from dcar.prompts.texts import SPLIT
from dcar.sampling import SamplingConfig
from dcar.speak.defaults import NUM_CANDIDATES
from dcar.storage import write_text, writing
from eval.compare.config import CompareConfig
from eval.compare.processes import start
from eval.compare.run import run
from eval.compare.tools import Tools, load_tools
from eval.compare.tuned import Point, Search, TunedMethod
from eval.results.rows import counts_of
from eval.results.stats import paired_test
from eval.results.types import Record, Result, Row, read_records, to_json


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


def tune(config: TuneConfig, tools: Tools | None = None) -> Search:
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
    search = summary(result, read_records(out / "records.jsonl"), config.resamples)
    if state.is_main_process:
        with writing(out):
            write_text(out / "tuned.json", to_json(search, indent=1) + "\n")
            save_config(config, out / "tune.yaml")
    meeting.wait("writing tuned.json")
    return search


def summary(result: Result, records: Sequence[Record], resamples: int) -> Search:
    """Return the content of tuned.json from a comparison over methods × samplings: for every
    method the grid and the point with the fewest word errors."""
    counts = counts_of(records)
    grids: dict[str, list[Row]] = {}
    for row in result.first.spoken:
        grids.setdefault(str(MethodSpec.from_mapping(row.spec or {}).plain), []).append(row)
    methods = {}
    for method, rows in grids.items():
        # at equal WER, the higher temperature
        best = min(rows, key=lambda row: (row.wer.value, -_sampling(row).temperature))
        points = []
        for row in rows:
            test = paired_test(*counts[row.method], *counts[best.method], resamples=resamples)
            points.append(_point(row, test.difference, test.p_value if row is not best else 1.0))
        methods[method] = TunedMethod(_word(best), result.methods[best.method], points)
    return Search(
        methods=methods,
        common=result.sampling,
        split=result.corpus.get("split", result.config["split"]),
        recognizer=result.recognizer,
        normalizer=result.normalizer,
        seeds=result.seeds,
        prompt_seeds=result.prompt_seeds,
        utterances=result.first.utterances,
        corpus=result.corpus,
        models=result.models,
        provenance=result.provenance,
    )


def _point(row: Row, difference: float, p_value: float | None) -> Point:
    sampling = _sampling(row)
    assert row.tokens_per_pass is not None
    assert row.variety is not None
    assert row.truncation_rate is not None
    return Point(
        name=_word(row),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        wer=row.wer,
        tokens_per_pass=row.tokens_per_pass,
        variety=row.variety,
        truncation_rate=row.truncation_rate,
        duration_ratio=row.duration_ratio,
        n=row.n,
        records=row.records,
        difference=difference,
        p_value=p_value,
    )


def _sampling(row: Row) -> SamplingConfig:
    assert row.sampling is not None
    return row.sampling


def _word(row: Row) -> str:
    return sampling_word(split_sampling(row.spec or {})[1])


def mark(tuned: TunedMethod, point: Point) -> str:
    """Return the mark of a sampling in `table`."""
    if point.name == tuned.best:
        return "*"
    return "'" if point.not_worse else " "


def table(search: Search) -> str:
    """Format WER by method and sampling; * marks the best, ' those that do not differ from it
    beyond chance."""
    words = list(dict.fromkeys(p.name for m in search.methods.values() for p in m.grid))
    wide = max(len(m) for m in search.methods)
    lines = [
        f"{'WER %':{wide}}"
        + "".join(f"{word:>9}" for word in words)
        + "   tokens per pass at the best"
    ]
    for method, tuned in search.methods.items():
        cells = {p.name: f"{100 * p.wer.value:8.2f}{mark(tuned, p)}" for p in tuned.grid}
        lines.append(
            f"{method:{wide}}"
            + "".join(f"{cells.get(word, '–'):>9}" for word in words)
            + f"   {tuned.point.tokens_per_pass:.2f}"
        )
    seeds, prompts = (", ".join(map(str, of)) for of in (search.seeds, search.prompt_seeds))
    return "\n".join(
        [
            *lines,
            f"* best, ' not worse beyond chance (p > 0.05). {search.utterances} utterances of "
            f"split {search.split} × seeds {seeds} × prompts {prompts}, recogniser "
            f"{search.recognizer}.",
        ]
    )


CONFIG = TuneConfig


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(CONFIG, arguments)
    search = run_claimed(tune, config, resumes=True)
    if PartialState().is_main_process:
        print(table(search))
        print(f"\nwrote {config.out}/tuned.json")


if __name__ == "__main__":
    sys.exit(run_command("eval.compare.tune", main))
