"""From recordings of one speaker to a voice: fine-tune vocoder and decoder, and say whether that made them better
before anyone takes them.

    dcar tune-voice recordings=my_voice out=runs/voice              # NAME.wav beside NAME.txt, or LJSpeech
    dcar tune-voice data=runs/prepared recipe=finetune_far_starter out=runs/voice_far
    dcar tune-voice data=runs/prepared training=[max_steps=60,learning_rate=5e-5] vocoder_recipe= out=runs/voice

Each step goes on where it was stopped. The recordings are prepared (`dcar prepare`). The vocoder is trained on them by
`vocoder_recipe` (timbre is lost there), the decoder by `recipe` (it has the pace). Dev sentences choose: first among
vocoders, then among decoders on the way from the one that training started from to the tuned one,
w0 + share (w1 - w0) of the weights (WiSE-FT, Wortsman et al. 2022); each time what makes fewest word errors, and of
those that come close to it what is nearest to the voice. Last, held-out sentences, which chose nothing, are spoken
before and after each change that dev sentences chose, with the same prompts, draws and sampling: with the tuned vocoder
beside what there was, then with the tuned decoder beside what was best so far. What decides is in
`launch/voice_verdict.py`. `voice.json` keeps what was found; beside it lie `decoder/` and `vocoder/`, which speak in
`dcar speak --voice OUT`, and in `work/` all that led there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from dcar.config import check, load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.model.backbones.decoder import TEXT_TOKENIZER_FOLDER
from dcar.model.draft import AnyDecoder
from dcar.model.load import Shipped, load_decoder
from dcar.prepare.prepared import load_prepared, prepared_folder, prepared_info
from dcar.prepare.run import PrepareConfig
from dcar.prepare.run import run as prepare
from dcar.process import run_command
from dcar.sources.shipped import resolve
from dcar.speak.voice import VOICE_FILE, voice_of
from dcar.storage import digest, writing
from dcar.tracking import provenance, write_json
from dcar.train.car import TrainConfig
from dcar.train.car import run as train
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.training.pack import pack_training_data
from dcar.vocoder.training.train import TrainVocoderConfig
from dcar.vocoder.training.train import run as train_vocoder
from eval.compare.run import CompareConfig, load_tools, start
from eval.compare.run import run as compare
from eval.results.store import Record, Tools, by_method, read_jsonl
from launch.voice_verdict import Spoken, bounds, deciding, length, nearness, rate, rows_of, table, verdict

logger = logging.getLogger(__name__)

MADE_OF = "made_of.json"
UNLIKE = {"recordings": "recordings", "decoder": "settings of the decoder's training",
          "vocoder": "settings of the vocoder's training"}
FORMAT_VERSION = 6  # 6: what `dcar speak --voice` reads
PROMPT_TOKENS = 50  # of the prompt that is kept for it


@dataclass(frozen=True)
class Voice:
    """What speaks. vocoder: as `dcar.vocoder.load` lists it. The shares: of the way to the tuned ones."""

    decoder: str
    vocoder: str
    share: float = 0.0
    vocoder_share: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.share:g}" + (f"_vocoder_{self.vocoder_share:g}" if self.vocoder_share else "")


@dataclass
class TuneVoiceConfig:
    """Settings of `dcar tune-voice`. How the decoder is trained, and how both speak, stands in the recipe."""

    recordings: str = setting("", "Folder of one speaker: NAME.wav beside NAME.txt, a table with a header, or "
                                  "LJSpeech's metadata.csv and wavs/. Empty = `data`.")
    transcribe: str = setting("", "Of `recordings`: what writes the text of those without one, as whisper-base.")
    data: str = setting("", "Folder written by `dcar prepare`, with train, dev and held-out split, instead.")
    recipe: str = setting("finetune_starter", "Of dcar train: a name in launch/recipes, or a YAML file.")
    training: list[str] = setting([], "Settings of the recipe that differ, as [max_steps=30,learning_rate=5e-5].")
    vocoder_recipe: str = setting("vocoder_voice", "Of dcar train-vocoder, alike; empty = the vocoder stays. One that "
                                  "is not this project's own stays, too.")
    vocoder_training: list[str] = setting([], "Settings of that recipe that differ.")
    out: str = setting("runs/voice", "Folder to write.", place="folder")
    shares: list[float] = setting([0.25, 0.5, 0.75, 1.0], "Of the way from the decoder as it was to the tuned one: "
                                  "among these and the one as it was dev sentences choose.", above=0, maximum=1)
    vocoder_shares: list[float] = setting([0.5, 1.0], "Of the way to the tuned vocoder, alike.", above=0, maximum=1)
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
        if not self.shares or not self.vocoder_shares:
            raise ConfigError("shares, vocoder_shares: give at least one; 1 is the tuned decoder or vocoder itself")
        if bool(self.recordings) == bool(self.data):
            raise ConfigError("give the recordings (recordings=FOLDER, each NAME.wav beside NAME.txt) or a prepared "
                              "corpus (data=FOLDER of dcar prepare), one of the two")
        if self.split in ("train", "dev"):
            raise ConfigError(f"split={self.split}: the tuned decoder was trained on train and chosen by dev; compare "
                              "on sentences that did neither")

    @property
    def work(self) -> Path:
        """Folder of what leads to the result."""
        return Path(self.out) / "work"


class Stages:
    """Names what is done now, and shows how much of the whole is done."""

    def __init__(self, config: TuneVoiceConfig) -> None:
        trials = 1 + len(config.shares) + len(config.vocoder_shares) * bool(config.vocoder_recipe)
        total = bool(config.recordings) + bool(config.vocoder_recipe) + 1 + trials + 3  # at most three are held out
        self.show, self.begun = os.environ.get("RANK", "0") == "0", 0
        self.bar = tqdm(total=total, desc="tune-voice", unit="stage", disable=None if self.show else True)

    def __call__(self, name: str) -> None:
        """The stage before is done, this one begins."""
        self.bar.update(self.begun > 0)
        self.begun += 1
        if self.show:
            tqdm.write(f"[{self.begun} of {self.bar.total}] {name}", file=sys.stderr)

    def done(self) -> None:
        """Those that were not needed are done, too."""
        self.bar.update(self.bar.total - self.bar.n)
        self.bar.close()


def training_config(config: TuneVoiceConfig, data: str) -> TrainConfig:
    """The recipe with its data and place. ConfigError where it starts from no decoder, or there is no such recipe."""
    found = load_config(TrainConfig, ["--config", config.recipe, f"data={data}", f"out={config.work / 'car'}",
                                      *config.training])
    if not (found.init_from or found.backbone.path):
        raise ConfigError(f"recipe={config.recipe}: trains from scratch; a voice is tuned from a decoder that there is "
                          "(init_from, or backbone.path)")
    return found


def vocoder_config(config: TuneVoiceConfig, vocoder: str) -> TrainVocoderConfig | None:
    """The recipe of the vocoder, from the one that the decoder's recipe speaks with; None where that one stays."""
    if not config.vocoder_recipe:
        return None
    if ":" in vocoder:
        logger.info("the vocoder %s stays as it is: only this project's own can be trained", vocoder)
        return None
    return load_config(TrainVocoderConfig, [
        "--config", config.vocoder_recipe, f"data={config.work / 'pack.safetensors'}", f"out={config.work / 'vocoder'}",
        f"init_from={vocoder}", *config.vocoder_training])


