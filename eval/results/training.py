"""Sentence on the training of a comparison's two decoders, from the provenance.json next to each.

FAR represents next-token decoding, CAR chunks. If they were trained on different data, or on more
of it, the difference of their errors is not one of the methods.
"""

import json
from collections.abc import Iterator
from typing import Any

from dcar.errors import CheckpointError
from dcar.model.load import Shipped
from dcar.sources.shipped import resolve, shipped
from dcar.storage import step_of

FILE = "provenance.json"
NO_EFFECT = set(
    (
        "data out seed eval_steps save_steps logging_steps dataloader_num_workers "
        "resume_from_checkpoint ddp_timeout gradient_checkpointing max_steps"
    ).split()
)
"""Settings of a run that do not change what is learned, except by chance; and max_steps, which is
replaced by the steps taken."""
SHIPPED = (
    "FAR and CAR are the shipped decoders: trained alike by their cards (README.md), but CAR "
    f"learned from distilled sentences in three rounds and FAR in two; without a {FILE}."
)


def training_note(decoder: str, far_decoder: str) -> str:
    """Return a sentence on how the training of FAR differed from that of CAR; empty if they were
    trained alike. Raises CheckpointError for a provenance.json that cannot be read."""
    checkpoints: dict[Shipped, str] = {"decoder": decoder, "far": far_decoder}
    for variant, note in {"": SHIPPED, "-undistilled": ""}.items():
        if all(
            resolve(c, kind).resolve() == shipped(f"{kind}{variant}").resolve()
            for kind, c in checkpoints.items()
        ):
            return note
    facts = {kind: training_facts(c, kind) for kind, c in checkpoints.items()}
    car, far = facts["decoder"], facts["far"]
    if not car or not far:
        names = {"decoder": "CAR", "far": "FAR"}
        unknown = [f"the {names[k]} decoder ({checkpoints[k]})" for k in facts if not facts[k]]
        return (
            f"Whether FAR and CAR were trained on the same data is not known: no {FILE} next to "
            f"{' and '.join(unknown)}."
        )
    differences = [
        f"{name} {far.get(name, 'not set')} against {car.get(name, 'not set')}"
        for name in dict.fromkeys((*car, *far))
        if far.get(name) != car.get(name)
    ]
    if not differences:
        return ""
    return (
        f"Warning: FAR was not trained as CAR was (FAR against CAR): {'; '.join(differences)}. "
        "Their difference here may not be due to the method; train both with the same data and "
        "settings (recipes car_starter and car_starter:far)."
    )


def training_facts(checkpoint: str, kind: Shipped) -> dict[str, Any]:
    """Return what a decoder was trained on, and the settings that matter, by name; nothing without
    a provenance.json. checkpoint: a folder of `dcar train`, one of its checkpoint-N, or
    "starter"."""
    folder = resolve(checkpoint, kind)
    within = folder.name.startswith("checkpoint-") and not (folder / FILE).is_file()
    path = (folder.parent if within else folder) / FILE
    if not path.is_file():
        return {}
    try:
        provenance = json.loads(path.read_text(encoding="utf-8"))
        corpus, train = provenance["data"]["corpus"], provenance["data"]["counts"]["train"]
        place = f" ({corpus['path']})" if corpus["path"] else ""
        settings = dict(_flat(provenance["config"]))
        start = settings.pop("init_from", "")
        unspoken = not settings.get("spoken.sentences")  # then the last step was written
        facts = {
            "steps": step_of(folder) if within else provenance["steps"],
            "processes": provenance["processes"],
            "corpus": f"{corpus['kind']}{place}",
            "trained on": f"{train['utterances']} utterances of {train['seconds'] / 3600:.2f} h",
            "started from": "a checkpoint" if start else "random weights",
        }
        return facts | {
            n: v
            for n, v in settings.items()
            if n not in NO_EFFECT
            and not _of_heads(n)
            and not (unspoken and n.startswith("spoken."))
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: cannot read the training data of {checkpoint} ({type(error).__name__}: "
            f"{error}); copy the file again from the folder that `dcar train` wrote, or remove it"
        ) from error


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        nested = isinstance(value, dict)
        yield from _flat(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]


def _of_heads(name: str) -> bool:
    """Return True for settings of the additional heads, in which CAR and FAR differ by intent."""
    last = name.rsplit(".", 1)[-1]
    return name == "spoken.chunk" or ("head" in last and last != "num_attention_heads")
