"""`dcar distil`: training sentences as a decoder speaks them, to train a decoder on that predicts
many tokens at once.

    dcar distil --config distil_starter     # the shipped corpus, spoken by the shipped decoder
    dcar distil data=runs/prepared decoder=runs/car out=runs/distilled
    accelerate launch -m launch.distil data=runs/prepared decoder=runs/car out=runs/distilled
    dcar train --config car_starter:distilled data=runs/distilled init_from=runs/car

The tokens of a recording are one way among many to say its sentence. Tokens that are predicted side
by side cannot know which of these ways the others follow. What a decoder says varies less, so it is
easier to predict side by side (sequence-level knowledge distillation: Kim and Rush 2016; Zhou et
al. 2020 for parallel decoding).

Every sentence is spoken several times, recogniser scores choose one, and the result is an ordinary
prepared corpus. Three columns say where a row comes from: `spoken_by` (a method, or "recording"),
`score`, and `recorded`, the tokens of the recording. A row names the prompt that was heard when it
was spoken, so that training sees all that its tokens depend on. Splits other than `train` stay
recordings.
"""

from __future__ import annotations

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
from datasets import Features, Value
from tqdm import tqdm

from dcar.config import check, load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.model.precision import dtype_setting, precision_of
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
from dcar.process import run_claimed, run_command
from dcar.prompts.chooser import PromptChooser
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
from dcar.vocoder.load import hears_prompts, vocoder_identity
from dcar.vocoder.voicing import voice
from eval.compare.processes import start, threads_of
from eval.methods.registry import Entry, load_models, make_methods
from eval.results.store import RECORDING
from eval.scorers.load import load_similarity
from rl.rewards import corpus_token_recognizer

logger = logging.getLogger(__name__)

BLOCK = 128  # sentences between two files, which a run that was cut off goes on from


@dataclass
class DistilConfig:
    """Settings of `dcar distil`."""

    data: str = setting(
        "runs/prepared",
        "Folder written by `dcar prepare`; its split train is spoken.",
        place="folder",
    )
    decoder: str = setting(
        "runs/car", "Decoder that speaks; starter, here and below = the shipped one."
    )
    far_decoder: str = setting("", "FAR checkpoint, for method far.")
    policies: list[str] = setting([], "Policy folders, for method dcar.")
    methods: list[str | dict[str, Any]] = setting(
        ["car-5@t0", "car-5@t0.4-k10"], "Who speaks: names or mappings of docs/methods.md."
    )
    samples: int = setting(
        3, "Candidates of each method whose temperature is above 0; at 0 there is one.", minimum=1
    )
    sampling: SamplingConfig = setting(
        SamplingConfig, "How tokens are drawn, where a method does not say."
    )
    prompt_tokens: int = setting(50, "Length of the speaker prompt, as in training.", minimum=1)
    token_recognizer: str = setting(
        "starter", "Recogniser of tokens (dcar train-recognizer); empty = none."
    )
    token_weight: float = setting(
        1.0, "Of its log-likelihood of the text, nats a phoneme.", minimum=0
    )
    recognizer: str = setting("", "Recogniser of sound (dcar.recognition.load); empty = none.")
    wer_weight: float = setting(
        1.0, "Of minus the word error rate that it hears, as a fraction.", minimum=0
    )
    similarity: str = setting(
        "", "Speaker encoder (eval/scorers/load.py), resemblyzer for one; empty = none."
    )
    similarity_weight: float = setting(
        1.0, "Of the cosine between the voice and that of the prompt.", minimum=0
    )
    voiced: int = setting(
        2,
        "Candidates of a sentence, the best by their tokens, that are voiced for recogniser and "
        "encoder; 0 = all.",
        minimum=0,
    )
    vocoder: str = setting(
        "", "Folder, or a name that dcar.vocoder.load lists; empty = the shipped one."
    )
    lowest_score: float = setting(
        -0.3, "A sentence whose best candidate scores less keeps its recording."
    )
    recordings: float = setting(
        0.0, "Share of the sentences that keep their recording anyhow.", minimum=0, maximum=1
    )
    limit: int = setting(
        0,
        "Sentences, drawn at random; 0 = all. The corpus that is written has no others.",
        minimum=0,
    )
    batch_size: int = setting(64, "Sentences spoken at once.", minimum=1)
    seed: int = seed_setting(0, "Of the first candidates; further ones have the seeds behind it.")
    device: str = setting("", "cpu or cuda; empty = what accelerate chooses.")
    dtype: str = dtype_setting()
    wait_minutes: float = setting(180.0, "How long processes wait for each other.", above=0)
    out: str = setting("runs/distilled", "Prepared corpus to write.", place="folder")

    def __post_init__(self) -> None:
        check(self)
        if not (self.token_recognizer or self.recognizer):
            raise ConfigError(
                "nothing says which candidate is best: set token_recognizer, recognizer, or both"
            )
        if not self.methods:
            raise ConfigError("methods is empty: name who speaks, as in methods=[car-5@t0]")