def tune_voice(config: TuneVoiceConfig, tools: Callable[[CompareConfig], Tools] | None = None) -> dict[str, Any]:
    """Prepare, train, compare; returns what voice.json holds. `tools` replaces what the comparisons would load.

    Raises what these raise; ConfigError where `out` holds another voice; DataError where a split is missing."""
    stage = Stages(config)
    if config.recordings:
        stage(f"prepare the recordings in {config.recordings}")
    data = config.data or prepared_recordings(config)
    recipe = training_config(config, data)
    counts = prepared_info(data)["counts"]
    check_splits(data, counts, ("train", "dev", config.split))
    shipped: Shipped = "far" if recipe.model.num_prediction_heads == 1 else "decoder"  # what `init_from=starter` means
    origin = recipe.backbone.path or str(resolve(recipe.init_from, shipped))
    was = Voice(origin, recipe.spoken.vocoder or "starter")
    vocoder_recipe = vocoder_config(config, was.vocoder)
    same_as_before(config.work, data, recipe, vocoder_recipe)
    vocoders = [was]
    if vocoder_recipe:
        stage("train the vocoder: the timbre")
        mixed = mixed_vocoders(config, vocoder_recipe.init_from, tuned_vocoder(vocoder_recipe, data))
        vocoders += [replace(was, vocoder=folder, vocoder_share=share) for share, folder in mixed.items()]
    stage("train the decoder: the pace")
    tuned = train(recipe)
    tools = tools or one_after_another()
    before = load_decoder(origin)
    unlike = tuned.checksum() != before.checksum()  # the recipe may have chosen the step before the first
    decoders = on_the_way(config, origin, before, recipe.out) if unlike else {}
    size = min(recipe.spoken.chunk, before.config.num_prediction_heads)
    temperatures = dict.fromkeys([recipe.spoken.sampling.temperature, *config.temperatures])
    by = [f"car-{size}@t{t:g}" for t in temperatures]  # the first decides
    tried: dict[Voice, dict[str, Any]] = {}

    def best(voices: Sequence[Voice]) -> Voice:
        if len(voices) == 1:
            return voices[0]
        for voice in voices:
            if voice not in tried:
                stage(f"speak dev sentences, vocoder {voice.vocoder_share:.0%} and decoder {voice.share:.0%} of the "
                      "way")
                said = speak(config, recipe, voice, by[:1], tools, "dev")
                tried[voice] = trial(voice, said[by[0]])
        return voices[choose([tried[voice] for voice in voices], config.close)]

    chosen = best(vocoders)
    chosen = best([chosen, *(replace(chosen, decoder=folder, share=share) for share, folder in decoders.items())])
    changes: dict[str, dict[str, Any]] = {}
    if chosen.vocoder_share:
        changes["vocoder"] = {"vocoder": chosen.vocoder, "vocoder_share": chosen.vocoder_share}
    if chosen.share:
        changes["decoder"] = {"decoder": chosen.decoder, "share": chosen.share}
    taken, steps = was, []
    stage("speak held-out sentences as it was")
    spoken = first = speak(config, recipe, was, by, tools, config.split, references=True)
    for what, change in changes.items():
        stage(f"speak held-out sentences with the tuned {what}")
        after = speak(config, recipe, replace(taken, **change), by, tools, config.split)
        steps.append(verdict(spoken, after, by, what, config.margin, config.resamples))
        if steps[-1]["better"]:
            taken, spoken = replace(taken, **change), after
    found = {"format_version": FORMAT_VERSION, "recommended": taken.decoder, "recommended_vocoder": taken.vocoder,
             "tried": list(tried.values()), "share": chosen.share, "vocoder_share": chosen.vocoder_share,
             "start": was.decoder, "start_vocoder": was.vocoder, "tuned": chosen.decoder,
             "tuned_vocoder": chosen.vocoder, "steps": steps, "start_rows": rows_of(first, None, by, config.resamples),
             "bounds": bounds(first), "judge": recipe.spoken.recognizer, "split": config.split, "seeds": config.seeds,
             "data": {"path": data, "counts": counts}, "provenance": provenance(),
             "speak": speaks(taken, by[0].partition("@")[0], data)}
    if PartialState().is_main_process:
        write_result(config, taken, found)
    stage.done()
    return found


