"""`dcar distil`: resynthesise training sentences with a decoder, to train a decoder that predicts
many tokens at once.

    dcar distil --config distil_starter     # the shipped corpus and the shipped decoder
    dcar distil data=runs/prepared decoder=runs/car out=runs/distilled
    accelerate launch -m dcar.cli distil data=runs/prepared decoder=runs/car out=runs/distilled
    dcar train --config car_starter:distilled data=runs/distilled init_from=runs/car

The tokens of a recording are one of many renderings of its sentence. Tokens that are predicted side
by side cannot know which of these renderings the others follow. A decoder's output varies less, so
it is easier to predict side by side (sequence-level knowledge distillation: Kim and Rush 2016; Zhou
et al. 2020 for parallel decoding).

Every sentence is decoded several times, scores by recognisers choose one rendering, and the result
is an ordinary prepared corpus. Three columns give the origin of a row: `spoken_by` (a method, or
"recording"), `score`, and `recorded`, the tokens of the recording. A row also contains the speaker
prompt with which it was decoded, so that training uses everything that its tokens depend on. Splits
other than `train` keep their recordings.
"""

import hashlib
import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Features, Value

from dcar.config import check, load_config, setting
from dcar.config.commands import (
    DecoderSettings,
    RunSettings,
    SeedSettings,
    VocoderSettings,
    WaitSettings,
)
from dcar.errors import ConfigError, DataError
from dcar.methods import Entry, load_models, make_methods
from dcar.model.precision import precision_of
from dcar.prepare.prepared import (
    check_out_dir,
    load_prepared,
    load_split,
    partial_folder,
    prepared_folder,
    prepared_info,
    read_json,
    save_splits,
    without_residual,
)
from dcar.process import own_device, run_claimed, run_command
from dcar.progress import Progress
from dcar.prompts.chooser import PromptChooser, with_prompts
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.load import vocoder_for
from dcar.prompts.together import check_together
from dcar.recognition.base import transcripts
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig
from dcar.storage import digest, digest_of, writing
from dcar.text.wer import word_errors
from dcar.tracking import write_json
from dcar.vocoder.base import Vocoder
from dcar.vocoder.load import needs_prompt_audio, vocoder_identity
from dcar.vocoder.voicing import voice
from eval.compare.processes import start, threads_of
from eval.results.types import RECORDING
from eval.scorers.load import load_similarity
from rl.rewards import corpus_token_recognizer

logger = logging.getLogger(__name__)

VOICED = 2
"""Candidates of a sentence, the best by the token recogniser, that are synthesised for recogniser
and speaker encoder."""
BLOCK = 128  # sentences per file; an interrupted run loses at most the current block