@dataclass(frozen=True)
class Candidate:
    """One way in which a sentence was spoken."""

    spoken_by: str
    tokens: list[int]
    seed: int = 0  # of its prompt and draws
    truncated: bool = False  # by the length guard
    read: float | None = None  # log-likelihood of the text given the tokens, nats a phoneme
    wer: float | None = None  # of the sound, as a fraction
    similarity: float | None = None  # of the sound's voice to the prompt's

    def score(self, config: DistilConfig) -> float:
        """The weighted sum of what is known. −inf where the length guard ended it, or it could
        not be judged."""
        parts = [
            (config.token_weight, self.read),
            (-config.wer_weight, self.wer),
            (config.similarity_weight, self.similarity),
        ]
        known = [weight * value for weight, value in parts if value is not None]
        total = sum(known) if known and self.tokens and not self.truncated else -math.inf
        return total if math.isfinite(total) else -math.inf


def best(candidates: Sequence[Candidate], config: DistilConfig) -> Candidate | None:
    """The candidate of the highest score; of equals the first. Where some were voiced, it is one
    of them. None where none reaches `lowest_score`."""
    voiced = [c for c in candidates if c.wer is not None or c.similarity is not None]
    chosen = max(voiced or candidates, key=lambda c: c.score(config), default=None)
    return chosen if chosen is not None and chosen.score(config) >= config.lowest_score else None


def keeps_recording(utterance_id: str, share: float, seed: int) -> bool:
    """Whether a sentence is among the `share` that keep their recording: the same ones in every
    run."""
    place = int.from_bytes(hashlib.sha256(f"{seed} {utterance_id}".encode()).digest()[:8], "big")
    return place < share * 2**64


