"""Why a chunk ended where it did: the last token that was kept and the first that was dropped, over many decisions.

Methods that choose their chunks, by a fixed size, a rule or a policy, speak some utterances once more, watched: at
every decision all heads draw, and what `heads.candidates` says of the tokens is noted, also where the schedule itself
does not look. Draws are addressed, so the speech is the same as unwatched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.decoding import Choice, ChunkMethod, ChunkSchedule, DecodeResult, Prompt, Session, decode
from eval.methods.registry import Entry
from heads.candidates import FEATURES, candidate_features

QUARTILES = (0.25, 0.5, 0.75)


class Watched:
    """A schedule that decides as it does, while all candidates are drawn and noted."""

    def __init__(self, schedule: ChunkSchedule, heads: int):
        self.schedule, self.candidates, self.name = schedule, heads, schedule.name
        self.num_candidates: int = schedule.num_candidates if schedule.candidates else 1  # type: ignore[attr-defined]

    def begin(self, session: Session) -> None:
        self.schedule.begin(session)

    def see(self, session: Session, logits: Tensor, tokens: Tensor) -> Tensor:
        if not self.schedule.candidates:
            return candidate_features(logits, tokens)
        return self.schedule.see(session, logits, tokens)  # type: ignore[attr-defined]

    def choose(self, session: Session, hidden: Tensor, counts: Tensor, candidates: Tensor | None) -> Choice:
        assert candidates is not None
        seen = self.schedule.candidates
        return self.schedule.choose(session, hidden, counts, candidates[:, :, :seen] if seen else None)

    def select(self, rows: Tensor) -> None:
        self.schedule.select(rows)


def chooses_chunks(entry: Entry) -> bool:
    """Whether there is something to watch: a method of chunks, not of drafts, on a decoder of more than one head."""
    return isinstance(entry.build(), ChunkMethod) and entry.decoder.config.num_prediction_heads > 1


def watch(entries: Iterable[Entry], prompts: Sequence[Prompt], seed: int, batch_size: int = 16) -> dict[str, Any]:
    """Method → what its decisions saw (`summary`), of those that `chooses_chunks` lets through."""
    found = {}
    for entry in filter(chooses_chunks, entries):
        method, heads = entry.build(), entry.decoder.config.num_prediction_heads
        assert isinstance(method, ChunkMethod)
        results = decode(entry.decoder, prompts, ChunkMethod(Watched(method.schedule, heads)), entry.sampling,
                         seed=seed, record_hidden=True, batch_size=batch_size)
        found[entry.name] = summary(results)
    return found


def summary(results: Sequence[DecodeResult]) -> dict[str, Any]:
    """What the decisions of watched utterances have in common.

    decisions: those whose chunk was spoken whole; sizes: by size, share of them and the means of the features of the
    last kept and the first dropped token (None where all heads were kept); kept, dropped: quartiles over all of them;
    likeliest: share that end on the likeliest of the tokens that some decision ended on.
    """
    size, seen = _decisions(results)
    if not len(size):
        return {"decisions": 0, "sizes": [], "kept": None, "dropped": None, "likeliest": None}
    kept = seen[np.arange(len(size)), size - 1]
    some = size < seen.shape[1]
    dropped = seen[some, size[some]]
    ends = np.unique(size)
    likeliest = ends[seen[:, ends - 1, 0].argmax(1)] == size
    return {
        "decisions": len(size),
        "sizes": [{"size": int(a), "share": float((size == a).mean()), "kept": _means(kept[size == a]),
                   "dropped": _means(dropped[size[some] == a])} for a in ends],
        "kept": _quartiles(kept), "dropped": _quartiles(dropped),
        "likeliest": float(likeliest.mean()) if len(ends) > 1 else None,
    }


def _decisions(results: Sequence[DecodeResult]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes [N] of the chunks that were spoken whole, and the features [N, K, 3] of what was spoken or dropped."""
    sizes, seen = [], []
    for result in results:
        spoken = result.seen_of_spoken
        assert spoken is not None
        whole = torch.tensor(result.emitted) == torch.tensor(result.actions)
        sizes.append(np.array(result.actions)[whole.numpy()])
        seen.append(spoken[whole][..., : len(FEATURES)].float().cpu().numpy())
    return np.concatenate(sizes), np.concatenate(seen)


def _means(features: np.ndarray) -> dict[str, float] | None:
    return dict(zip(FEATURES, features.mean(0).tolist(), strict=True)) if len(features) else None


def _quartiles(features: np.ndarray) -> dict[str, list[float]] | None:
    if not len(features):
        return None
    return {name: np.quantile(features[:, i], QUARTILES).tolist() for i, name in enumerate(FEATURES)}
