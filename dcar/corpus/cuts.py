"""Lhotse cut manifests (`*.jsonl` or `*.jsonl.gz`, one cut per line), including LibriHeavy's, read
as documented.

A cut is a stretch (`start`, `duration`, seconds) of a `recording` whose `sources` name the audio.
Its words are in `supervisions`: as `text`, or, in LibriHeavy's full manifests, as `custom.texts`,
of which the first has case and punctuation. Only cuts of one channel of one plain audio file are
read. Everything that lhotse would compute (mixtures, padding, speed changes, precomputed features)
is a bad row.
"""

import base64
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from dcar.corpus.rows import (
    AudioSegment,
    BadRow,
    Part,
    Utterance,
    file_part,
    files_in,
    known_split,
    line_rows,
    note_one_speaker,
)
from dcar.errors import DataError

ROUNDING = 0.1
"""Seconds by which supervisions may exceed their cut: manifests round times."""


def cut_parts(root: Path, audio_root: Path | None = None) -> list[Part]:
    """Return the parts of one manifest, or of every `*.jsonl` and `*.jsonl.gz` of a folder.
    `audio_root`: folder that relative audio paths start from; by default they are searched for
    from the manifest's folder upwards."""
    files = [root] if root.is_file() else files_in(root, ".jsonl", ".jsonl.gz")
    if not files:
        raise DataError(f"{root}: no cut manifest (*.jsonl, *.jsonl.gz) in this folder")
    return [
        file_part(
            f,
            line_rows,
            partial(cut_utterance, _AudioRoots(f, audio_root), split_of_manifest(f.name)),
        )
        for f in files
    ]


def split_of_manifest(name: str) -> str | None:
    """Return train, dev or test, from the name of a cut manifest
    (`libriheavy_cuts_small.jsonl.gz`, `cuts_dev.jsonl`)."""
    label = re.sub(r"(?i)\.jsonl(\.gz)?$", "", name).rpartition("cuts_")[2]
    # subsets of LibriHeavy
    return "train" if label in ("small", "medium", "large") else known_split(label)


class _AudioRoots:
    """Search for the audio of a manifest: the first folder that contains a file is used for the
    rest."""

    def __init__(self, manifest: Path, audio_root: Path | None) -> None:
        folder = manifest.resolve().parent
        self.places = [(base, 0) for base in (folder, *folder.parents[:3], Path.cwd())]
        # the manifests of LibriHeavy say download/librilight/…, wherever the audio is
        if audio_root is not None:
            self.places = [(audio_root, drop) for drop in range(4)]

    def __call__(self, source: str) -> Path:
        path = Path(source)
        if path.is_absolute():
            return path
        for place in self.places:
            candidate = place[0].joinpath(*path.parts[place[1] :])
            if os.path.isfile(candidate):
                self.places.remove(place)
                self.places.insert(0, place)
                return candidate
        return self.places[0][0] / path


def cut_utterance(roots: _AudioRoots, split: str | None, text: str, source: str) -> Utterance:
    """Return the utterance of a line of a manifest. Raises BadRow for everything that is not
    supported."""
    try:
        cut = json.loads(text)
    except ValueError as broken:
        raise BadRow(f"not valid JSON ({broken}); one cut a line") from broken
    name = cut.get("id") if isinstance(cut, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRow(
            "no cut: an object with id, start, duration, recording and supervisions is needed"
        )
    try:
        spoken, speaker = _words(cut)
        if speaker is None:
            note_one_speaker(source.rpartition(":")[0])
        return Utterance(
            name,
            spoken,
            "unknown" if speaker is None else str(speaker),
            _audio(cut, roots),
            split=split,
            duration=float(cut["duration"]),
            source=source,
            sample_rate=int(cut["recording"]["sampling_rate"]),
            language=str(cut["supervisions"][0].get("language") or ""),
        )
    except BadRow as bad:
        raise BadRow(f"cut {name}: {bad}", name) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as broken:
        raise BadRow(
            f"cut {name}: not the documented format ({type(broken).__name__}: {broken})", name
        ) from broken


def _words(cut: dict[str, Any]) -> tuple[str, Any]:
    """Return text and speaker of the cut's supervisions, in the order of speech. Raises BadRow for
    words that are not in the cut."""
    supervisions = sorted(cut.get("supervisions") or [], key=lambda s: float(s["start"]))
    if not supervisions:
        raise BadRow("has no supervision, so no text; trim cuts to supervisions first")
    end = max(float(s["start"]) + float(s["duration"]) for s in supervisions)
    if float(supervisions[0]["start"]) < -ROUNDING or end > float(cut["duration"]) + ROUNDING:
        raise BadRow(
            f"its text is that of {supervisions[0]['start']}…{end:g} s of the cut, which has "
            f"{cut['duration']} s; trim cuts to supervisions first"
        )
    texts = []
    for supervision in supervisions:
        text = supervision.get("text")
        if text is None:
            versions = (supervision.get("custom") or {}).get("texts")
            text = versions[0] if versions else None
        if not isinstance(text, str):
            raise BadRow("a supervision has neither text nor custom.texts")
        texts.append(text.strip())
    speakers = {s.get("speaker") for s in supervisions}
    if len(speakers) > 1:
        raise BadRow(f"has {len(speakers)} speakers; trim cuts to supervisions first")
    [speaker] = speakers
    return " ".join(texts), speaker


def _audio(cut: dict[str, Any], roots: _AudioRoots) -> str | bytes | AudioSegment:
    if (kind := cut.get("type", "MonoCut")) != "MonoCut":
        raise BadRow(
            f"is a {kind}; only MonoCuts are read: save the audio of others with lhotse's "
            "save_audios first"
        )
    recording = cut.get("recording")
    if not recording:
        raise BadRow("has no recording (features only); speech tokens are made from audio")
    if recording.get("transforms"):
        raise BadRow(
            "its recording has transforms (speed, volume, …); save the audio with lhotse's "
            "save_audios first"
        )
    channel = int(cut.get("channel") or 0)
    sources = [s for s in recording["sources"] if channel in s["channels"]]
    if not sources:
        raise BadRow(f"channel {channel} is in none of the recording's sources")
    kind, place = sources[0]["type"], sources[0]["source"]
    start = float(cut["start"])
    duration = float(cut["duration"])
    whole = float(recording["duration"])
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (start, duration, whole)):
        raise BadRow(
            f"start {start}, duration {duration} of a recording of {whole} s; correct the manifest"
        )
    if kind == "memory":
        if start > 0 or abs(duration - whole) > 0.01:
            raise BadRow(
                "is a stretch of a recording stored in the manifest; save the audio with "
                "save_audios first"
            )
        return base64.b64decode(place) if isinstance(place, str) else bytes(list(place))
    if kind != "file":
        raise BadRow(f"its audio is of type {kind!r}; download it and refer to files")
    path = str(roots(place))
    if start == 0 and abs(duration - whole) < 0.005 and sources[0]["channels"] == [0]:
        return path
    return AudioSegment(path, start, duration, sources[0]["channels"].index(channel))