class Teacher:
    """Speaks sentences of a corpus in every way that is asked for, and has them judged."""

    def __init__(self, config: DistilConfig, device: str):
        """ConfigError, DataError or CheckpointError for parts that do not belong together."""
        self.config, self.split = config, load_split(config.data, "train")
        if 0 < config.limit < len(self.split):
            drawn = np.random.default_rng(config.seed).permutation(len(self.split))[: config.limit]
            self.split = self.split.select(np.sort(drawn))
        self.rows = self.split.rows
        models = load_models(
            config.decoder, config.far_decoder, config.policies, device, dtype=config.dtype
        )
        check_together(models.decoder, prepared_info(config.data), config.data)
        self.bos, self.precision = models.decoder.config.bos, precision_of(models.decoder)
        self.chooser = PromptChooser(self.split, config.prompt_tokens)
        self.parameters = sum(p.numel() for p in models.decoder.parameters())
        self.ways: list[tuple[Entry, int]] = [  # a method, and the seed of its prompts and draws
            (entry, config.seed + i)
            for entry in make_methods(config.methods, models, config.sampling)
            for i in range(config.samples if entry.sampling.temperature else 1)
        ]
        self.reader = (
            corpus_token_recognizer(config.token_recognizer, config.data, device)
            if config.token_recognizer
            else None
        )
        self.recognizer = (
            load_recognizer(config.recognizer, device=device) if config.recognizer else None
        )
        self.similarity = (
            load_similarity(config.similarity, device=device) if config.similarity else None
        )
        self.vocoder: Vocoder | None = None
        if config.recognizer or config.similarity:
            heard = sorted({seed for _, seed in self.ways}) if hears_prompts(config.vocoder) else []
            items = [item for seed in heard for item in self.prompts(seed)]
            self.vocoder = vocoder_for(models.decoder, config.data, items, config.vocoder, device)

    def prompts(self, seed: int, rows: Sequence[int] | None = None) -> list[PromptItem]:
        """Of these rows of the split, or of all."""
        return make_prompts(
            self.split, self.config.prompt_tokens, seed, self.bos, rows, self.chooser
        )

    @property
    def identity(self) -> str:
        """What candidates and their parts of a score depend on; not what is chosen among them."""
        named = (
            "limit",
            "prompt_tokens",
            "token_recognizer",
            "recognizer",
            "similarity",
            "voiced",
            "vocoder",
        )
        made = [
            entry.identity
            | {"name": entry.name, "sampling": str(entry.sampling), "seed": str(seed)}
            for entry, seed in self.ways
        ]
        weights = [
            self.reader and self.reader.checksum(),
            self.vocoder and vocoder_identity(self.vocoder, self.config.vocoder),
        ]
        said = [
            {name: getattr(self.config, name) for name in named},
            made,
            weights,
            digest(prepared_folder(self.config.data) / "prepared.json"),
        ]
        return digest_of(said)[:16]

    def speak(self, rows: Sequence[int]) -> list[list[Candidate]]:
        """The candidates of the sentences in these rows of the split."""
        candidates: list[list[Candidate]] = [[] for _ in rows]
        items: list[list[PromptItem]] = [[] for _ in rows]  # of each candidate
        for entry, seed in self.ways:
            asked = self.prompts(seed, rows)
            results = entry.decode([i.prompt for i in asked], seed, self.config.batch_size)
            tokens = [list(r.tokens) for r in results]
            read: Sequence[float | None] = [None] * len(rows)
            if self.reader is not None:
                read = self.reader.log_likelihood(tokens, [i.text_ids for i in asked])
            for i, (item, result) in enumerate(zip(asked, results, strict=True)):
                candidates[i].append(
                    Candidate(entry.name, tokens[i], seed, bool(result.truncated), read[i])
                )
                items[i].append(item)
        return (
            candidates
            if self.vocoder is None
            else [self._voiced(self.vocoder, c, i) for c, i in zip(candidates, items, strict=True)]
        )

    def _voiced(
        self, vocoder: Vocoder, candidates: list[Candidate], items: list[PromptItem]
    ) -> list[Candidate]:
        """The candidates of a sentence, the best of them with what is heard of their sound."""
        whole = [i for i, c in enumerate(candidates) if c.tokens and not c.truncated]
        whole.sort(key=lambda i: -(candidates[i].read or 0.0))
        chosen = whole[: self.config.voiced or None]
        waves = voice(
            vocoder,
            [candidates[i].tokens for i in chosen],
            [items[i].speaker_embedding for i in chosen],
            [items[i].text for i in chosen],
        )
        wers: list[float | None] = [None] * len(chosen)
        if self.recognizer is not None:
            texts = transcripts(self.recognizer, waves, vocoder.sample_rate)
            wers = [
                word_errors(items[i].text, text).rate for i, text in zip(chosen, texts, strict=True)
            ]
        for i, wave, wer in zip(chosen, waves, wers, strict=True):
            similarity = None
            if self.similarity is not None:
                similarity = self.similarity(wave, vocoder.sample_rate, items[i].speaker_embedding)
            candidates[i] = replace(candidates[i], wer=wer, similarity=similarity)
        return candidates


