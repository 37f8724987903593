"""Statistics on why chunks end: compare the last token of a chunk with the first one left out, over
many decisions.

Methods that choose their chunks, by a fixed size, a rule or a policy, decode some utterances once
more. At every decision all heads draw, and the features of all drawn tokens (`heads.candidates`)
are recorded, including those that the method's own rule does not look at. Random numbers are
addressed, so the speech is the same as without recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dcar.audio import load_audio
from dcar.decoding import BatchState, ChunkRule, Decision, DecodeResult, Prompt, decode
from dcar.decoding.step import Admitted, Prefilled
from dcar.errors import DataError
from dcar.storage import digest_of
from eval.methods.registry import Entry
from eval.report.listen import save_picture, spectrum_picture
from eval.report.plots import draw_reasons
from eval.results.store import Maker, Record, RecordStore, Tools
from heads.candidates import FEATURES

QUARTILES = (0.25, 0.5, 0.75)
REASONS_VERSION = 2  # of the statistics; those of another version are made again


class Watched(ChunkRule):
    """Wrapper of a chunk rule: decides as the rule does, but draws and records the tokens of all
    heads."""

    after_draw = True

    def __init__(self, rule: ChunkRule):
        self.rule = rule
        self.name = rule.name
        self.streams = rule.streams
        self.logged = rule.logged
        self.num_candidates = rule.num_candidates
        self.num_features = rule.num_features

    def start(self, state: BatchState) -> None:
        self.rule.start(state)
        super().start(state)

    def refresh(self, state: BatchState) -> None:
        self.rule.refresh(state)

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        self.rule.prefill(state, rows, read)

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        self.rule.admit(state, rows, admitted)

    def observe(
        self, state: BatchState, hidden: Tensor, counts: Tensor, real: Tensor | None
    ) -> None:
        self.rule.observe(state, hidden, counts, real)

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        return self.rule.candidate_features(state, logits, tokens)

    def choose(self, state: BatchState, features: Tensor | None) -> Decision:
        assert features is not None
        if not self.rule.after_draw:
            return self.rule.choose(state, None)
        return self.rule.choose(state, features[:, :, : self.rule.width(state.width)])


def chooses_chunks(entry: Entry) -> bool:
    """Return True if the decisions of a method can be recorded: it chooses chunks, it does not
    verify drafts, and its decoder has more than one head."""
    return isinstance(entry.method, ChunkRule) and entry.decoder.config.num_prediction_heads > 1


def watch(entry: Entry, prompts: Sequence[Prompt], seed: int) -> dict[str, Any]:
    """Decode the prompts with a method that chooses chunks and return the `summary` of its
    decisions."""
    assert isinstance(entry.method, ChunkRule)
    watched = Watched(entry.method)
    return summary(
        decode(
            entry.decoder,
            prompts,
            watched,
            entry.sampling,
            seed=seed,
            record_hidden=True,
            batch_size=16,
        )
    )


def summary(results: Sequence[DecodeResult]) -> dict[str, Any]:
    """Summarise the decisions of utterances that were decoded with `Watched`.

    decisions: number of decisions whose chunk was kept whole. sizes: for each chunk size its share,
    and the mean features of the last kept token and of the first one left out (None if all heads
    were kept). kept, dropped: quartiles of these features over all decisions. likeliest: share of
    decisions that ended on the likeliest of the positions at which any decision ended (None if all
    chunks have one size).
    """
    whole = torch.cat([torch.tensor(r.emitted) == torch.tensor(r.sizes) for r in results])
    size = torch.cat([torch.tensor(r.sizes) for r in results])[whole].numpy()
    if len(size) == 0:
        return {"decisions": 0, "sizes": [], "kept": None, "dropped": None, "likeliest": None}
    recorded = torch.cat([r.chosen_features for r in results])  # type: ignore[misc]
    features = recorded[whole][..., : len(FEATURES)].float().cpu().numpy()  # [N, K, 3]
    kept = features[np.arange(len(size)), size - 1]
    shorter = size < features.shape[1]  # decisions that left a token out
    dropped = features[shorter, size[shorter]]
    ends = np.unique(size)
    likeliest = ends[features[:, ends - 1, 0].argmax(1)] == size

    def means(rows: np.ndarray) -> dict[str, float] | None:
        if len(rows) == 0:
            return None
        return dict(zip(FEATURES, rows.mean(0).tolist(), strict=True))

    def quartiles(rows: np.ndarray) -> dict[str, list[float]] | None:
        if len(rows) == 0:
            return None
        return dict(zip(FEATURES, np.quantile(rows, QUARTILES, axis=0).T.tolist(), strict=True))

    return {
        "decisions": len(size),
        "sizes": [
            {
                "size": int(a),
                "share": float((size == a).mean()),
                "kept": means(kept[size == a]),
                "dropped": means(dropped[size[shorter] == a]),
            }
            for a in ends
        ],
        "kept": quartiles(kept),
        "dropped": quartiles(dropped),
        "likeliest": float(likeliest.mean()) if len(ends) > 1 else None,
    }


class Explanations:
    """Statistics on why chunks end (`watch`), by method, for `utterances` evenly spaced ones of a
    maker.

    They are stored in reasons/ next to the records and found by the fingerprints of the decoded
    utterances. Like records, they are made once, by any process.
    """

    def __init__(self, maker: Maker, utterances: int, out: Path, process_index: int = 0):
        self.maker = maker
        self.chosen = spread(len(maker.tools.items), utterances)
        self.store = RecordStore(out / "reasons", process_index)
        self.watched: list[Entry] = []
        if self.chosen:
            self.watched = [e for e in maker.entries.values() if chooses_chunks(e)]

    def _key(self, entry: Entry) -> tuple[str, str]:
        """Return the name of a method and a digest of everything that its statistics depend on."""
        basis = [
            REASONS_VERSION,
            self.maker.first_seed,
            *(self.maker.fingerprint(entry.name, i) for i in self.chosen),
        ]
        return entry.name, digest_of(basis)[:16]

    def _noted(self) -> dict[tuple[str, str], Any]:
        # damaged records lack a field, and are made again
        return {
            (r["method"], r["key"]): r["summary"]
            for r in self.store.read()
            if {"method", "key", "summary"} <= r.keys()
        }

    def note(self, share: int, shares: int) -> None:
        """Make the statistics that are not stored yet: those of every `shares`-th method,
        starting at `share`."""
        noted = self._noted()
        prompts = [self.maker.tools.items[i] for i in self.chosen]
        self.store.open()
        mine = [e for e in self.watched[share::shares] if self._key(e) not in noted]
        for entry in tqdm(
            mine,
            desc="2/4 why chunks end",
            unit="method",
            disable=None if mine and not share else True,
        ):
            name, key = self._key(entry)
            self.store.append(
                {
                    "method": name,
                    "key": key,
                    "summary": watch(entry, prompts, self.maker.first_seed),
                }
            )

    def result(self, out: Path) -> dict[str, Any]:
        """Return the entry `reasons` of compare.json and draw its picture in `out`. Raises
        DataError if statistics are missing because a process stopped early."""
        noted = self._noted()
        if absent := [e.name for e in self.watched if self._key(e) not in noted]:
            raise DataError(
                f"{out}/reasons: nothing was noted of {absent[0]}; a process stopped early; run "
                "the comparison again, it continues"
            )
        reasons = {e.name: noted[self._key(e)] for e in self.watched}
        draw_reasons(reasons, out)
        return {"reasons": reasons}


def spread(size: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `size`, or all of them if there are fewer.
    Utterances are sorted by id, so this covers the speakers as well."""
    return np.linspace(0, size - 1, min(count, size)).round().astype(int).tolist()


def sample_picture(tools: Tools, record: Record, text: str, audio: Path) -> Path | None:
    """Save a picture next to the audio of a record and return its path: spectrogram, phonemes
    and the chunk of each pass. None if the utterance was not decoded in passes, is empty, or its
    phonemes cannot be aligned."""
    if tools.aligner is None or not record.get("emitted") or not record["duration"]:
        return None
    rate = len(record["tokens"]) / record["duration"]  # tokens per second
    sounds = [
        (s.start / rate, s.end / rate, s.phoneme)
        for s in tools.aligner.align(record["tokens"], text)
    ]
    ends = np.cumsum(record["emitted"]).tolist()
    chunks = [
        ((end - n) / rate, end / rate, n)
        for end, n in zip(ends, record["emitted"], strict=True)
        if n
    ]
    path = audio.with_suffix(".png")
    save_picture(
        path, spectrum_picture(*load_audio(audio), chunks, sounds, colors="Greys", width=9.0)
    )
    return path
