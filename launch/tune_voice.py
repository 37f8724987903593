"""From recordings of one speaker to a voice: fine-tune a decoder, and say whether that made it better before anyone
takes it.

    dcar tune-voice recordings=my_voice out=runs/voice              # a folder with metadata.csv and wavs/
    dcar tune-voice data=runs/prepared recipe=finetune_far_starter out=runs/voice_far
    dcar tune-voice data=runs/prepared training=[max_steps=60,learning_rate=5e-5] out=runs/voice

Four steps, each of which goes on where it was stopped. The recordings are prepared (`dcar prepare`). The recipe is run
(`dcar train`). Decoders on the way from the one that training started from to the tuned one, w0 + share (w1 - w0) of
the weights (WiSE-FT, Wortsman et al. 2022), speak dev sentences, and the one of fewest word errors is chosen; among
those that come close to it the one that is nearest to the voice. Last, held-out sentences, which chose nothing, are
spoken by the decoder as it was and by the chosen one, with the same prompts, draws and sampling.

`dcar speak` says one sentence at a time, so texts of one sentence choose and decide; those of several are told besides.
The tuned decoder is recommended where its word errors are fewer beyond chance; and where it is nearer to the voice or
to its pace beyond chance, farther from neither beyond chance, and the interval of the difference of word errors ends
below `margin`. Otherwise the one as it was is.
`voice.json` keeps what was found.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.prepare.prepared import prepared_info
from dcar.prepare.run import PrepareConfig
from dcar.prepare.run import run as prepare
from dcar.process import run_command
from dcar.sources.shipped import resolve
from dcar.speak.phrases import split_sentences
from dcar.storage import writing
from dcar.tracking import provenance, write_json
from dcar.train.car import TrainConfig
from dcar.train.car import run as train
from eval.compare.run import CompareConfig, load_tools, start
from eval.compare.run import run as compare
from eval.results.rows import compare_records
from eval.results.stats import PairedTest, paired_test
from eval.results.store import RECORDING, RESYNTHESIS, Record, Tools, read_jsonl

RECIPES = Path(__file__).parent / "recipes"
FORMAT_VERSION = 3  # 3: pace decides too
Spoken = dict[str, list[Record]]  # method, or reference -> its records
FEW = 20  # held-out sentences, below which an interval says little
SIMILARITY = "speaker_similarity"  # of a record: cosine to the voice of the prompt


@dataclass
class TuneVoiceConfig:
    """Settings of `dcar tune-voice`. How the decoder is trained, and how both speak, stands in the recipe."""

    recordings: str = setting("", "LJSpeech folder of one speaker: metadata.csv and wavs/. Empty = `data`.")
    data: str = setting("", "Folder written by `dcar prepare`, with train, dev and held-out split, instead.")
    recipe: str = setting("finetune_starter", "Of dcar train: a name in launch/recipes, or a YAML file.",
                         names=sorted(p.stem for p in RECIPES.glob("finetune_*.yaml")))
    training: list[str] = setting([], "Settings of the recipe that differ, as [max_steps=30,learning_rate=5e-5].")
    out: str = setting("runs/voice", "Folder to write.", place="folder")
    shares: list[float] = setting([0.25, 0.5, 0.75, 1.0], "Of the way from the decoder as it was to the tuned one: "
                                  "among these and the one as it was dev sentences choose.", above=0, maximum=1)
    close: float = setting(0.02, "Word error rate above the lowest on dev, up to which the nearest voice is chosen.",
                           minimum=0)
    margin: float = setting(0.03, "Word error rate that a nearer voice or pace may cost on held-out sentences: the "
                                  "interval must end below it.", minimum=0)
    dev_fraction: float = setting(0.15, "Of `recordings`: sentences that choose.", above=0, below=1)
    test_fraction: float = setting(0.2, "Of `recordings`: sentences on which both decoders are compared.", above=0,
                                   below=1)
    skip_bad: bool = setting(False, "Of `recordings`: go on without bad rows instead of stopping.")
    split: str = setting("test", "Held-out split of the comparison; never train or dev.")
    sentences: int = setting(0, "Of dev and of that split; 0 = all.", minimum=0)
    seeds: list[int] = seed_setting([0, 1], "Every dev and held-out sentence is spoken once with each.")
    temperatures: list[float] = setting([], "Besides that of the recipe's spoken.sampling, which decides.", minimum=0)
    resamples: int = setting(4000, "Of the bootstrap.", minimum=100)

    def __post_init__(self) -> None:
        check(self)
        if not self.shares:
            raise ConfigError("shares: give at least one; 1 is the tuned decoder itself")
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
    origin = recipe.backbone.path or str(resolve(recipe.init_from, started_from(recipe)))
    tuned = train(recipe)
    tools = tools or one_after_another()
    before = load_decoder(origin)
    size = min(recipe.spoken.chunk, before.config.num_prediction_heads)
    unlike = tuned.checksum() != before.checksum()  # the recipe may have chosen the step before the first
    folders = {0.0: origin, **(on_the_way(config, origin, before, recipe.out) if unlike else {})}
    dev = {share: speak(config, recipe, folder, size, tools, "dev", f"dev_{share:g}") for share, folder in
           folders.items()} if unlike else {}
    deciding = methods(config, recipe, size)[0]
    tried = [trial(share, found[deciding]) for share, found in dev.items()]
    share = choose(tried, config.close) if unlike else 0.0
    spoken = {"start": speak(config, recipe, origin, size, tools, config.split, "spoken_start", references=True)}
    if share:
        spoken["tuned"] = speak(config, recipe, folders[share], size, tools, config.split, "spoken_tuned")
    found = {**summary(config, recipe, spoken, size), "start": origin, "tuned": folders[share], "share": share,
             "tried": tried, "judge": recipe.spoken.recognizer, "split": config.split, "seeds": config.seeds,
             "data": {"path": data, "counts": counts}, "provenance": provenance()}
    found["recommended"] = found["tuned" if found["tuned_is_better"] else "start"]
    with writing(out):
        write_json(out / "voice.json", found)
        save_config(config, out / "tune_voice.yaml")
    return found


def on_the_way(config: TuneVoiceConfig, origin: str, before: AnyDecoder, tuned: str) -> dict[float, str]:
    """By share: the folder of a decoder whose weights are w0 + share (w1 - w0), w0 those of `before`, loaded from
    `origin`, and w1 those of the folder `tuned`, which is that of share 1 itself. Each of the two is read once."""
    folders: dict[float, str] = {}
    model, first = load_decoder(tuned), before.state_dict()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for share in config.shares:
        if share == 1:
            folders[share] = tuned
            continue
        folder = Path(config.out) / f"car_{share:g}"
        model.load_state_dict({name: first[name] + share * (tensor - first[name]) if tensor.is_floating_point()
                               else tensor for name, tensor in last.items()})
        with writing(folder):
            model.save_pretrained(folder)
            if (tokenizer := Path(tuned) / TEXT_TOKENIZER_FOLDER).is_dir():
                shutil.copytree(tokenizer, folder / TEXT_TOKENIZER_FOLDER, dirs_exist_ok=True)
            write_json(folder / "provenance.json", {**provenance(), "mixture": {"start": origin, "tuned": tuned,
                                                                                "share": share}})
        folders[share] = str(folder)
    return folders


def trial(share: float, records: Sequence[Record]) -> dict[str, Any]:
    """What the dev sentences said by a decoder on the way say of it."""
    said, _ = by_sentences(records)
    return {"share": share, "wer": rate(said), "similarity": nearness(said), "length": length(said),
            "sentences": len({r["id"] for r in said})}


def choose(tried: Sequence[dict[str, Any]], close: float) -> float:
    """The share of fewest dev word errors; of those within `close` of it the one nearest to the voice, or else the
    smallest."""
    best = min(t["wer"] for t in tried)
    near = [t for t in tried if t["wer"] <= best + close]
    return float(max(near, key=lambda t: (t["similarity"] or 0.0, -t["share"]))["share"])


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


def one_after_another() -> Callable[[CompareConfig], Tools]:
    """What loads the tools of one comparison after the other; vocoder, judge and similarity of the first serve all."""
    before: Tools | None = None

    def load(compared: CompareConfig) -> Tools:
        nonlocal before
        state, _ = start(compared)
        before = load_tools(compared, compared.device or str(state.device), before)
        return before

    return load


def speak(config: TuneVoiceConfig, recipe: TrainConfig, decoder: str, size: int,
          tools: Callable[[CompareConfig], Tools], split: str, folder: str, references: bool = False) -> Spoken:
    """Records of a split by method, spoken by one decoder as the recipe says, at every temperature."""
    said, out = recipe.spoken, Path(config.out) / folder
    compared = CompareConfig(
        data=recipe.data, split=split, decoder=decoder, seeds=config.seeds, limit=config.sentences,
        methods=methods(config, recipe, size) if split == config.split else methods(config, recipe, size)[:1],
        prompt_tokens=recipe.prompt_tokens, vocoder=said.vocoder, judge=said.recognizer, noise_quality_utterances=0,
        timing_utterances=0, audio_samples=0, reasons_utterances=0, references=references, report=False,
        resamples=config.resamples, out=str(out), sampling=said.sampling)
    compare(compared, tools(compared))
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


def nearness(records: Sequence[Record]) -> float | None:
    """The mean similarity to the voice of the prompt; None where none was measured."""
    found = [r[SIMILARITY] for r in records if r.get(SIMILARITY) is not None]
    return sum(found) / len(found) if found else None


def length(records: Sequence[Record]) -> float:
    """How long it lasts beside the recordings: the pace of the speaker is 1, below it is faster."""
    return sum(r["duration"] for r in records) / sum(r["reference_duration"] for r in records)


def by_sentences(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those of texts of one sentence, as `dcar speak` says them, and those of several; where no text has one sentence,
    all stand first."""
    one: list[Record] = []
    several: list[Record] = []
    for record in records:
        (several if len(split_sentences(record["text"])) > 1 else one).append(record)
    return (one, several) if one else (several, [])


