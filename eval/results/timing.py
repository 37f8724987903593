"""Batch-1 timing of methods: one clock, methods interleaved, warm-up excluded, the vocoder measured
separately from the LM.

RTF = compute time / audio time, lower is better; end to end: language model (with policy, draft and
verification) and vocoder. Every method, verifiers included, runs in the same engine. For every
utterance all methods run one after the other, in an order that rotates, so that a slowdown of the
machine affects all of them. On a GPU each decodes an utterance once before it is timed on it,
because the step is captured as a graph at the first use of a shape. The time to first audio is
measured by decoding once more until the vocoder can begin. An interrupted timing
continues. If any method, its sampling, the device or the machine changed, everything is timed
again, because times of two sessions do not compare.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcar.decoding.kept import kept_engines
from dcar.prompts.items import PromptItem
from dcar.speak.stream import speak_first_audio
from dcar.storage import digest_of
from dcar.tracking import machine
from dcar.vocoder.base import Vocoder
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.voicing import synthesize
from eval.methods.registry import Entry
from eval.results.store import RECORD_VERSION, RecordStore, described, read_jsonl

TIMING_VERSION = 3  # of the records; those of another version are made again


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_gpu(entry: Entry) -> bool:
    """Return whether a method decodes on a GPU, where steps are captured as graphs."""
    return entry.decoder.norm.weight.device.type == "cuda"


def time_methods(
    items: Sequence[PromptItem],
    vocoder: Vocoder,
    entries: Sequence[Entry],
    seed: int,
    utterances: int,
    out: Path,
    identity: Any = None,
    progress: Callable[[], Any] = lambda: None,
) -> list[dict[str, Any]]:
    """Time every method on `utterances` of the items. Return one record per (utterance, method):
    seconds of LM and vocoder, of audio, and tokens. Records are kept in timings/; `of` is a
    digest of everything that the times depend on.

    identity: of the vocoder and everything else that the times depend on.
    """
    timed = [
        [e.name, e.identity, vars(e.sampling), str(e.decoder.norm.weight.device)] for e in entries
    ]
    session = [RECORD_VERSION, TIMING_VERSION, timed, seed, machine(), identity]
    store = RecordStore(out / "timings")
    chosen = items[:: max(1, len(items) // max(1, utterances))][:utterances]
    done = {(r["method"], r.get("of")): r for r in read_jsonl(store.shard)}
    store.open()
    records: list[dict[str, Any]] = []
    warm = False
    for turn, item in enumerate(chosen):
        of = digest_of([session, described(item)])[:16]
        if all((e.name, of) in done for e in entries):
            records += [done[e.name, of] for e in entries]
            continue
        if not warm:
            for entry in entries:
                _measure(vocoder, entry, item, seed)
            warm = True
        shift = turn % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            if on_gpu(entry):
                _measure(vocoder, entry, item, seed)  # captures the shapes of this utterance
            record = _measure(vocoder, entry, item, seed)
            records.append({"of": of, "method": entry.name, "id": item.utterance_id, **record})
            store.append(records[-1])
        progress()
    return records


def _measure(vocoder: Vocoder, entry: Entry, item: PromptItem, seed: int) -> dict[str, Any]:
    device = entry.decoder.norm.weight.device
    synchronize(device)
    started = time.perf_counter()
    (result,) = entry.decode([item], seed, batch_size=1)
    synchronize(device)
    decoded = time.perf_counter()
    synthesize(vocoder, [result.tokens], item.speaker_embedding[None], [item.text])
    synchronize(device)
    finished = time.perf_counter()
    # A decision is part of a step; only on a CPU, where operations are synchronous, it is timed.
    policy = None if on_gpu(entry) else result.seconds.get("policy", 0.0)
    first_audio = None
    if isinstance(vocoder, TokenVocoder):
        kept = kept_engines(entry.decoder)
        with kept.lock:
            engine = kept.engine(entry.method, entry.sampling, rows=1)
            started_again = time.perf_counter()
            speak_first_audio(engine, item, seed, vocoder, item.speaker_embedding)
            synchronize(device)
            first_audio = time.perf_counter() - started_again
    return {
        "lm": decoded - started,
        "vocoder": finished - decoded,
        "policy": policy,
        "first_audio": first_audio,
        "audio": len(result.tokens) / vocoder.token_rate,
        "tokens": len(result.tokens),
        "passes": result.passes,
        "draft_passes": result.draft_passes,
    }


def summarize(records: Sequence[dict[str, Any]], method: str) -> dict[str, float | None]:
    """Return medians over utterances of one method; None for what was not timed, such as the
    policy's share on a GPU, or the seconds to first audio with a vocoder that cannot stream."""
    mine = [r for r in records if r["method"] == method and r["audio"] > 0]
    values_of = {
        "lm_rtf": [r["lm"] / r["audio"] for r in mine],
        "rtf": [(r["lm"] + r["vocoder"]) / r["audio"] for r in mine],
        "lm_ms_per_token": [1e3 * r["lm"] / r["tokens"] for r in mine],
        "policy_share": []
        if any(r["policy"] is None for r in mine)
        else [r["policy"] / r["lm"] for r in mine],
        "first_audio": [r["first_audio"] for r in mine if r["first_audio"] is not None],
    }
    return {
        name: float(np.median(values)) if values else None for name, values in values_of.items()
    }


def speedup(row: dict[str, Any], baseline: dict[str, Any] | None, rtf: str) -> float | None:
    """Return the baseline's `rtf` / the method's: the quotient of the two times in the table."""
    return baseline[rtf] / row[rtf] if baseline and baseline[rtf] and row[rtf] else None


def speedup_quartiles(
    records: Sequence[dict[str, Any]], method: str, baseline: str
) -> list[float] | None:
    """Return the first and third quartile over utterances of the baseline's time / the method's,
    end to end: the spread between utterances."""

    def seconds(name: str) -> dict[str, float]:
        return {
            r["id"]: (r["lm"] + r["vocoder"]) / r["audio"]
            for r in records
            if r["method"] == name and r["audio"] > 0
        }

    mine, theirs = seconds(method), seconds(baseline)
    ratios = [theirs[i] / mine[i] for i in mine.keys() & theirs.keys()]
    return [float(q) for q in np.quantile(ratios, [0.25, 0.75])] if ratios else None
