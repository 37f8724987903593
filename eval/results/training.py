"""Training data of a comparison's two decoders, and their differences.

FAR represents next-token prediction, CAR chunks. If two checkpoints were trained on different data,
or on more of it, the difference of their errors is not one of the methods. The provenance next to a
checkpoint records what it was trained on, and a comparison prints any difference, or that it is not
known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dcar.errors import CheckpointError
from dcar.model.load import Shipped
from dcar.sources.shipped import resolve, shipped
from dcar.storage import step_of

FILE = "provenance.json"
NO_EFFECT = {
    "data",
    "out",
    "seed",
    "eval_steps",
    "save_steps",
    "log_steps",
    "workers",
    "resume",
    "wait_minutes",
    "gradient_checkpointing",
    "max_steps",
    "init_from",
}
"""Settings of a run that do not change what is learned, except by chance; max_steps, which is
replaced by the steps taken; and init_from, which is replaced by the training of that decoder:
CAR and FAR cannot start from the same weights."""

Summary = dict[str, Any]


def training_summary(checkpoint: str, starter: Shipped, deep: int = 4) -> Summary:
    """Return the facts in the provenance.json of a checkpoint about its training: `checkpoint`,
    `shipped`, `known`, and, if known, `facts` that change what is learned (steps, processes,
    corpus, size, settings by dotted name), `rows` (two digests of the training data), and
    `started`: the same for the decoder that it started from (None: from scratch), at most `deep`
    times.

    checkpoint: a folder of `dcar train`, one of its checkpoint-N, or "starter": the shipped asset
    called `starter`. Raises CheckpointError for a provenance.json that cannot be read.
    """
    folder = resolve(checkpoint, starter)
    path = next(
        (
            p
            for p in (folder / FILE, folder.parent / FILE)
            if p.is_file() and (p.parent == folder or folder.name.startswith("checkpoint-"))
        ),
        None,
    )
    about = {"checkpoint": checkpoint, "shipped": folder.resolve() == shipped(starter).resolve()}
    if path is None:
        return {**about, "known": False}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        data, settings = said["data"], dict(_flat(said["config"]))
        corpus, train = data["corpus"], data["counts"]["train"]
        place = f" ({corpus['path']})" if corpus["path"] else ""
        changed = [
            f"{name} {before} → {after} at step {resumed['step']}"
            for resumed in said.get("resumed", [])
            for name, (before, after) in resumed["changed"].items()
            if name not in NO_EFFECT
        ]
        facts = {
            "steps": said["steps"] if path.parent == folder else step_of(folder),
            "processes": said["processes"],
            "corpus": f"{corpus['kind']}{place}",
            "trained on": f"{train['utterances']} utterances of {train['seconds'] / 3600:.2f} h",
            **{
                name: "none" if value == "" else value
                for name, value in settings.items()
                if name not in NO_EFFECT and not _of_heads(name)
            },
            **({"changed when resumed:": ", ".join(changed)} if changed else {}),
        }
        # a fingerprint includes times of files, so a copied corpus has another one: equal tables
        # are enough, because the names of the other files that datasets writes are random
        tables = sorted(
            f"{name} {value}"
            for name, value in data["files"].items()
            if name.startswith("train/") and name.endswith((".arrow", ".parquet"))
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: cannot read the training data of {checkpoint} ({type(error).__name__}: "
            f"{error}); copy the file again from the folder that `dcar train` wrote, or remove "
            "it, and the comparison reports that the training is not known"
        ) from error
    origin = settings.get("init_from") if deep else None
    return {
        **about,
        "known": True,
        "started": training_summary(origin, starter, deep - 1) if origin else None,
        "facts": facts,
        "rows": [data["fingerprint"], "\n".join(tables)],
    }


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _of_heads(name: str) -> bool:
    """Return whether a setting concerns the additional heads, in which CAR and FAR differ by
    intent."""
    last = name.rsplit(".", 1)[-1]
    return "head" in last and last != "num_attention_heads"


def differences(far: Summary | None, car: Summary | None) -> list[str]:
    """Return the differences between the training of FAR and that of CAR, one phrase each,
    including those before the decoders that both started from. The shipped ones were trained
    alike, as their cards say."""
    if far is None or car is None:
        ours, theirs = (
            f"started from {s['checkpoint']}" if s else "from scratch" for s in (far, car)
        )
        return [] if far is car else [f"{ours} against {theirs}"]
    if not (far["known"] and car["known"]):
        alike = far["shipped"] and car["shipped"]
        return (
            []
            if alike
            else [f"the provenance of {far['checkpoint']} and {car['checkpoint']} is incomplete"]
        )
    a, b = far["facts"], car["facts"]
    found = [
        f"{name} {a.get(name, 'not set')} against {b.get(name, 'not set')}"
        for name in dict.fromkeys((*b, *a))
        if a.get(name, "not set") != b.get(name, "not set")
    ]
    same = [x == y for x, y in zip(far["rows"], car["rows"], strict=True) if x and y]
    if same and not any(same) and all(a[name] == b[name] for name in ("corpus", "trained on")):
        found.append("the corpus prepared differently (neither fingerprint nor rows are the same)")
    return found + [
        said if far["started"] is None or car["started"] is None else f"before that, {said}"
        for said in differences(far["started"], car["started"])
    ]


def training_note(training: dict[str, Any] | None) -> str | None:
    """Return the sentence for table and report; None if there is no FAR, or FAR and CAR were
    trained alike.

    training: `far` and `decoder` as returned by `training_summary`, and their `differences`.
    """
    if not training:
        return None
    unknown = [
        f"the {name} decoder ({side['checkpoint']})"
        for name, side in (("CAR", training["decoder"]), ("FAR", training["far"]))
        if not side["known"]
    ]
    if unknown and both_shipped(training):
        return (
            "FAR and CAR are the shipped decoders: trained alike by their cards (README.md), but "
            f"CAR learned from distilled sentences in two rounds and FAR in one; without a {FILE}."
        )
    if unknown:
        return (
            f"Whether FAR and CAR were trained on the same data is not known: no {FILE} next to "
            f"{' and '.join(unknown)}."
        )
    if training["differences"]:
        return (
            "Warning: FAR was not trained as CAR was (FAR against CAR): "
            f"{'; '.join(training['differences'])}. Their difference here may not be due to the "
            "method; train both with the same data and settings (recipes car_starter and "
            "car_starter:far)."
        )
    return None


def both_shipped(training: dict[str, Any]) -> bool:
    """Return whether FAR and CAR are the decoders that ship with the package."""
    return training["far"]["shipped"] and training["decoder"]["shipped"]


def compare_training(decoder: str, far_decoder: str) -> dict[str, Any]:
    """Return both summaries and their differences, for compare.json. Raises CheckpointError as
    `training_summary` does."""
    far, car = training_summary(far_decoder, "far"), training_summary(decoder, "decoder")
    known = far["known"] and car["known"]
    return {"far": far, "decoder": car, "differences": differences(far, car) if known else []}
