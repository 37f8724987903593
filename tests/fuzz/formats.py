"""Every format that this project reads, in miniature: what makes a good folder of it, and what
reads it to the end."""

import base64
import contextlib
import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from compare_worker import SHORT, tiny_config, tiny_policy, tiny_tools
from tiny_corpora import tone, toy_prepare, wav_bytes, write_manifest, write_starter
from tiny_data import CODES, tiny_tokenizer, tiny_vocoder
from tiny_decoders import tiny_decoder
from tiny_verifiers import imperfect_draft
from transformers import TrainerState

from dcar.audio import audio_seconds, load_audio, load_segment
from dcar.config import load_config
from dcar.corpus.read import describe, read_corpus, validate_corpus
from dcar.decoding import FixedChunk, Prompt, decode
from dcar.doctor import verify
from dcar.errors import DCARError
from dcar.model.companions import load_policy
from dcar.model.load import load_decoder
from dcar.prepare.prepared import load_split, prepared_info
from dcar.prepare.recordings import source_utterances
from dcar.prepare.run import PrepareConfig
from dcar.prompts.items import make_prompts
from dcar.storage import digest, seal
from dcar.tokens.load import load_tokenizer
from dcar.train.callbacks import JsonlLog
from dcar.train.car import TrainConfig
from dcar.train.checkpoints import latest_checkpoint
from dcar.vocoder.model import TokenVocoder
from eval.compare.run import run as compare
from eval.compare.tuned import load_tuned
from eval.methods.registry import make_methods
from eval.report.page import read_log, write_report
from eval.results.store import Maker, RecordStore, read_jsonl
from eval.verifiers.statistics import VerifierStatistics
from rl.config import DCPOConfig
from rl.export import read_provenance
from rl.policies import guidance_range
from rl.transcription import GroundTruth


@dataclasses.dataclass(frozen=True)
class Format:
    """`make` writes a good folder and returns the files to damage; `read` reads it as the
    program does."""

    name: str
    make: Callable[[Path], list[str]]
    read: Callable[[Path], Any]
    cost: float = 1.0  # how many cases of it for one of the others


# --------------------------------------------------------------------------------------------------


def _lines(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path.name]


def _jsonl(folder: Path) -> list[str]:
    row = {"audio": "0.wav", "split": "train", "prompt_audio": "1.wav", "prompt_text": "Oh."}
    rows = [row | {"text": f"The {i}th day, $3.50 & more.", "speaker": i % 2} for i in range(4)]
    return [write_manifest(folder, rows, [tone(1.1), tone(1.2)]).name]


def _cuts(folder: Path) -> list[str]:
    sf.write(folder / "a.wav", tone(0.8), 16_000)
    inside = base64.b64encode(wav_bytes(0.8, 200)).decode()
    in_file, in_memory = (
        {
            "sampling_rate": 16_000,
            "duration": 0.8,
            "sources": [{"type": kind, "channels": [0], "source": source}],
        }
        for kind, source in (("file", "a.wav"), ("memory", inside))
    )
    said = [
        {"start": 0, "text": "A day.", "speaker": "s"},
        {"start": 1, "custom": {"texts": ["Hi."]}, "speaker": "s"},
    ]
    rows = [
        {
            "id": f"u{i}",
            "start": 0.1 * (i % 2),
            "duration": 0.8 - 0.1 * (i % 2),
            "channel": 0,
            "type": "MonoCut",
            "supervisions": said,
            "recording": in_memory if i == 2 else in_file,
        }
        for i in range(4)
    ]
    _lines(folder / "cuts_dev.jsonl", rows)
    lines = (folder / "cuts_dev.jsonl").read_bytes()
    (folder / "cuts_train.jsonl.gz").write_bytes(gzip.compress(lines))
    return ["cuts_dev.jsonl", "cuts_train.jsonl.gz"]


