"""Why a chunk ended where it did: the last token that was kept and the first that was dropped, over
many decisions.

Methods that choose their chunks, by a fixed size, a rule or a policy, speak some utterances once
more, watched: at every decision all heads draw, and what `heads.candidates` says of the tokens is
noted, also where the schedule itself does not look. Draws are addressed, so the speech is the same
as unwatched.
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
from dcar.decoding import BatchState, Choice, ChunkMethod, ChunkRule, DecodeResult, Prompt, decode
from dcar.decoding.chunks import Scheduled
from dcar.errors import DataError
from dcar.storage import digest_of
from eval.methods.registry import Entry
from eval.report.listen import save_picture, spectrum_picture
from eval.report.plots import draw_reasons
from eval.results.store import Maker, Record, RecordStore, Tools
from heads.candidates import FEATURES

QUARTILES = (0.25, 0.5, 0.75)
REASONS_VERSION = 1  # of what is noted; another one is noted again


class Watched(Scheduled, ChunkRule):
    """A schedule that decides as it does, while all candidates are drawn and noted."""

    def __init__(self, schedule: ChunkRule, heads: int):
        self.schedule, self.candidates, self.name = schedule, heads, schedule.name
        self.streams = schedule.streams
        if schedule.candidates:
            self.num_candidates, self.features = schedule.num_candidates, schedule.features

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        if not self.schedule.candidates:
            return super().candidate_features(state, logits, tokens)
        return self.schedule.candidate_features(state, logits, tokens)

    def choose(self, state: BatchState, candidates: Tensor | None) -> Choice:
        assert candidates is not None
        seen = self.schedule.candidates
        return self.schedule.choose(state, candidates[:, :, :seen] if seen else None)


def chooses_chunks(entry: Entry) -> bool:
    """Whether there is something to watch: a method of chunks, not of drafts, on a decoder of
    more than one head."""
    return isinstance(entry.method, ChunkMethod) and entry.decoder.config.num_prediction_heads > 1


def watch(entry: Entry, prompts: Sequence[Prompt], seed: int) -> dict[str, Any]:
    """What the decisions of a method of chunks saw (`summary`)."""
    assert isinstance(entry.method, ChunkMethod)
    watched = Watched(entry.method.schedule, entry.decoder.config.num_prediction_heads)
    return summary(
        decode(
            entry.decoder,
            prompts,
            ChunkMethod(watched),
            entry.sampling,
            seed=seed,
            record_hidden=True,
            batch_size=16,
        )
    )


def summary(results: Sequence[DecodeResult]) -> dict[str, Any]:
    """What the decisions of watched utterances have in common.

    decisions: those whose chunk was spoken whole; sizes: by size, share of them and the means of
    the features of the last kept and the first dropped token (None where all heads were kept);
    kept, dropped: quartiles over all of them; likeliest: share that end on the likeliest of the
    tokens that some decision ended on.
    """
    whole = torch.cat([torch.tensor(r.emitted) == torch.tensor(r.actions) for r in results])
    size = torch.cat([torch.tensor(r.actions) for r in results])[whole].numpy()
    if not len(size):
        return {"decisions": 0, "sizes": [], "kept": None, "dropped": None, "likeliest": None}
    spoken = torch.cat([r.chosen_candidates for r in results])  # type: ignore[misc]
    seen = spoken[whole][..., : len(FEATURES)].float().cpu().numpy()  # [N, K, 3]
    kept = seen[np.arange(len(size)), size - 1]
    some = size < seen.shape[1]
    dropped = seen[some, size[some]]
    ends = np.unique(size)
    likeliest = ends[seen[:, ends - 1, 0].argmax(1)] == size

    def means(rows: np.ndarray) -> dict[str, float] | None:
        return dict(zip(FEATURES, rows.mean(0).tolist(), strict=True)) if len(rows) else None

    def quartiles(rows: np.ndarray) -> dict[str, list[float]] | None:
        return (
            dict(zip(FEATURES, np.quantile(rows, QUARTILES, axis=0).T.tolist(), strict=True))
            if len(rows)
            else None
        )

    return {
        "decisions": len(size),
        "sizes": [
            {
                "size": int(a),
                "share": float((size == a).mean()),
                "kept": means(kept[size == a]),
                "dropped": means(dropped[size[some] == a]),
            }
            for a in ends
        ],
        "kept": quartiles(kept),
        "dropped": quartiles(dropped),
        "likeliest": float(likeliest.mean()) if len(ends) > 1 else None,
    }


class Explanations:
    """Why chunks end, method by method (`watch`), of `utterances` spread over all of a maker's.
    Kept in reasons/ beside the records, found again by the fingerprints of what was spoken: like
    records they are made once, by any process."""

    def __init__(self, maker: Maker, utterances: int, out: Path, process_index: int = 0):
        self.maker = maker
        self.chosen = spread(len(maker.tools.items), utterances)
        self.store = RecordStore(out / "reasons", process_index)
        self.watched = (
            [e for e in maker.entries.values() if chooses_chunks(e)] if self.chosen else []
        )

    def _key(self, entry: Entry) -> tuple[str, str]:
        """The name of a method, and a digest of what its reasons depend on."""
        said = [
            REASONS_VERSION,
            self.maker.first_seed,
            *(self.maker.fingerprint(entry.name, i) for i in self.chosen),
        ]
        return entry.name, digest_of(said)[:16]

    def _noted(self) -> dict[tuple[str, str], Any]:
        return {
            (r["of"], r["key"]): r["found"]
            for r in self.store.read()
            if {"of", "key", "found"} <= r.keys()
        }  # others were damaged, and are noted again

    def note(self, share: int, shares: int) -> None:
        """Make what no process has noted before: of all that there is to note every `shares`-th,
        from `share` on."""
        noted, prompts = self._noted(), [self.maker.tools.items[i].prompt for i in self.chosen]
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
                {"of": name, "key": key, "found": watch(entry, prompts, self.maker.first_seed)}
            )

    def told(self, out: Path) -> dict[str, Any]:
        """reasons for compare.json, and their picture in `out`. DataError where a process
        stopped early."""
        noted = self._noted()
        if absent := [e.name for e in self.watched if self._key(e) not in noted]:
            raise DataError(
                f"{out}/reasons: nothing was noted of {absent[0]}; a process stopped early; run "
                "the "
                "comparison again, it continues"
            )
        found = {e.name: noted[self._key(e)] for e in self.watched}
        draw_reasons(found, out)
        return {"reasons": found}


def spread(size: int, count: int) -> list[int]:
    """`count` of the indices below `size`, or all, at equal distances: ids are sorted, so over
    speakers as well."""
    return np.linspace(0, size - 1, min(count, size)).round().astype(int).tolist()


def sample_picture(tools: Tools, record: Record, text: str, audio: Path) -> Path | None:
    """Beside the audio of a record a picture of it: spectrogram, phonemes, and the chunks of its
    passes. None where nothing was spoken in passes, or the phonemes cannot be told."""
    if tools.aligner is None or not record.get("emitted") or not record["duration"]:
        return None
    rate = len(record["tokens"]) / record["duration"]  # tokens a second
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
