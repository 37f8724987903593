"""What two decoders of a comparison were trained on, and where that differs.

FAR stands for next-token prediction, CAR for chunks. Between two checkpoints that saw other data, or more of it, the
difference of their errors says nothing of the method. Provenance beside a checkpoint says what it was trained on, and a
comparison says aloud where that differs or is not known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from dcar.errors import CheckpointError
from dcar.model.load import Shipped
from dcar.sources.shipped import resolve, shipped
from dcar.train.checkpoints import step_of

FILE = "provenance.json"
NO_EFFECT = {"data", "out", "seed", "eval_steps", "save_steps", "log_steps", "workers", "tensorboard", "resume",
             "wait_minutes", "gradient_checkpointing", "max_steps", "init_from"}
"""Settings of a run that do not change what is learned, but for chance; max_steps, for which the steps taken stand; and
init_from, for which stands what that decoder was trained on: CAR and FAR cannot start from the same weights."""

Summary = dict[str, Any]


def training_summary(checkpoint: str, starter: Shipped, deep: int = 4) -> Summary:
    """What provenance.json beside a checkpoint says of its training: `checkpoint`, `shipped`, `known`, and where known
    `steps`, `data` (corpus, fingerprint, digest of the rows, utterances, seconds), `settings` by dotted name, and
    `started`: the same of the decoder that it started from (None: from scratch), `deep` times at most.

    checkpoint: a folder of `dcar train`, one of its checkpoint-N, or "starter": the shipped asset called `starter`.
    CheckpointError for a provenance.json that cannot be read.
    """
    folder = resolve(checkpoint, starter)
    path = next((p for p in (folder / FILE, folder.parent / FILE)
                 if p.is_file() and (p.parent == folder or folder.name.startswith("checkpoint-"))), None)
    about = {"checkpoint": checkpoint, "shipped": folder.resolve() == shipped(starter).resolve()}
    if path is None:
        return {**about, "known": False}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        data, settings = said["data"], dict(_flat(said["config"]))
        steps = said["steps"] if path.parent == folder else step_of(folder)
        corpus, train = data["corpus"], data["counts"]["train"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: does not say what {checkpoint} was trained on ({type(error).__name__}: "
                              f"{error}); `dcar train` writes it: copy it from there, or remove it, and the "
                              "comparison says that the training is not known") from error
    origin = settings.get("init_from") if deep else None
    return {**about, "known": True, "started": training_summary(origin, starter, deep - 1) if origin else None,
            "steps": steps, "processes": said.get("processes", 1),
            "data": {"corpus": corpus, "fingerprint": data.get("fingerprint"), "train_files": _train_files(data),
                     "utterances": train["utterances"], "seconds": train.get("seconds", 0.0)},
            "settings": settings}


def _train_files(data: dict[str, Any]) -> str | None:
    """One digest of the rows trained on. Their tables alone: what datasets writes beside them has names by chance."""
    tables = sorted(f"{name} {value}" for name, value in (data.get("files") or {}).items()
                    if name.startswith("train/") and name.endswith((".arrow", ".parquet")))
    return hashlib.sha256("\n".join(tables).encode()).hexdigest() if tables else None


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _of_heads(name: str) -> bool:
    """Whether a setting concerns the additional heads, which is what CAR and FAR are meant to differ in."""
    last = name.rsplit(".", 1)[-1]
    return "head" in last and last != "num_attention_heads" or last == "eos_tail"


def differences(far: Summary, car: Summary) -> list[str]:
    """Where the training of FAR differs from that of CAR, one phrase each; empty where both are known and alike."""
    if not (far["known"] and car["known"]):
        return []
    found = []
    a, b = far["data"], car["data"]
    if a["corpus"] != b["corpus"]:
        found.append(f"corpus {_corpus(a['corpus'])} against {_corpus(b['corpus'])}")
    if (a["utterances"], a["seconds"]) != (b["utterances"], b["seconds"]):
        found.append(f"{a['utterances']} utterances of {a['seconds'] / 3600:.2f} h against {b['utterances']} of "
                     f"{b['seconds'] / 3600:.2f} h")
    # a fingerprint counts times of files too, so a copied corpus has another one: the same rows are enough
    same = [a[key] == b[key] for key in ("fingerprint", "train_files") if a[key] and b[key]]
    if not found and same and not any(same):
        found.append("the corpus prepared differently (neither fingerprint nor rows are the same)")
    for name in ("steps", "processes"):
        if far[name] != car[name]:
            found.append(f"{name} {far[name]} against {car[name]}")
    names = [n for n in (*car["settings"], *(n for n in far["settings"] if n not in car["settings"]))
             if n not in NO_EFFECT and not _of_heads(n)]
    missing = "not set"
    for name in names:
        ours, theirs = far["settings"].get(name, missing), car["settings"].get(name, missing)
        if ours != theirs:
            found.append(f"{name} {ours if ours != '' else 'none'} against {theirs if theirs != '' else 'none'}")
    return found + _earlier(far["started"], car["started"])


def _earlier(far: Summary | None, car: Summary | None) -> list[str]:
    """Where the decoders that they started from differ. The shipped ones were trained alike, as their cards say."""
    if far is None or car is None:
        ours, theirs = (f"started from {s['checkpoint']}" if s else "from scratch" for s in (far, car))
        return [] if far is car else [f"{ours} against {theirs}"]
    if far["known"] and car["known"]:
        return [f"before that, {said}" for said in differences(far, car)]
    alike = far["shipped"] and car["shipped"]
    return [] if alike else [f"what they started from is not known ({far['checkpoint']} against {car['checkpoint']})"]


def _corpus(corpus: Any) -> str:
    if not isinstance(corpus, dict):
        return str(corpus)
    place = corpus.get("path")
    return f"{corpus.get('kind', 'unknown')}{f' ({place})' if place else ''}"


def training_note(training: dict[str, Any] | None) -> str | None:
    """The sentence of table and report; None where there is no FAR, or FAR and CAR were trained alike.

    training: `far` and `decoder` as `training_summary` gives them, and their `differences`.
    """
    if not training:
        return None
    if both_shipped(training) and not (training["far"]["known"] and training["decoder"]["known"]):
        return f"FAR and CAR are the shipped decoders: trained alike by their cards (README.md), without a {FILE}."
    unknown = [f"the {name} decoder ({side['checkpoint']})" for name, side in
               (("CAR", training["decoder"]), ("FAR", training["far"])) if not side["known"]]
    if unknown:
        return (f"Whether FAR and CAR were trained on the same data is not known: no {FILE} beside "
                f"{' and '.join(unknown)}.")
    if training["differences"]:
        return ("Warning: FAR was not trained as CAR was (FAR against CAR): "
                f"{'; '.join(training['differences'])}. What sets them apart here need not be the method; train both "
                "with the same data and settings (recipes car_starter and car_starter:far).")
    return None


def both_shipped(training: dict[str, Any]) -> bool:
    """Whether FAR and CAR are the decoders that ship with the package."""
    return training["far"]["shipped"] and training["decoder"]["shipped"]


def compare_training(decoder: str, far_decoder: str) -> dict[str, Any]:
    """Both summaries, and their differences, for compare.json. CheckpointError as in `training_summary`."""
    far, car = training_summary(far_decoder, "far"), training_summary(decoder, "decoder")
    return {"far": far, "decoder": car, "differences": differences(far, car)}