def similarity(record: Record) -> float | None:
    """To the voice of the prompt; None where none was measured."""
    found: float | None = record.get(SIMILARITY)
    return found


def off_pace(record: Record) -> float:
    """How far the length is from the recording's: |ln(length / its)|, at most that of a tenth of it, as of silence."""
    return abs(math.log(max(record["duration"] / record["reference_duration"], 0.1)))


def paired(measure: Callable[[Record], float | None], after: Sequence[Record], before: Sequence[Record],
           resamples: int) -> PairedTest | None:
    """The paired test of a measure, after - before, over the sentences; None where it was never taken."""
    sums: list[dict[str, list[float]]] = []
    for records in (after, before):
        found: dict[str, list[float]] = {}
        for r in records:
            if (value := measure(r)) is not None:
                found.setdefault(r["id"], []).append(value)
        sums.append(found)
    shared = sorted(set(sums[0]) & set(sums[1]))
    if not shared:
        return None
    a, b = (([sum(found[i]) for i in shared], [len(found[i]) for i in shared]) for found in sums)
    return paired_test(*a, *b, resamples=resamples)


def outcome(before: Sequence[Record], after: Sequence[Record] | None, resamples: int) -> dict[str, Any]:
    """Word errors, nearness and length of the decoder as it was, and of the tuned one with the paired differences, of
    `off_pace` too."""
    row: dict[str, Any] = {"start": rate(before), "sentences": len({r["id"] for r in before}),
                           "start_similarity": nearness(before), "start_length": length(before)}
    if after is not None:
        test, voice = compare_records(after, before, resamples), paired(similarity, after, before, resamples)
        pace = paired(off_pace, after, before, resamples)
        assert pace is not None  # every record has a length
        row |= {"tuned": rate(after), "difference": test.difference, "difference_ci": [test.low, test.high],
                "p": test.p_value, "detectable": test.detectable, "tuned_similarity": nearness(after),
                "tuned_length": length(after), "nearer": voice and voice.difference,
                "nearer_ci": voice and [voice.low, voice.high], "off_pace": pace.difference,
                "off_pace_ci": [pace.low, pace.high]}
    return row