def check_splits(data: str, counts: Mapping[str, Any], needed: Sequence[str]) -> None:
    """DataError where a split that is needed has no sentences."""
    if missing := [split for split in needed if not counts.get(split, {}).get("utterances")]:
        raise DataError(f"{data}: nothing in split {', '.join(missing)}; a voice needs sentences to train on, to "
                        "choose by and to judge by: record more, or give the splits as docs/data.md says")


def write_result(config: TuneVoiceConfig, taken: Voice, found: dict[str, Any]) -> None:
    """voice.json, what speaks, and the settings, in `out`."""
    out = Path(config.out)
    with writing(out):
        for part, named in (("decoder", taken.decoder), ("vocoder", taken.vocoder)):
            shutil.rmtree(out / part, ignore_errors=True)
            if found["speak"][part] == part:
                shutil.copytree(resolve(named, part), out / part,
                                ignore=shutil.ignore_patterns("checkpoint-*", "log.jsonl"))
        write_json(out / VOICE_FILE, found)
        save_config(config, out / "tune_voice.yaml")


def speaks(taken: Voice, method: str, data: str) -> dict[str, Any]:
    """What `dcar speak --voice OUT` reads: decoder and vocoder, in `out` unless they are known by a name, the method,
    and a training sentence of some seconds as prompt."""
    rows = load_prepared(data, "train")
    row = next((row for row in rows if len(row["speech"]) >= 2 * PROMPT_TOKENS), rows[0])
    prompt = voice_of(row, max(0, (len(row["speech"]) - PROMPT_TOKENS) // 2), PROMPT_TOKENS)
    parts: dict[str, Any] = {part: part if resolve(named, part).is_dir() else named
                             for part, named in (("decoder", taken.decoder), ("vocoder", taken.vocoder))}
    return {**parts, "method": method,
            "prompt": {"id": row["id"], "speech": list(prompt.tokens), "voice": prompt.features.tolist()}}


def same_as_before(out: Path, data: str, recipe: TrainConfig, vocoder_recipe: TrainVocoderConfig | None) -> None:
    """Note in `out` what vocoder and decoder are trained on, and how. ConfigError where it was begun with something
    else: recordings that were added, say, would be judged by what was trained without them."""
    path = out / MADE_OF
    how = {name: {k: v for k, v in asdict(settings).items() if k not in ("data", "out")} if settings else None
           for name, settings in (("decoder", recipe), ("vocoder", vocoder_recipe))}
    now = json.loads(json.dumps({"recordings": digest(prepared_folder(data) / "prepared.json")["sha256"], **how}))
    if not path.exists():
        if PartialState(cpu=not torch.cuda.is_available()).is_main_process:
            with writing(out):
                write_json(path, now)
    elif unlike := [name for name, made in json.loads(path.read_text(encoding="utf-8")).items() if made != now[name]]:
        raise ConfigError(f"{out} was begun with other {' and '.join(UNLIKE[name] for name in unlike)} ({path} has "
                          "them): choose another out, or remove this one")


def tuned_vocoder(recipe: TrainVocoderConfig, data: str) -> str:
    """The folder of the vocoder, trained on the training split of a prepared corpus, by the first process alone."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.is_main_process:
        if not Path(recipe.data).exists():
            pack_training_data(data, recipe.data)
        train_vocoder(recipe)
    state.wait_for_everyone()
    return str(Path(recipe.out) / "export")


def mixtures(config: TuneVoiceConfig, kind: str, shares: Sequence[float], first: Mapping[str, Tensor], model: Any,
             tuned: str, more: Callable[[Path, float], None] = lambda folder, share: None) -> dict[float, str]:
    """By share: the folder of a model whose weights are w0 + share (w1 - w0), w0 those of `first` and w1 those of
    `model`, the tuned one; that of share 1 is `tuned` itself. more: writes what else belongs into such a folder."""
    folders, state = {share: str(config.work / f"{kind}_{share:g}") for share in shares}, PartialState()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for share, folder in folders.items():
        if share != 1 and state.is_main_process:
            model.load_state_dict({
                name: first[name] + share * (tensor - first[name]) if tensor.is_floating_point() else tensor
                for name, tensor in last.items()})
            with writing(folder):
                model.save_pretrained(folder)
                more(Path(folder), share)
    state.wait_for_everyone()
    return {share: tuned if share == 1 else folder for share, folder in folders.items()}


def mixed_vocoders(config: TuneVoiceConfig, first: str, tuned: str) -> dict[float, str]:
    """Vocoders on the way from `first` to `tuned`: `mixtures`."""
    if min(config.vocoder_shares) == 1:
        return {1.0: tuned}
    start, model = (TokenVocoder.from_pretrained(folder) for folder in (resolve(first, "vocoder"), tuned))
    return mixtures(config, "vocoder", config.vocoder_shares, start.state_dict(), model, tuned)


def on_the_way(config: TuneVoiceConfig, origin: str, before: AnyDecoder, tuned: str) -> dict[float, str]:
    """Decoders on the way from `before`, loaded from `origin`, to that of the folder `tuned`: `mixtures`."""
    def more(folder: Path, share: float) -> None:
        if (tokenizer := Path(tuned) / TEXT_TOKENIZER_FOLDER).is_dir():
            shutil.copytree(tokenizer, folder / TEXT_TOKENIZER_FOLDER, dirs_exist_ok=True)
        write_json(folder / "provenance.json", {**provenance(), "mixture": {"start": origin, "tuned": tuned,
                                                                            "share": share}})

    return mixtures(config, "car", config.shares, before.state_dict(), load_decoder(tuned), tuned, more)


def trial(voice: Voice, records: Sequence[Record]) -> dict[str, Any]:
    """What the dev sentences that it said say of a voice."""
    said = deciding(records)
    return {"share": voice.share, "vocoder_share": voice.vocoder_share, "wer": rate(said), "similarity": nearness(said),
            "length": length(said), "sentences": len({r["id"] for r in said})}


def choose(tried: Sequence[dict[str, Any]], close: float) -> int:
    """Which has the fewest dev word errors; of those within `close` of it the one nearest to the voice, or else the
    first."""
    best = min(t["wer"] for t in tried)
    near = [i for i, t in enumerate(tried) if t["wer"] <= best + close]
    return max(near, key=lambda i: (tried[i]["similarity"] or 0.0, -i))


def prepared_recordings(config: TuneVoiceConfig) -> str:
    """The recordings, prepared in `out`."""
    table = Path(config.recordings) / "metadata.csv"
    bars = table.is_file() and b"|" in table.open("rb").readline()
    folder = str(config.work / "prepared")
    report = prepare(PrepareConfig(out=folder, corpus="ljspeech" if bars else "folder", path=config.recordings,
                                   transcribe=config.transcribe, skip_bad=config.skip_bad,
                                   dev_fraction=config.dev_fraction, test_fraction=config.test_fraction))
    logger.info("%s", report.text())
    if (speakers := max(c["speakers"] for c in report.counts.values())) > 1:
        logger.warning("note: these are recordings of %d speakers, and one voice is tuned: give the folder of one",
                       speakers)
    return folder


def one_after_another() -> Callable[[CompareConfig], Tools]:
    """What loads the tools of one comparison after the other; vocoder, ASR and similarity of the first with a vocoder
    serve all that have it."""
    before: dict[str, Tools] = {}

    def load(compared: CompareConfig) -> Tools:
        state, _ = start(compared)
        before[compared.vocoder] = load_tools(compared, compared.device or str(state.device),
                                              before.get(compared.vocoder))
        return before[compared.vocoder]

    return load


def speak(config: TuneVoiceConfig, recipe: TrainConfig, voice: Voice, by: list[str],
          tools: Callable[[CompareConfig], Tools], split: str, references: bool = False) -> Spoken:
    """Records of a split by method, those of `by`, spoken by one voice as the recipe says."""
    said, out = recipe.spoken, config.work / f"{'dev' if split == 'dev' else 'spoken'}_{voice.name}"
    compared = CompareConfig(
        data=recipe.data, split=split, decoder=voice.decoder, seeds=config.seeds, limit=config.sentences, methods=by,
        prompt_tokens=recipe.prompt_tokens, vocoder=voice.vocoder, asr=said.recognizer,
        timing_utterances=0, audio_samples=0, reasons_utterances=0, references=references, report=False,
        resamples=config.resamples, out=str(out), sampling=said.sampling)
    compare(compared, tools(compared))
    return by_method(read_jsonl(out / "records.jsonl"))


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(TuneVoiceConfig, arguments)
    found = tune_voice(config)
    if not PartialState().is_main_process:
        return
    print(table(found))
    tokenizer = prepared_info(found["data"]["path"])["tokenizer"].get("spec", "starter")
    other = f" --tokenizer {tokenizer}" if tokenizer != "starter" else ""
    print(f"\nwrote {config.out}. To hear it:\n  dcar speak \"The tide came in.\" --voice {config.out}{other} -o "
          "out.wav")


if __name__ == "__main__":
    sys.exit(run_command("launch.tune_voice", main))
