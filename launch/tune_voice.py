"""From recordings of one speaker to a voice: fine-tune a decoder, and say whether that made it better before anyone
takes it.

    dcar tune-voice recordings=my_voice out=runs/voice              # a folder with metadata.csv and wavs/
    dcar tune-voice data=runs/prepared recipe=finetune_far_starter out=runs/voice_far
    dcar tune-voice data=runs/prepared training=[max_steps=30,learning_rate=5e-5] out=runs/voice

Three steps, each of which goes on where it was stopped: the recordings are prepared (`dcar prepare`); the recipe is run
(`dcar train`), which chooses its best step by dev sentences that it speaks; and held-out sentences, which chose
nothing, are spoken by the decoder that training started from and by the tuned one, with the same prompts, draws and
sampling. The tuned one is recommended where the interval of the paired difference of word errors lies below zero, and
the other one wherever it does not. `voice.json` keeps what was found.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.model.load import load_decoder
from dcar.prepare.prepared import prepared_info
from dcar.prepare.run import PrepareConfig
from dcar.prepare.run import run as prepare
from dcar.process import run_command
from dcar.sources.shipped import resolve
from dcar.storage import writing
from dcar.tracking import provenance, write_json
from dcar.train.car import TrainConfig
from dcar.train.car import run as train
from eval.compare.run import CompareConfig
from eval.compare.run import run as compare
from eval.results.rows import compare_records
from eval.results.store import RECORDING, RESYNTHESIS, Record, Tools, read_jsonl

RECIPES = Path(__file__).parent / "recipes"
FORMAT_VERSION = 1
Spoken = dict[str, list[Record]]  # method, or reference -> its records
FEW = 20  # held-out sentences, below which an interval says little


@dataclass
class TuneVoiceConfig:
    """Settings of `dcar tune-voice`. How the decoder is trained, and how both speak, stands in the recipe."""

    recordings: str = setting("", "LJSpeech folder of one speaker: metadata.csv and wavs/. Empty = `data`.")
    data: str = setting("", "Folder written by `dcar prepare`, with train, dev and held-out split, instead.")
    recipe: str = setting("finetune_starter", "Of dcar train: a name in launch/recipes, or a YAML file.")
    training: list[str] = setting([], "Settings of the recipe that differ, as [max_steps=30,learning_rate=5e-5].")
    out: str = setting("runs/voice", "Folder to write.", place="folder")
    dev_fraction: float = setting(0.15, "Of `recordings`: sentences by which the best step is chosen.", above=0,
                                  below=1)
    test_fraction: float = setting(0.2, "Of `recordings`: sentences on which both decoders are compared.", above=0,
                                   below=1)
    skip_bad: bool = setting(False, "Of `recordings`: go on without bad rows instead of stopping.")
    split: str = setting("test", "Held-out split of the comparison; never train or dev.")
    sentences: int = setting(0, "Of that split; 0 = all.", minimum=0)
    seeds: list[int] = seed_setting([0, 1], "Every held-out sentence is spoken once with each.")
    temperatures: list[float] = setting([], "Besides that of the recipe's spoken.sampling, which decides.", minimum=0)
    resamples: int = setting(4000, "Of the bootstrap.", minimum=100)

    def __post_init__(self) -> None:
        check(self)
        if bool(self.recordings) == bool(self.data):
            raise ConfigError("give the recordings (recordings=FOLDER with metadata.csv and wavs/) or a prepared "
                              "corpus (data=FOLDER of dcar prepare), one of the two")
        if self.split in ("train", "dev"):
            raise ConfigError(f"split={self.split}: the tuned decoder was trained on train and chosen by dev; compare "
                              "on sentences that did neither")


def training_config(config: TuneVoiceConfig, data: str) -> TrainConfig:
    """The recipe with its data and place. ConfigError where it starts from no decoder, or there is no such recipe."""
    named = RECIPES / f"{config.recipe}.yaml"
    path = named if named.is_file() else Path(config.recipe)
    if not path.is_file():
        raise ConfigError(f"recipe={config.recipe}: neither a file nor one of "
                          f"{', '.join(sorted(p.stem for p in RECIPES.glob('finetune_*.yaml')))}")
    found = load_config(TrainConfig, ["--config", str(path), f"data={data}", f"out={Path(config.out) / 'car'}",
                                      *config.training])
    if not (found.init_from or found.backbone.path):
        raise ConfigError(f"{path}: trains from scratch; a voice is tuned from a decoder that there is (init_from, or "
                          "backbone.path)")
    return found


def tune_voice(config: TuneVoiceConfig, tools: Callable[[CompareConfig], Tools] | None = None) -> dict[str, Any]:
    """Prepare, train, compare; returns what voice.json holds. `tools` replaces what the comparisons would load.

    Raises what these three raise; DataError where the corpus lacks a split that is needed.
    """
    out = Path(config.out)
    data = config.data or prepared_recordings(config)
    recipe = training_config(config, data)
    counts = prepared_info(data)["counts"]
    if missing := [s for s in ("train", "dev", config.split) if not counts.get(s, {}).get("utterances")]:
        raise DataError(f"{data}: nothing in split {', '.join(missing)}; a voice needs sentences to train on, to "
                        "choose by and to judge by: record more, or give the splits as docs/data.md says")
    start = recipe.backbone.path or str(resolve(recipe.init_from, started_from(recipe)))
    tuned = train(recipe)
    before = load_decoder(start)
    size = min(recipe.spoken.chunk, before.config.num_prediction_heads)
    spoken = {"start": speak(config, recipe, start, size, tools)}
    if tuned.checksum() != before.checksum():
        spoken["tuned"] = speak(config, recipe, recipe.out, size, tools)
    found = {**summary(config, recipe, spoken, size), "start": start, "tuned": recipe.out,
             "judge": recipe.spoken.recognizer, "split": config.split, "seeds": config.seeds,
             "data": {"path": data, "counts": counts}, "provenance": provenance()}
    found["recommended"] = found["tuned" if found["tuned_is_better"] else "start"]
    with writing(out):
        write_json(out / "voice.json", found)
        save_config(config, out / "tune_voice.yaml")
    return found


def started_from(recipe: TrainConfig) -> Any:
    """Which of the shipped decoders `init_from=starter` means."""
    return "far" if recipe.model.num_prediction_heads == 1 else "decoder"


def prepared_recordings(config: TuneVoiceConfig) -> str:
    """The recordings, prepared in `out`."""
    folder = str(Path(config.out) / "prepared")
    report = prepare(PrepareConfig(out=folder, corpus="ljspeech", path=config.recordings, skip_bad=config.skip_bad,
                                   dev_fraction=config.dev_fraction, test_fraction=config.test_fraction))
    logging.getLogger(__name__).info("%s", report.counts)
    return folder


def speak(config: TuneVoiceConfig, recipe: TrainConfig, decoder: str, size: int,
          tools: Callable[[CompareConfig], Tools] | None) -> Spoken:
    """Records of the held-out sentences by method, spoken by one decoder as the recipe says, at every temperature."""
    said, first = recipe.spoken, decoder != recipe.out
    out = Path(config.out) / ("spoken_start" if first else "spoken_tuned")
    compared = CompareConfig(
        data=recipe.data, split=config.split, decoder=decoder, methods=methods(config, recipe, size),
        seeds=config.seeds, limit=config.sentences, prompt_tokens=recipe.prompt_tokens, vocoder=said.vocoder,
        judge=said.recognizer, similarity="", noise_quality_utterances=0, timing_utterances=0, audio_samples=0,
        reasons_utterances=0, references=first, report=False, resamples=config.resamples, out=str(out),
        sampling=said.sampling)
    compare(compared, tools(compared) if tools else None)
    found: Spoken = {}
    for record in read_jsonl(out / "records.jsonl"):
        found.setdefault(record["method"], []).append(record)
    return found


def methods(config: TuneVoiceConfig, recipe: TrainConfig, size: int) -> list[str]:
    """car-5@t0.4, and the same at the other temperatures; the first decides."""
    return [f"car-{size}@t{t:g}" for t in dict.fromkeys([recipe.spoken.sampling.temperature, *config.temperatures])]


def rate(records: Sequence[Record]) -> float:
    """The corpus word error rate."""
    return sum(sum(r["words"][:3]) for r in records) / sum(r["words"][3] for r in records)


def summary(config: TuneVoiceConfig, recipe: TrainConfig, spoken: dict[str, Spoken], size: int) -> dict[str, Any]:
    """Both decoders' word errors at every temperature with their paired difference (tuned - start), those of the
    recordings and of their resynthesis, and the advice."""
    rows = []
    for method in methods(config, recipe, size):
        before = spoken["start"][method]
        row: dict[str, Any] = {"method": method, "start": rate(before), "sentences": len({r["id"] for r in before})}
        if "tuned" in spoken:
            after = spoken["tuned"][method]
            test = compare_records(after, before, config.resamples)
            row |= {"tuned": rate(after), "difference": test.difference, "difference_ci": [test.low, test.high],
                    "p": test.p_value, "detectable": test.detectable}
        rows.append(row)
    bounds = {name: rate(spoken["start"][name]) for name in (RECORDING, RESYNTHESIS) if name in spoken["start"]}
    better = "difference" in rows[0] and rows[0]["difference_ci"][1] < 0
    return {"format_version": FORMAT_VERSION, "tuned_is_better": better, "advice": advice(rows), "rows": rows,
            "bounds": bounds}


def advice(rows: Sequence[dict[str, Any]]) -> str:
    """What to take, in words, by the first row."""
    row = rows[0]
    if "difference" not in row:
        return ("Take the decoder as it was: no step of the training spoke the dev sentences better than it, so there "
                "is nothing to compare.")
    low, high = (100 * x for x in row["difference_ci"])
    found = (f"{100 * row['tuned']:.1f} % word errors instead of {100 * row['start']:.1f}, a difference of "
             f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})")
    power = (f"With {row['sentences']} sentences a true difference of {100 * row['detectable']:.1f} points would have "
             "been seen in four of five such comparisons")
    few = f" {row['sentences']} sentences are few: their interval is too narrow." if row["sentences"] < FEW else ""
    if high < 0:
        return f"Take the tuned decoder: {found}.{few}"
    if low > 0:
        return f"Take the decoder as it was, the tuned one is worse: {found}.{few}"
    return f"Take the decoder as it was: the tuned one is not better beyond chance: {found}. {power}.{few}"


def table(found: dict[str, Any]) -> str:
    """The figures, the advice, and how to speak with what is recommended."""
    rows = found["rows"]
    wide = max(len(row["method"]) for row in rows)
    lines = [f"{'':{wide}}   as it was     tuned   difference (95 %)"]
    for row in rows:
        line = f"{row['method']:{wide}}   {100 * row['start']:7.1f} %"
        if "difference" in row:
            low, high = (100 * x for x in row["difference_ci"])
            line += f"   {100 * row['tuned']:5.1f} %   {100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
        lines.append(line)
    bounds = "; ".join(f"{name} {100 * wer:.1f} %" for name, wer in found["bounds"].items())
    seeds = ", ".join(map(str, found["seeds"]))
    lines += [f"Word errors of {rows[0]['sentences']} held-out sentences × seeds {seeds}, judge {found['judge']}"
              + (f"; {bounds}." if bounds else "."), "", found["advice"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(TuneVoiceConfig, arguments)
    found = tune_voice(config)
    print(table(found))
    chunk = found["rows"][0]["method"].partition("@")[0]
    print(f"\nwrote {config.out}/voice.json. To hear it: dcar speak \"…\" decoder={found['recommended']} "
          f"method={chunk} prompt=RECORDING.wav -o out.wav")


if __name__ == "__main__":
    sys.exit(run_command("launch.tune_voice", main))