@dataclass
class DistilConfig(SeedSettings, RunSettings, WaitSettings, VocoderSettings, DecoderSettings):
    """Settings of `dcar distil`."""

    out: str = "runs/distilled"
    batch_size: int = 64
    data: str = setting(
        "runs/prepared",
        "Folder written by `dcar prepare`; its split train is resynthesised.",
        place="folder",
    )
    far_decoder: str = setting("", "FAR checkpoint, for method far.")
    policies: list[str] = setting([], "Policy folders, for method dcar.")
    methods: list[str | dict[str, Any]] = setting(
        ["car-5@t0", "car-5@t0.4-k10"],
        "Decoding methods of the renderings: names or mappings of docs/methods.md.",
    )
    samples: int = setting(
        3, "Candidates per sentence and method; a method at temperature 0 makes one.", minimum=1
    )
    sampling: SamplingConfig = setting(
        SamplingConfig,
        "Sampling of methods that do not have their own.",
        bare=True,
    )
    prompt_tokens: int = setting(50, "Length of the speaker prompt, as in training.", minimum=1)
    token_recognizer: str = setting(
        "starter", "Recogniser of tokens (dcar train-recognizer); empty = none."
    )
    recognizer: str = setting("", "Recogniser of audio (dcar.recognition.load); empty = none.")
    similarity: str = setting(
        "", "Speaker encoder (eval/scorers/load.py), for example resemblyzer; empty = none."
    )
    lowest_score: float = setting(
        -0.3, "Lowest score of a rendering; a sentence without a better one keeps its recording."
    )
    recordings: float = setting(
        0.0,
        "Share of the sentences that keep their recording whatever the scores.",
        minimum=0,
        maximum=1,
    )
    limit: int = setting(
        0, "Sentences, drawn at random, that the written corpus consists of; 0 = all.", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        if not (self.token_recognizer or self.recognizer):
            raise ConfigError(
                "nothing decides which rendering is best: set token_recognizer, recognizer, or both"
            )
        if not self.methods:
            raise ConfigError("methods is empty: name at least one, as in methods=[car-5@t0]")


@dataclass(frozen=True)
class Rendering:
    """One rendering of a sentence by the teacher."""

    spoken_by: str
    tokens: list[int]
    seed: int = 0  # of its prompt and its sampling
    truncated: bool = False  # ended by the length guard
    read: float | None = None  # log-likelihood of the text given the tokens, nats per phoneme
    wer: float | None = None  # of the audio, as a fraction
    similarity: float | None = None  # cosine between the voices of audio and prompt

    @property
    def score(self) -> float:
        """Log-likelihood less word error rate plus similarity, as far as they are known. −inf if
        none is, or if the rendering is empty or was ended by the length guard."""
        parts = (self.read, None if self.wer is None else -self.wer, self.similarity)
        measured = [value for value in parts if value is not None]
        total = sum(measured) if measured and self.tokens and not self.truncated else -math.inf
        return total if math.isfinite(total) else -math.inf


def best(renderings: Sequence[Rendering], lowest_score: float) -> Rendering | None:
    """Return the rendering with the highest score, the first of equals; None if none reaches
    `lowest_score`. If some were voiced, only these are considered."""
    voiced = [c for c in renderings if c.wer is not None or c.similarity is not None]
    chosen = max(voiced or renderings, key=lambda c: c.score, default=None)
    return chosen if chosen is not None and chosen.score >= lowest_score else None


def keeps_recording(utterance_id: str, share: float, seed: int) -> bool:
    """Return True if a sentence is among the `share` that keep their recording; the choice is
    the same in every run."""
    place = int.from_bytes(hashlib.sha256(f"{seed} {utterance_id}".encode()).digest()[:8], "big")
    return place < share * 2**64


class Teacher:
    """Decoder that makes renderings for sentences of a corpus, with the recognisers that score
    them."""

    def __init__(self, config: DistilConfig, device: str):
        """Load the parts. Raises ConfigError, DataError or CheckpointError if they do not belong
        together."""
        self.config, self.split = config, load_split(config.data, "train")
        if 0 < config.limit < len(self.split):
            drawn = np.random.default_rng(config.seed).permutation(len(self.split))[: config.limit]
            self.split = self.split.select(np.sort(drawn))
        self.split = with_prompts(self.split, f"{config.data}: split train")
        self.rows = self.split.rows
        models = load_models(
            config.decoder, config.far_decoder, config.policies, device, dtype=config.dtype
        )
        check_together(models.decoder, prepared_info(config.data), config.data)
        self.bos, self.precision = models.decoder.config.bos, precision_of(models.decoder)
        self.chooser = PromptChooser(self.split, config.prompt_tokens)
        self.parameters = sum(p.numel() for p in models.decoder.parameters())
        # (method, seed of its prompts and its sampling) of each rendering
        self.ways: list[tuple[Entry, int]] = [
            (entry, config.seed + i)
            for entry in make_methods(config.methods, models, config.sampling)
            for i in range(config.samples if entry.sampling.temperature else 1)
        ]
        self.reader = self.recognizer = self.similarity = None
        if config.token_recognizer:
            self.reader = corpus_token_recognizer(config.token_recognizer, config.data, device)
        if config.recognizer:
            self.recognizer = load_recognizer(config.recognizer, device=device)
        if config.similarity:
            self.similarity = load_similarity(config.similarity, device=device)
        self.vocoder: Vocoder | None = None
        if config.recognizer or config.similarity:
            items: list[PromptItem] = []
            if needs_prompt_audio(config.vocoder):
                seeds = sorted({seed for _, seed in self.ways})
                items = [item for seed in seeds for item in self.prompts(seed)]
            self.vocoder = vocoder_for(models.decoder, config.data, items, config.vocoder, device)

    def prompts(self, seed: int, rows: Sequence[int] | None = None) -> list[PromptItem]:
        """Return the prompts of these rows of the split, or of all."""
        return make_prompts(
            self.split, self.config.prompt_tokens, seed, self.bos, rows, self.chooser
        )

    @property
    def identity(self) -> str:
        """Digest of everything that renderings and their measures depend on, but not the choice
        among them."""
        named = "limit prompt_tokens token_recognizer recognizer similarity vocoder".split()
        methods = [
            {**entry.identity}
            | {"name": entry.name, "sampling": str(entry.sampling), "seed": str(seed)}
            for entry, seed in self.ways
        ]
        weights = [
            self.reader and self.reader.checksum(),
            self.vocoder and vocoder_identity(self.vocoder, self.config.vocoder),
            self.recognizer and self.recognizer.name,
            getattr(self.similarity, "name", ""),
        ]
        basis = [
            {name: getattr(self.config, name) for name in named},
            methods,
            weights,
            digest(prepared_folder(self.config.data) / "prepared.json"),
        ]
        return digest_of(basis)[:16]

    def speak(self, rows: Sequence[int]) -> list[list[Rendering]]:
        """Return the renderings of the sentences in these rows of the split."""
        renderings: list[list[Rendering]] = [[] for _ in rows]
        items: list[list[PromptItem]] = [[] for _ in rows]  # the prompt of each rendering
        for entry, seed in self.ways:
            asked = self.prompts(seed, rows)
            results = entry.decode(asked, seed, self.config.batch_size)
            tokens = [list(r.tokens) for r in results]
            read: Sequence[float | None] = [None] * len(rows)
            if self.reader is not None:
                read = self.reader.log_likelihood(tokens, [i.target_text_ids for i in asked])
            for i, (item, result) in enumerate(zip(asked, results, strict=True)):
                renderings[i].append(
                    Rendering(entry.name, tokens[i], seed, bool(result.truncated), read[i])
                )
                items[i].append(item)
        if self.vocoder is None:
            return renderings
        return [self._voiced(self.vocoder, c, i) for c, i in zip(renderings, items, strict=True)]

    def _voiced(
        self, vocoder: Vocoder, renderings: list[Rendering], items: list[PromptItem]
    ) -> list[Rendering]:
        """Return the renderings of a sentence, the best of them with the measures of their
        audio."""
        whole = [i for i, c in enumerate(renderings) if c.tokens and not c.truncated]
        whole.sort(key=lambda i: -(renderings[i].read or 0.0))
        chosen = whole[:VOICED]
        waves = voice(
            vocoder,
            [renderings[i].tokens for i in chosen],
            [items[i].speaker_embedding for i in chosen],
            [items[i].text for i in chosen],
        )
        wers: list[float | None] = [None] * len(chosen)
        if self.recognizer is not None:
            languages = [items[i].language for i in chosen]
            texts = transcripts(self.recognizer, waves, vocoder.sample_rate, languages)
            wers = [
                word_errors(items[i].text, text, items[i].language).rate
                for i, text in zip(chosen, texts, strict=True)
            ]
        for i, wave, wer in zip(chosen, waves, wers, strict=True):
            similarity = None
            if self.similarity is not None:
                similarity = self.similarity(wave, vocoder.sample_rate, items[i].speaker_embedding)
            renderings[i] = replace(renderings[i], wer=wer, similarity=similarity)
        return renderings


def run(config: DistilConfig) -> Path:
    """Decode, score and choose, and write the prepared corpus. An interrupted run continues from
    its finished blocks.

    Raises ConfigError, DataError, CheckpointError, StorageError, and ProcessError if other
    processes are missing.
    """
    out = Path(config.out)
    check_out_dir(out, read=config.data)
    if earlier := prepared_info(config.data).content.get("distilled"):
        raise DataError(
            f"{config.data}: is already distilled; for another round give data={earlier['from']}, "
            "the corpus that it was made from, and the new decoder"
        )
    state, meeting = start(config)
    teacher = Teacher(config, own_device(config.device))
    done = partial_folder(out) / teacher.identity
    order = np.argsort(teacher.split.columns["text_units"], kind="stable").tolist()
    blocks = {done / f"{i:06}.json": order[i : i + BLOCK] for i in range(0, len(order), BLOCK)}
    with writing(out), threads_of(0, teacher.parameters, state.num_processes):
        mine = list(blocks.items())[state.process_index :: state.num_processes]
        for path, rows in Progress(
            mine, desc="decode and score", unit="block", disable=not state.is_main_process
        ):
            if read_json(path) is None:
                spoken = zip(rows, teacher.speak(rows), strict=True)
                write_json(
                    path, {str(row): [asdict(c) for c in renderings] for row, renderings in spoken}
                )
        meeting.wait("decoding and scoring")
        if state.is_main_process:
            write(config, teacher, list(blocks), out)
    meeting.wait("writing the corpus")
    return out


def write(config: DistilConfig, teacher: Teacher, blocks: Sequence[Path], out: Path) -> None:
    """Choose among the renderings in the files `blocks` and write the corpus to `out`, whole or
    not at all."""
    info = prepared_info(config.data)
    chosen: dict[int, Rendering] = {}
    for path in Progress(blocks, desc="choose", unit="block"):
        for row, renderings in (read_json(path) or {}).items():
            rendering = best([Rendering(**c) for c in renderings], config.lowest_score)
            if rendering and not keeps_recording(
                teacher.rows[int(row)]["id"], config.recordings, config.seed
            ):
                chosen[int(row)] = rendering

    prompts: dict[int, PromptItem] = {}
    # without BOS, training uses no prompts
    for seed in sorted({c.seed for c in chosen.values()}) if teacher.bos else ():
        rows = [row for row, c in chosen.items() if c.seed == seed]
        prompts |= dict(zip(rows, teacher.prompts(seed, rows), strict=True))

    def spoken(row: dict[str, Any], index: int) -> dict[str, Any]:
        if index not in chosen:
            return {"recorded": row["speech"], "spoken_by": RECORDING, "score": math.nan}
        rendering = chosen[index]
        prompt: dict[str, Any] = {}
        if prompts:
            prompt = {
                "prompt_speech": list(prompts[index].prompt_ids),
                "prompt_voice": prompts[index].speaker_embedding.tolist(),
            }
        return {
            "speech": rendering.tokens,
            "recorded": row["speech"],
            "spoken_by": f"{rendering.spoken_by} seed {rendering.seed}",
            "score": rendering.score,
            "duration": len(rendering.tokens) / info.tokenizer.rate_hz,
            **prompt,
        }

    train = without_residual(teacher.rows)
    columns = train.features.copy()
    columns |= {
        "recorded": columns["speech"],
        "spoken_by": Value("string"),
        "score": Value("float32"),
    }
    train = train.map(
        spoken,
        with_indices=True,
        features=Features(columns),
        new_fingerprint=teacher.identity,
        cache_file_name=str(partial_folder(out) / "train.arrow"),
        load_from_cache_file=False,
    )
    sources = Counter(train["spoken_by"])
    distilled = {
        "from": config.data,
        "prepared.json": digest(prepared_folder(config.data) / "prepared.json"),
        "rows": dict(sources.most_common()),
        "settings": asdict(config),
        "precision": teacher.precision,
    }
    tokenizer = {k: v for k, v in info.content["tokenizer"].items() if k != "layers"}
    splits = (
        (split, train if split == "train" else without_residual(load_prepared(config.data, split)))
        for split in info.counts
    )
    save_splits(out, splits, {**info.content, "tokenizer": tokenizer, "distilled": distilled})
    logger.info(
        "%s: %d of %d sentences are resynthesised by the decoder, %d keep their recording",
        out,
        len(chosen),
        sources.total(),
        sources[RECORDING],
    )


CONFIG = DistilConfig


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = run_claimed(run, load_config(CONFIG, arguments), resumes=True)
    if PartialState().is_main_process:
        print(f"written to {out}")


if __name__ == "__main__":
    sys.exit(run_command("launch.distil", main))