def summary(config: TuneVoiceConfig, recipe: TrainConfig, spoken: dict[str, Spoken], size: int) -> dict[str, Any]:
    """Both decoders' word errors and nearness to the voice at every temperature with their paired differences
    (tuned - start), those of texts of several sentences, of the recordings and of their resynthesis, and the advice."""
    rows = []
    parts = {name: {m: by_sentences(records) for m, records in found.items()} for name, found in spoken.items()}
    for method in methods(config, recipe, size):
        for part, of in enumerate(("one sentence", "several sentences")):
            if before := parts["start"][method][part]:
                after = parts["tuned"][method][part] if "tuned" in parts else None
                rows.append({"method": method, "texts": of, **outcome(before, after, config.resamples)})
    bounds = {name: {"wer": rate(parts["start"][name][0]), "similarity": nearness(parts["start"][name][0])}
              for name in (RECORDING, RESYNTHESIS) if name in parts["start"]}
    return {"format_version": FORMAT_VERSION, "tuned_is_better": is_better(rows[0], config.margin),
            "advice": advice(rows[0], config.margin), "rows": rows, "bounds": bounds}


def is_better(row: dict[str, Any], margin: float) -> bool:
    """Fewer word errors beyond chance, or nearer to voice or pace beyond chance, and farther from neither, at no more
    than `margin` more of them."""
    if "difference" not in row:
        return False
    high = row["difference_ci"][1]
    farther = row["off_pace_ci"][0] > 0 or row["nearer_ci"] and row["nearer_ci"][1] < 0
    return bool(high < 0 or high <= margin and gains(row) and not farther)