def _ljspeech(folder: Path) -> list[str]:
    (folder / "wavs").mkdir()
    for i in range(3):
        sf.write(folder / "wavs" / f"LJ-{i}.wav", tone(0.4), 16_000)
    (folder / "metadata.csv").write_text(
        "".join(f"LJ-{i}|On 3/4, Dr. X.|On the day {i}.\n" for i in range(3))
    )
    (folder / "test.txt").write_text("LJ-2\n")
    (folder / "meta.lst").write_text(
        "LJ-0|Oh.|wavs/LJ-1.wav|Hello.\nLJ-1|Oh.|wavs/LJ-1.wav|Hello.|wavs/LJ-0.wav\n"
    )
    return ["metadata.csv", "test.txt", "meta.lst", "wavs/LJ-0.wav"]


def _starter(folder: Path) -> list[str]:
    write_starter(folder, 3, 0, 0)
    return ["train.parquet"]


def _corpus(*kinds: tuple[str, str]) -> Callable[[Path], Any]:
    def read(folder: Path) -> None:
        for kind, inside in kinds:
            rows, problems = read_corpus(kind, folder / inside)
            problems += validate_corpus(rows, 0.1, 5)
            describe(problems).encode()

    return read


def _audio(folder: Path) -> list[str]:
    kinds = {
        "a.wav": ("WAV", "PCM_16"),
        "b.wav": ("WAV", "FLOAT"),
        "c.flac": ("FLAC", "PCM_16"),
        "d.ogg": ("OGG", "VORBIS"),
        "e.opus": ("OGG", "OPUS"),
        "f.mp3": ("MP3", "MPEG_LAYER_III"),
    }
    for name, (kind, subtype) in kinds.items():
        sf.write(folder / name, tone(0.3), 16_000, format=kind, subtype=subtype)
    return list(kinds)


