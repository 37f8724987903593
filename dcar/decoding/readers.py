"""Readers of decoders, with the operations for the device of their weights; each is kept until
the weights change."""

from dataclasses import asdict, fields
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from dcar import first_use
from dcar.decoding.backend import Backend
from dcar.decoding.compiled import CompiledBackend
from dcar.decoding.cpu.backend import cpu_backend
from dcar.decoding.gpu.backend import gpu_backend
from dcar.decoding.language import LanguageReader
from dcar.decoding.reader import CARReader, Reader
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import AnyDecoder
from heads.checkpoint import weights_signature
from heads.layers import TransformerLayer

LAYERS, TEXT_UNITS = 2, 64  # of the decoders on which parts for GPUs are compared with operators
# A reader holds the parts of its model, not the model itself, which would never be freed then.
_readers: WeakKeyDictionary[nn.Module, tuple[object, dict[bool, Reader]]] = WeakKeyDictionary()


def reader_of(model: AnyDecoder | Reader, compile: bool | None = None) -> Reader:
    """Return the reader of a decoder, or the given one. It is made once, and again after the
    weights were replaced, moved or trained (but not if one was written through `.data`). compile:
    compile its operations (None = on a GPU). Raises ConfigError for a decoder of other layers."""
    if isinstance(model, Reader):
        return model
    if compile is None:
        compile = model.heads.base.weight.device.type == "cuda"
    signature = weights_signature(model)
    if model not in _readers or _readers[model][0] != signature:
        _readers[model] = signature, {}
    reader = _readers[model][1]
    if compile not in reader:
        reader[compile] = _make_reader(model, compile)
    return reader[compile]


def _backend(model: AnyDecoder, compile: bool) -> Backend:
    """Return the operations for the device and dtype of a decoder's weights: on a GPU of the parts
    that compute there what operators compute."""
    weight = model.heads.base.weight
    if weight.device.type == "cpu":
        return CompiledBackend() if compile else cpu_backend(weight.dtype)
    if not compile:
        return Backend()
    parts = first_use.sound_parts("decoding", shapes_of(model), weight.device)
    if "kernels" in parts:
        backend: Backend = gpu_backend(weight.device)
    else:
        backend = CompiledBackend() if "compilation" in parts else Backend()
    backend.captured = "graphs" in parts
    return backend


def shapes_of(decoder: AnyDecoder) -> dict[str, Any]:
    """Return what the operations of a decoder depend on, with as few layers and texts as show
    it, for `dcar.first_use`."""
    language = isinstance(decoder, BackboneDecoder)
    names = [f.name for f in fields(BackboneConfig if language else CARConfig)]  # not a draft's own
    config = {name: value for name, value in asdict(decoder.config).items() if name in names}
    config |= {"tokenizer": "", "phonemes": ""}
    if language:
        architecture = dict(config["architecture"])
        layers = architecture["num_hidden_layers"]
        for name, value in architecture.items():
            if isinstance(value, list) and len(value) == layers:  # one entry a layer
                architecture[name] = value[:LAYERS]
        architecture |= {"num_hidden_layers": LAYERS, "vocab_size": TEXT_UNITS}
        config |= {"architecture": architecture, "lora": None, "text_prefix": (), "text_suffix": ()}
    else:
        config |= {"num_layers": LAYERS, "text_vocab_size": TEXT_UNITS}
    dtype = str(decoder.heads.base.weight.dtype).removeprefix("torch.")
    return {"language": language, "config": config, "dtype": dtype}


def _make_reader(model: AnyDecoder, compile: bool) -> Reader:
    backend = _backend(model, compile)
    if isinstance(model, BackboneDecoder):
        return LanguageReader(model, backend)
    if not isinstance(model, CARDecoder) or not all(
        isinstance(layer, TransformerLayer) for layer in model.layers
    ):
        raise ConfigError(f"there is no reader for the layers of a {type(model).__name__}")
    return CARReader(model, backend)
