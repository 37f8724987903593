"""Saving and loading of model directories: config.json and model.safetensors, strict in both
directions.

Every model of this project is stored this way. Nothing is pickled. A missing, extra or misshapen
tensor is an error, never a silent re-initialisation. `checksum` identifies the weights, so that a
policy, a draft model or groups of similar tokens can refuse a decoder that they were not made for.
"""

import dataclasses
import hashlib
import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcar.errors import CheckpointError, DCARError, check_format

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT_VERSION = 1  # of model directories, whatever the model


def tensors_checksum(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and float32 bytes, independent of file
    layout and stored precision."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu")
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        # read in place: the table may be a gigabyte
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return for each of N tensors whether all its values are finite: [N] bool, on their device.
    Empty tensors are finite."""
    # with FSDP, the part of this process
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    if not local:
        return torch.ones(0, dtype=torch.bool)
    # the largest magnitude instead of the usual norm, whose squares may overflow for finite values
    detached = [t.detach() for t in local]
    filled = [t if t.numel() else t.new_zeros(1) for t in detached]
    return torch.stack([n.float() for n in torch._foreach_norm(filled, float("inf"))]).isfinite()


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that contain NaN or infinity."""
    pairs = [(name, t) for name, t in named if t.is_floating_point()]
    good = all_finite(t for _, t in pairs).tolist()
    return [name for (name, _), fine in zip(pairs, good, strict=True) if not fine]


def misfit(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """Describe how the given tensors differ from those of a model: missing, unexpected and
    misshapen ones; "" if they fit."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if not (missing or extra or shapes):
        return ""
    return f"missing {missing[:3]}, unexpected {extra[:3]}, shapes {shapes[:3]}"


def check_trained_for(bound: str, checksum: str, what: str, command: str) -> None:
    """Raise CheckpointError if a model was trained for the decoder with checksum `bound` ("" =
    any) rather than this one. what: the kind of model; command: the command that trains one."""
    if bound and bound != checksum:
        raise CheckpointError(
            f"this {what} was trained for the decoder {bound[:12]}…, not for {checksum[:12]}…: "
            f"load that decoder, or train a {what} for this one with `{command}`"
        )


def read_config(
    directory: str | Path, remedy: str = "give the directory that save_pretrained wrote"
) -> dict[str, Any]:
    """Return the content of config.json. Raises CheckpointError, ending in `remedy`, if it
    cannot be read or is no mapping."""
    path = Path(directory) / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise CheckpointError(
            f"{path}: cannot read the model's configuration ({error}); {remedy}"
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{path}: a model's configuration is a mapping, not {json.dumps(raw)[:40]}; {remedy}"
        )
    return raw


ADDED = frozenset({"languages"})
"""Settings that models written before them lack; they have their defaults there."""


def load_config(directory: str | Path, model_type: str, config_class: type) -> Any:
    """Load the configuration of a model of this type. Raises CheckpointError for another type or
    format version, for settings that are unknown or missing, and for impossible values."""
    path, raw = Path(directory) / CONFIG, read_config(directory)
    if (kind := raw.pop("model_type", None)) != model_type:
        raise CheckpointError(f"{path}: a '{kind}' checkpoint, but a '{model_type}' is needed here")
    check_format(
        path,
        raw.pop("format_version", None),
        FORMAT_VERSION,
        CheckpointError,
        "train the model again",
    )
    known = {f.name for f in dataclasses.fields(config_class)}
    for what, names in (("unknown", set(raw) - known), ("missing", known - set(raw) - ADDED)):
        if names:
            raise CheckpointError(f"{path}: {what} settings {sorted(names)}; copy the model again")
    try:
        config = config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})
    except (DCARError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: impossible settings ({error}); copy the model again"
        ) from error
    return config


class CheckpointConfig:
    """Methods that the trackers of transformers (`report_to`) expect of a model's configuration,
    a dataclass."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


class Checkpoint(nn.Module):
    """Mixin for modules that are built from one dataclass config and saved as a directory."""

    config_class: ClassVar[type]
    model_type: ClassVar[str]
    config: Any
    _kept_checksum: str | None = None

    def checksum(self) -> str:
        """Checksum of the weights, or of the weights at the time of `keep_checksum`."""
        return self._kept_checksum or tensors_checksum(self.state_dict())

    def keep_checksum(self) -> None:
        """Keep the checksum of the present weights, for a model that will be rounded and not
        trained any more."""
        self._kept_checksum = self.checksum()

    def save_pretrained(
        self, directory: str | Path, *, half: bool = False, card: str | None = None
    ) -> None:
        """Write config, weights and, if given, the model card README.md. float32 weights are stored
        in float16 if that is lossless, as for a part loaded from such a file; with `half`, all of
        them are.

        Raises CheckpointError, and writes nothing, if a weight is not finite."""
        path = Path(directory)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}
        tensors = {
            k: v.half()
            if (v.dtype.is_floating_point and half)
            or (v.dtype == torch.float32 and torch.equal(v.half().float(), v))
            else v
            for k, v in tensors.items()
        }
        if bad := not_finite(tensors.items()):
            raise CheckpointError(
                f"{path}: not saved, because weights are not finite: {', '.join(bad[:3])}; train "
                "again from the last good checkpoint"
            )
        self.save_config(path)
        part = path / (WEIGHTS + ".part")
        save_file(tensors, part, metadata={"format": "pt"})
        part.replace(path / WEIGHTS)
        if card is not None:
            (path / "README.md").write_text(card, encoding="utf-8")

    def save_config(self, directory: str | Path) -> None:
        """Write config.json alone, for callers that write the weights themselves."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": self.model_type,
            "format_version": FORMAT_VERSION,
            **dataclasses.asdict(self.config),
        }
        (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def load_config(cls, directory: str | Path) -> Any:
        """See the function `load_config`."""
        return load_config(directory, cls.model_type, cls.config_class)

    @classmethod
    def from_pretrained(cls, directory: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load a model in float32, in eval mode. Raises CheckpointError if anything is missing
        or does not fit."""
        path = Path(directory) / WEIGHTS
        config = cls.load_config(directory)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot read the weights ({error}); copy or train the model again"
            ) from error
        with torch.device("meta"):
            model = cls(config)
        expected = model.state_dict()
        if differences := misfit(expected, tensors):
            raise CheckpointError(
                f"{path}: the weights do not fit {CONFIG}: {differences}; the two files belong to "
                "different models"
            )
        if bad := not_finite(tensors.items()):
            raise CheckpointError(
                f"{path}: weights are not finite: {', '.join(bad[:3])}; the training that wrote "
                "them diverged: use an earlier checkpoint, or train again"
            )
        tensors = {n: t.to(expected[n].dtype) for n, t in tensors.items()}
        model.load_state_dict(tensors, strict=True, assign=True)
        model.restore_buffers()
        return model.to(device).eval()

    def restore_buffers(self) -> None:
        """Recompute non-persistent buffers after loading; models that have such buffers override
        this method."""


def weights_signature(module: nn.Module) -> Hashable:
    """Return the addresses and version counters of a module's weights. They change when a weight
    is replaced, moved or trained (but not when it is written through `.data`)."""
    return tuple((p.data_ptr(), p._version) for p in module.parameters())
