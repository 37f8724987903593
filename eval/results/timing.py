"""Batch-1 timing of methods: one clock, methods interleaved, warm-up excluded, the vocoder measured
separately from the LM.

RTF = compute time / audio time, lower is better; end to end: language model (with policy, draft and
verification) and vocoder. Every method, verifiers included, runs in the same engine. For every
utterance all methods run one after the other, in an order that rotates, so that a slowdown of the
machine affects all of them. On a GPU each decodes an utterance once before it is timed on it,
because the step is captured as a graph at the first use of a shape. The time to first audio is
measured by decoding once more until the vocoder can begin. Every process times utterances of its
own. An interrupted timing continues. If any method, its sampling, the device, the machine or the
number of processes changed, everything is timed again, because times of two sessions do not
compare.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcar.decoding.pool import engine_pool
from dcar.methods import Entry
from dcar.prompts.items import PromptItem
from dcar.speak.stream import speak_first_audio
from dcar.storage import digest_of
from dcar.tracking import machine
from dcar.vocoder.base import Vocoder
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.voicing import synthesize
from eval.results.store import JsonLines, described
from eval.results.types import (
    RECORD_VERSION,
    Speed,
    Speedup,
    Timing,
    from_json,
    read_jsonl,
)

TIMING_VERSION = 4  # of the records; those of another version are made again


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_gpu(entry: Entry) -> bool:
    """Return whether a method decodes on a GPU, where steps are captured as graphs."""
    return entry.decoder.norm.weight.device.type == "cuda"


def chosen_to_time(items: Sequence[PromptItem], utterances: int) -> list[PromptItem]:
    """Return so many items, evenly spaced, or all of them if there are fewer."""
    return list(items[:: max(1, len(items) // max(1, utterances))][:utterances])


def time_methods(
    items: Sequence[PromptItem],
    vocoder: Vocoder,
    entries: Sequence[Entry],
    seed: int,
    folder: Path,
    identity: Any = None,
    progress: Callable[[], Any] = lambda: None,
    process: int = 0,
    processes: int = 1,
) -> None:
    """Time every method on this process' share of the items, and keep the times in `folder`.
    `read_timings` returns those of all processes.

    identity: of the vocoder and everything else that the times depend on.
    """
    session = session_of(entries, seed, identity, processes)
    store = JsonLines(folder, process)
    done = {(t.of, t.method) for t in _stored(folder)}
    store.open()
    warm = False
    for turn, item in list(enumerate(items))[process::processes]:
        of = digest_of([session, described(item)])[:16]
        progress()
        if all((of, e.name) in done for e in entries):
            continue
        if not warm:
            for entry in entries:
                _measure(vocoder, entry, item, seed, of)
            warm = True
        # another order for every utterance, so that a slow minute hits all methods alike
        shift = turn % len(entries)
        for entry in [*entries[shift:], *entries[:shift]]:
            if on_gpu(entry):
                _measure(vocoder, entry, item, seed, of)  # captures the shapes of this utterance
            store.append(_measure(vocoder, entry, item, seed, of))


def read_timings(
    items: Sequence[PromptItem],
    entries: Sequence[Entry],
    seed: int,
    folder: Path,
    identity: Any = None,
    processes: int = 1,
) -> list[Timing]:
    """Return the times of every method on every item that `time_methods` has stored, of whatever
    process; the last one counts."""
    session = session_of(entries, seed, identity, processes)
    stored = {(t.of, t.method): t for t in _stored(folder)}
    wanted = [(digest_of([session, described(i)])[:16], e.name) for i in items for e in entries]
    return [stored[key] for key in wanted if key in stored]


def session_of(entries: Sequence[Entry], seed: int, identity: Any, processes: int) -> list[Any]:
    """Return everything that times depend on besides the utterance: processes that time side by
    side share the memory of a machine."""
    timed = [
        [e.name, dict(e.identity), vars(e.sampling), str(e.decoder.norm.weight.device)]
        for e in entries
    ]
    return [RECORD_VERSION, TIMING_VERSION, timed, seed, machine(), processes, identity]


def _stored(folder: Path) -> list[Timing]:
    read = partial(from_json, Timing)
    return [t for path in sorted(folder.glob("shard-*.jsonl")) for t in read_jsonl(path, read)]


def _measure(vocoder: Vocoder, entry: Entry, item: PromptItem, seed: int, of: str) -> Timing:
    device = entry.decoder.norm.weight.device
    synchronize(device)
    started = time.perf_counter()
    (result,) = entry.decode([item], seed, batch_size=1)
    synchronize(device)
    decoded = time.perf_counter()
    synthesize(vocoder, [result.tokens], item.speaker_embedding[None], [item.text])
    synchronize(device)
    finished = time.perf_counter()
    first_audio = None
    if isinstance(vocoder, TokenVocoder):
        engines = engine_pool(entry.decoder)
        with engines.lock:
            engine = engines.engine(entry.method, entry.sampling, rows=1)
            started_again = time.perf_counter()
            speak_first_audio(engine, item, seed, vocoder, item.speaker_embedding)
            synchronize(device)
            first_audio = time.perf_counter() - started_again
    return Timing(
        of=of,
        method=entry.name,
        id=item.utterance_id,
        lm=decoded - started,
        vocoder=finished - decoded,
        first_audio=first_audio,
        audio=len(result.tokens) / vocoder.token_rate,
        tokens=len(result.tokens),
        passes=result.passes,
        draft_passes=result.draft_passes,
    )


def speed_of(timings: Sequence[Timing], method: str) -> Speed | None:
    """Return medians over the utterances of one method; None if none was timed."""
    mine = [t for t in timings if t.method == method and t.audio > 0]
    if not mine:
        return None
    first = [t.first_audio for t in mine if t.first_audio is not None]
    return Speed(
        rtf=float(np.median([t.rtf for t in mine])),
        lm_rtf=float(np.median([t.lm / t.audio for t in mine])),
        lm_ms_per_token=float(np.median([1e3 * t.lm / t.tokens for t in mine])),
        first_audio=float(np.median(first)) if first else None,
        utterances=len(mine),
    )


def speedup(timings: Sequence[Timing], method: str, baseline: str) -> Speedup | None:
    """Return the quotients of the two methods' times, baseline / method: of the medians in the
    table, and the quartiles over the utterances that both have."""
    mine, theirs = speed_of(timings, method), speed_of(timings, baseline)
    if mine is None or theirs is None:
        return None
    of = {
        name: {t.id: t.rtf for t in timings if t.method == name and t.audio > 0}
        for name in (method, baseline)
    }
    shared = of[method].keys() & of[baseline].keys()
    ratios = [of[baseline][i] / of[method][i] for i in shared]
    if not ratios:
        return None
    low, high = np.quantile(ratios, [0.25, 0.75])
    return Speedup(
        baseline,
        theirs.rtf / mine.rtf,
        theirs.lm_rtf / mine.lm_rtf,
        (float(low), float(high)),
    )
