"""What must stay finite in training, and what is kept of a batch that broke it.

    from dcar.train.guard import load_batch, replay
    print(replay("runs/car/offending-step-12-rank-0.safetensors", CARDecoder.from_pretrained("runs/car/checkpoint-10")))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dcar.errors import DataError

REPLAY = ("load_batch of dcar/train/guard.py returns the micro-batches of the update: the arguments of the model in "
          "stage one (replay of the same file calls it), the rollouts in DCPO. The weights before are those of the "
          "last checkpoint; the same command makes the steps from there again.")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """[N] for N tensors: whether all values of each are finite, on their device. Empty ones are."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]  # FSDP: this process's part
    if not local:
        return torch.ones(0, dtype=torch.bool)
    # the largest magnitude, not the usual norm, whose squares overflow where all values are finite
    whole = [t if t.numel() else t.new_zeros(1) for t in (t.detach() for t in local)]
    return torch.stack([n.float() for n in torch._foreach_norm(whole, float("inf"))]).isfinite()


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors that hold NaN or infinity."""
    pairs = [(name, t) for name, t in named if t.is_floating_point()]
    good = all_finite(t for _, t in pairs).tolist()
    return [name for (name, _), fine in zip(pairs, good, strict=True) if not fine]


def some(names: Sequence[str]) -> str:
    """A few names for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def save_batch(path: Path, batches: Sequence[Mapping[str, Any]], **facts: Any) -> Path:
    """Keep the micro-batches of an update: their tensors, and whatever else they hold as JSON in the header."""
    tensors, others = {}, {}
    for i, batch in enumerate(batches):
        for name, value in batch.items():
            if isinstance(value, Tensor):
                tensors[f"{i}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                others[f"{i}.{name}"] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={
        "facts": json.dumps(facts, default=str), "others": json.dumps(others, default=str), "replay": REPLAY})
    return path


def load_batch(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The micro-batches that `save_batch` kept, and the facts about them. DataError for a damaged file."""
    batches: dict[int, dict[str, Any]] = {}
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata()
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}
        for key, value in {**values, **json.loads(header["others"])}.items():
            index, _, name = key.partition(".")
            batches.setdefault(int(index), {})[name] = value
        return [batches[i] for i in sorted(batches)], json.loads(header["facts"])
    except (OSError, SafetensorError, ValueError, RecursionError, TypeError, LookupError) as error:
        raise DataError(f"{path}: no batch that a training run kept, or damaged ({error}); start the run again, it "
                        "keeps the batch again where it stops") from error


def replay(path: str | Path, model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Compute the loss and the gradients of every kept micro-batch of stage one again: loss, and the names of what is
    not finite among weights and gradients."""
    losses = []
    model.zero_grad()
    for batch in load_batch(path)[0]:
        loss = model(**batch, **arguments).loss
        loss.backward()
        losses.append(float(loss.detach()))
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return {"losses": losses, "weights": not_finite(model.named_parameters()), "gradients": not_finite(gradients)}
