"""What a comparison says of the chunks themselves: why they end where they do, and what is heard there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dcar.audio import load_audio
from dcar.errors import DataError
from eval.analysis.reasons import chooses_chunks, watch
from eval.methods.registry import Entry
from eval.report.plots import draw_reasons
from eval.report.spectrum import save_picture, spectrum_picture
from eval.results.store import Maker, Record, RecordStore, Tools

REASONS_VERSION = 1  # of what is noted; another one is noted again


class Explanations:
    """Why chunks end, method by method (`eval.analysis.reasons.watch`), of `utterances` spread over all of a maker's.
    Kept in reasons/ beside the records, found again by the fingerprints of what was spoken: like records they are made
    once, by any process."""

    def __init__(self, maker: Maker, utterances: int, out: Path, process_index: int = 0):
        self.maker, self.tools = maker, maker.tools
        size = len(self.tools.items)
        self.chosen = np.linspace(0, size - 1, min(utterances, size)).round().astype(int).tolist()
        self.store = RecordStore(out / "reasons", process_index)
        entries = maker.entries.values() if self.chosen else ()
        self.watched = [e for e in entries if chooses_chunks(e)]

    def _work(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        """What is to be noted: name → (what it depends on, as a digest, and what makes it)."""
        prompts, seed = [self.tools.items[i].prompt for i in self.chosen], self.maker.first_seed

        def reasons(entry: Entry) -> Callable[[], Any]:
            return lambda: watch([entry], prompts, seed)[entry.name]

        return {e.name: (self._key(e.name), reasons(e)) for e in self.watched}

    def _key(self, name: str) -> str:
        said = [REASONS_VERSION, self.maker.first_seed, *(self.maker.fingerprint(name, i) for i in self.chosen)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    def _noted(self) -> dict[tuple[str, str], Any]:
        return {(r["of"], r["key"]): r["found"] for r in self.store.read()
                if {"of", "key", "found"} <= r.keys()}  # others were damaged, and are noted again

    def note(self, share: int, shares: int) -> None:
        """Make what no process has noted before: of all that there is to note every `shares`-th, from `share` on."""
        noted, work = self._noted(), self._work()
        self.store.open()
        mine = [(name, key, make) for i, (name, (key, make)) in enumerate(work.items())
                if i % shares == share and (name, key) not in noted]
        for name, key, make in tqdm(mine, desc="2/4 why chunks end", unit="method", disable=None if mine and not share
                                    else True):
            self.store.append({"of": name, "key": key, "found": make()})

    def told(self, out: Path) -> dict[str, Any]:
        """reasons for compare.json, and their picture in `out`. DataError where a process stopped early."""
        noted, found = self._noted(), {}
        for name, (key, _) in self._work().items():
            if (name, key) not in noted:
                raise DataError(f"{out}/reasons: nothing was noted of {name}; a process stopped early; run the "
                                "comparison again, it continues")
            found[name] = noted[name, key]
        draw_reasons(found, out)
        return {"reasons": found}


def sample_picture(tools: Tools, record: Record, text: str, audio: Path) -> Path | None:
    """Beside the audio of a record a picture of it: spectrogram, phonemes, and the chunks of its passes. None where
    nothing was spoken in passes, or the phonemes cannot be told."""
    if tools.aligner is None or not record.get("emitted") or not record["duration"]:
        return None
    rate = len(record["tokens"]) / record["duration"]  # tokens a second
    sounds = [(s.start / rate, s.end / rate, s.phoneme) for s in tools.aligner.align(record["tokens"], text)]
    ends = np.cumsum(record["emitted"]).tolist()
    chunks = [((end - n) / rate, end / rate, n) for end, n in zip(ends, record["emitted"], strict=True) if n]
    path = audio.with_suffix(".png")
    save_picture(path, spectrum_picture(*load_audio(audio), chunks, sounds, colors="Greys", width=9.0))
    return path