def _read_audio(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        audio_seconds(path)
        attempt(lambda path=path: load_segment(path, 0.1, 0.1))  # type: ignore[misc]
        wave, rate = load_audio(path, 24_000)
        assert rate == 24_000 and wave.ndim == 1 and np.isfinite(wave).all() and len(wave) < 10**7


# --------------------------------------------------------------------------------------------------


def _prepared(folder: Path) -> list[str]:
    _jsonl(folder)
    settings = dict(corpus="jsonl", path=str(folder / "m.jsonl"), splits=("train",))
    toy_prepare(PrepareConfig(out=str(folder / "p"), **settings))
    return ["p/prepared.json", *(str(f.relative_to(folder)) for f in (folder / "p").glob("*/*"))]


def _read_prepared(folder: Path) -> None:
    attempt(lambda: source_utterances(folder / "p"))
    prepared_info(folder / "p")
    split = load_split(folder / "p", "train")
    make_prompts(split, 10, 0)
    split.rows.to_dict()


# --------------------------------------------------------------------------------------------------

PROMPT = Prompt("u", (1, 2, 3, 4), (1, 2))


def _decoder(folder: Path) -> list[str]:
    target = tiny_decoder()
    target.save_pretrained(folder / "car")
    imperfect_draft(target).save_pretrained(folder / "draft")
    return [
        f"{which}/{name}"
        for which in ("car", "draft")
        for name in ("config.json", "model.safetensors")
    ]


def _read_decoder(folder: Path) -> None:
    for name in ("car", "draft"):
        model = load_decoder(folder / name)
        if model.config.hidden_size <= 64:
            decode(model, [PROMPT], FixedChunk(1), SHORT, seed=0)


def _policy(folder: Path) -> list[str]:
    out = folder / "policy"
    tiny_policy(base="abc").save_pretrained(out)
    digests = {name: digest(out / name) for name in ("config.json", "model.safetensors")}
    said = {"created": "now", "metrics": {"wer": 0.1}, "files": digests}
    (out / "provenance.json").write_text(json.dumps(said))
    return [f"policy/{name}" for name in (*digests, "provenance.json")]


def _read_policy(folder: Path) -> None:
    attempt(lambda: verify(folder))
    attempt(lambda: read_provenance(folder / "policy"))
    policy = load_policy(folder / "policy")
    attempt(lambda: policy.check_base("abc"))
    policy(torch.zeros(1, 3, policy.config.hidden_size))


def _vocoder(folder: Path) -> list[str]:
    tiny_vocoder((1, 2)).save_pretrained(folder / "vocoder")
    tiny_tokenizer(folder / "tokenizer")
    return [
        "vocoder/config.json",
        "vocoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer.safetensors",
    ]


def _read_vocoder(folder: Path) -> None:
    attempt(lambda: load_tokenizer(folder / "tokenizer"))
    TokenVocoder.from_pretrained(folder / "vocoder")


def _statistics(folder: Path) -> list[str]:
    VerifierStatistics(
        "decoder",
        "tokenizer",
        CODES,
        torch.rand(3, 4),
        torch.tensor([1, 5, 9]),
        torch.tensor([2, 1, 4]),
        torch.tensor([0.1, 0.5]),
        torch.tensor([1.0, 2.0]),
        {"sampling": {}},
    ).save_pretrained(folder)
    return ["statistics.json", "statistics.safetensors"]


# --------------------------------------------------------------------------------------------------


def _log(folder: Path) -> list[str]:
    rows: list[dict[str, Any]] = [
        {"step": i, "epoch": 0.1 * i, "loss": 1 / (i + 1), "head_losses": [0.1, 0.2]}
        for i in range(6)
    ]
    end = {"step": 5, "epoch": 0.5}
    return _lines(
        folder / "log.jsonl", [*rows, end | {"eval_loss": 1.0}, end | {"train_runtime": 1.0}]
    )


def _read_run_log(folder: Path) -> None:
    attempt(lambda: read_log(folder / "log.jsonl"))
    log = JsonlLog(folder / "log.jsonl")
    state = TrainerState(global_step=5, is_world_process_zero=True)
    log.on_train_begin(None, state, None)
    last = (folder / "log.jsonl").read_bytes().splitlines()[-1]
    assert json.loads(last) == {"step": 5, "resumed": True}


def _checkpoint(folder: Path) -> list[str]:
    for step in (1, 2):
        inside = folder / f"checkpoint-{step}"
        inside.mkdir()
        (inside / "model.safetensors").write_bytes(b"weights")
        (inside / "trainer_state.json").write_text("{}")
        files = {path.name: digest(path) for path in inside.iterdir()}
        seal(inside, files, step=step, processes=1)
    return [f"checkpoint-2/{path.name}" for path in sorted(inside.iterdir())]


def _read_checkpoint(folder: Path) -> None:
    found = latest_checkpoint(folder)
    assert found is not None and found.name in ("checkpoint-1", "checkpoint-2")
    verify(folder)


def _comparison(folder: Path) -> list[str]:
    compare(
        tiny_config(folder / "c", seeds=[0], methods=["car-1", "car-3"], report=False), tiny_tools()
    )
    _log(folder)
    return ["c/compare.json", "c/records.jsonl", "log.jsonl"]


def _read_comparison(folder: Path) -> None:
    attempt(lambda: list(read_jsonl(folder / "c" / "records.jsonl")))
    attempt(lambda: verify(folder))
    write_report(folder / "c", folder / "log.jsonl")


def _records(folder: Path) -> list[str]:
    _comparison(folder)
    return [str(p.relative_to(folder)) for p in (folder / "c" / "records").glob("*.jsonl")]


TOOLS = tiny_tools()


def _read_records(folder: Path) -> None:
    """As a comparison that resumes does: what does not belong to it is spoken again."""
    store = RecordStore(folder / "c" / "records")
    store.open()
    entries = make_methods(["car-1", "car-3"], TOOLS.models, SHORT)
    Maker(TOOLS, entries, [0], (), folder / "c", store, store.read())


def _tuned(folder: Path) -> list[str]:
    [entry] = make_methods(["car-1"], TOOLS.models, SHORT)
    best = {"temperature": 0.5, "top_k": 3, "top_p": 1.0}
    car = {"identity": entry.identity, "sampling": best, "rows": []}
    about = {"split": "dev", "utterances": 6, "seeds": [0], "prompt_seeds": [0], "recognizer": "j"}
    truth = GroundTruth(folder / "none.json", "r", TOOLS.items).fingerprint
    errors = {i.utterance_id: [0, 1, 0, 5] for i in TOOLS.items}
    row = {"k": 1, "wer": 0.1, "ci": [0, 1]}
    for name, content in (
        ("tuned.json", {"format_version": 1, **about, "methods": {"car-1": car}}),
        (
            "profile.json",
            {"rows": [row], "range": [2, 3], "recognizer": "r", "base_checksum": "abc"},
        ),
        ("truth.json", {"fingerprint": truth, "errors": errors}),
    ):
        (folder / name).write_text(json.dumps(content))
    return ["tuned.json", "profile.json", "truth.json"]


def _read_tuned(folder: Path) -> None:
    def about() -> None:
        entries = make_methods(["car-1"], TOOLS.models, SHORT)
        tuned = load_tuned(folder / "tuned.json")
        tuned.about(tuned.beside(entries), "test")

    def truth() -> None:
        found = GroundTruth(folder / "truth.json", "r", TOOLS.items)
        found.rates(), found.corpus(), found.missing()

    attempt(about)
    attempt(truth)
    chosen = guidance_range(
        DCPOConfig(output_dir=str(folder), guidance=str(folder / "profile.json")), "abc"
    )
    assert chosen and all(k >= 1 for k in chosen)


def _recipes(folder: Path) -> list[str]:
    recipes = Path(__file__).parents[2] / "launch" / "recipes"
    for name in ("car_tiny.yaml", "prepare.yaml"):
        (folder / name).write_bytes(
            (recipes / name.replace("prepare.", "prepare_paper.")).read_bytes()
        )
    return ["car_tiny.yaml", "prepare.yaml"]


def _read_recipes(folder: Path) -> None:
    attempt(lambda: load_config(TrainConfig, ["--config", str(folder / "car_tiny.yaml")]))
    load_config(PrepareConfig, ["--config", str(folder / "prepare.yaml")])


def attempt(action: Callable[[], Any]) -> None:
    """Run one of several readers; an error of the project is as good as a result, and the next
    one follows."""
    with contextlib.suppress(DCARError):
        action()


FORMATS = [
    Format("jsonl", _jsonl, _corpus(("jsonl", "m.jsonl")), cost=2),
    Format(
        "lhotse",
        _cuts,
        _corpus(("lhotse", "cuts_dev.jsonl"), ("lhotse", "cuts_train.jsonl.gz")),
        cost=2,
    ),
    Format("ljspeech", _ljspeech, _corpus(("seed-tts-eval", "meta.lst"), ("ljspeech", "."))),
    Format("starter", _starter, _corpus(("starter", "."))),
    Format("datasets", _starter, _corpus(("datasets", "train.parquet")), cost=0.3),
    Format("audio", _audio, _read_audio),
    Format("prepared", _prepared, _read_prepared),
    Format("decoder", _decoder, _read_decoder, cost=2),
    Format("policy", _policy, _read_policy, cost=2),
    Format("vocoder-tokenizer", _vocoder, _read_vocoder),
    Format("statistics", _statistics, VerifierStatistics.from_pretrained),
    Format("log", _log, _read_run_log),
    Format("checkpoint", _checkpoint, _read_checkpoint),
    Format("comparison", _comparison, _read_comparison, cost=0.3),
    Format("records", _records, _read_records, cost=2),
    Format("tuned-profile", _tuned, _read_tuned, cost=2),
    Format("recipes", _recipes, _read_recipes),
]