def run(config: DistilConfig) -> Path:
    """Speak, judge, choose, and write the prepared corpus; what was finished before a run was cut
    off is used again.

    Raises ConfigError, DataError, CheckpointError, StorageError; ProcessError where other processes
    do not come.
    """
    out = Path(config.out)
    check_out_dir(out, read=config.data)
    if made := prepared_info(config.data).get("distilled"):
        raise DataError(
            f"{config.data}: is distilled; for another round give data={made['from']}, the corpus "
            "that it "
            "was made from, and the new decoder"
        )
    state, meeting = start(config)
    teacher = Teacher(config, config.device or str(state.device))
    done = partial_folder(out) / teacher.identity
    order = np.argsort(teacher.split.columns["text_units"], kind="stable").tolist()
    blocks = {done / f"{i:06}.json": order[i : i + BLOCK] for i in range(0, len(order), BLOCK)}
    with writing(out), threads_of(0, teacher.parameters, state.num_processes):
        mine = list(blocks.items())[state.process_index :: state.num_processes]
        for path, rows in tqdm(
            mine, desc="speak and judge", unit="block", disable=not state.is_main_process
        ):
            if read_json(path) is None:
                said = zip(rows, teacher.speak(rows), strict=True)
                write_json(
                    path, {str(row): [asdict(c) for c in candidates] for row, candidates in said}
                )
        meeting.wait("speaking and judging")
        if state.is_main_process:
            write(config, teacher, list(blocks), out)
    meeting.wait("writing the corpus")
    return out


def write(config: DistilConfig, teacher: Teacher, blocks: Sequence[Path], out: Path) -> None:
    """Choose among the candidates in the files `blocks`, and write the corpus to `out`, whole or
    not at all."""
    info = prepared_info(config.data)
    chosen: dict[int, Candidate] = {}
    for path in tqdm(blocks, desc="choose", unit="block"):
        for row, candidates in (read_json(path) or {}).items():
            found = best([Candidate(**c) for c in candidates], config)
            if found and not keeps_recording(
                teacher.rows[int(row)]["id"], config.recordings, config.seed
            ):
                chosen[int(row)] = found

    prompts: dict[int, PromptItem] = {}
    # without BOS training has no prompt
    for seed in sorted({c.seed for c in chosen.values()}) if teacher.bos else ():
        rows = [row for row, c in chosen.items() if c.seed == seed]
        prompts |= dict(zip(rows, teacher.prompts(seed, rows), strict=True))

    def spoken(row: dict[str, Any], index: int) -> dict[str, Any]:
        if index not in chosen:
            return {"recorded": row["speech"], "spoken_by": RECORDING, "score": math.nan}
        found = chosen[index]
        named = (
            {
                "prompt_speech": list(prompts[index].prompt.prompt_ids),
                "prompt_voice": prompts[index].speaker_embedding.tolist(),
            }
            if prompts
            else {}
        )
        return {
            "speech": found.tokens,
            "recorded": row["speech"],
            "spoken_by": f"{found.spoken_by} seed {found.seed}",
            "score": found.score(config),
            "duration": len(found.tokens) / info["tokenizer"]["rate_hz"],
            **named,
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
    tokenizer = {name: value for name, value in info["tokenizer"].items() if name != "layers"}
    splits = (
        (split, train if split == "train" else without_residual(load_prepared(config.data, split)))
        for split in info["counts"]
    )
    save_splits(out, splits, {**info, "tokenizer": tokenizer, "distilled": distilled})
    logger.info(
        "%s: %d of %d sentences are spoken by a decoder, %d keep their recording",
        out,
        len(chosen),
        sources.total(),
        sources[RECORDING],
    )


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(f"written to {run_claimed(run, load_config(DistilConfig, arguments))}")


if __name__ == "__main__":
    sys.exit(run_command("launch.distil", main))