def gains(row: dict[str, Any]) -> list[str]:
    """What the tuned decoder is nearer to beyond chance."""
    return [*(["the voice"] if row["nearer_ci"] and row["nearer_ci"][0] > 0 else []),
            *(["its pace"] if row["off_pace_ci"][1] < 0 else [])]


def advice(row: dict[str, Any], margin: float) -> str:
    """What to take, in words, by the row that decides."""
    if "difference" not in row:
        return ("Take the decoder as it was: among those on the way to the tuned one the dev sentences chose it, by "
                "their words and the nearness of the voice, so there is nothing to compare.")
    low, high = (100 * x for x in row["difference_ci"])
    found = (f"{100 * row['tuned']:.1f} % word errors instead of {100 * row['start']:.1f}, a difference of "
             f"{100 * row['difference']:+.1f} points ({low:+.1f} to {high:+.1f})")
    voice = ""
    if row["nearer_ci"]:
        voice = (f"; similarity to the voice {row['tuned_similarity']:.3f} instead of {row['start_similarity']:.3f} "
                 f"({row['nearer_ci'][0]:+.3f} to {row['nearer_ci'][1]:+.3f})")
    voice += f"; {row['tuned_length']:.2f} of the recordings' length instead of {row['start_length']:.2f}"
    few = f" {row['sentences']} sentences are few: their interval is too narrow." if row["sentences"] < FEW else ""
    power = (f" With {row['sentences']} sentences a true difference of {100 * row['detectable']:.1f} points would have "
             "been seen in four of five such comparisons.")
    if high < 0:
        return f"Take the tuned decoder: {found}{voice}.{few}"
    if is_better(row, margin):
        return (f"Take the tuned decoder, which is nearer to {' and '.join(gains(row))} and whose words are at most "
                f"{100 * margin:g} points worse: {found}{voice}.{power}{few}")
    if low > 0:
        return f"Take the decoder as it was, the tuned one is worse: {found}{voice}.{few}"
    return f"Take the decoder as it was: the tuned one is not better beyond chance: {found}{voice}.{power}{few}"


def table(found: dict[str, Any]) -> str:
    """The figures, the advice, and how to speak with what is recommended."""
    lines = []
    for t in found["tried"]:
        near = "" if t["similarity"] is None else f", similarity {t['similarity']:.3f}"
        lines.append(f"dev, {t['share']:.0%} of the way: {100 * t['wer']:.1f} % word errors{near}, length "
                     f"{t['length']:.2f}" + ("   ← chosen" if t["share"] == found["share"] else ""))
    names = [f"{row['method']}, texts of {row['texts']} ({row['sentences']})" for row in found["rows"]]
    wide = max(map(len, names))
    lines += ["", f"{'held out':{wide}}   as it was     tuned   difference (95 %)       voice         length"]
    for name, row in zip(names, found["rows"], strict=True):
        line = f"{name:{wide}}   {100 * row['start']:7.1f} %"
        if "difference" in row:
            low, high = (100 * x for x in row["difference_ci"])
            change = f"{100 * row['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
            line += f"   {100 * row['tuned']:5.1f} %   {change:21}"
            if row["nearer_ci"]:
                line += f"   {row['start_similarity']:.3f}, {row['tuned_similarity']:.3f}"
            line += f"   {row['start_length']:.2f}, {row['tuned_length']:.2f}"
        lines.append(line)
    bounds = "; ".join(f"{name} {100 * b['wer']:.1f} %" + ("" if b["similarity"] is None else
                                                          f", voice {b['similarity']:.3f}")
                       for name, b in found["bounds"].items())
    seeds = ", ".join(map(str, found["seeds"]))
    lines += [f"Seeds {seeds}, judge {found['judge']}; length: beside the recordings."
              + (f" Texts of one sentence: {bounds}." if bounds else ""), "", found["advice"]]
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
