"""Readers of decoders, with the operations for the device of their weights; each is kept until
the weights change."""

from weakref import WeakKeyDictionary

from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.compiled import CompiledBackend
from dcar.decoding.cpu.backend import cpu_backend
from dcar.decoding.gpu.backend import gpu_backend
from dcar.decoding.language import LanguageReader
from dcar.decoding.reader import CARReader, Reader
from dcar.errors import ConfigError
from dcar.model.backbones.decoder import BackboneDecoder
from dcar.model.car import CARDecoder
from dcar.model.draft import AnyDecoder
from heads.checkpoint import weights_signature
from heads.layers import TransformerLayer

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


def _backend(weight: Tensor, compile: bool) -> Backend:
    """Return the operations for the device and dtype of a decoder's weights."""
    if compile:
        return gpu_backend(weight.device) if weight.device.type == "cuda" else CompiledBackend()
    return cpu_backend(weight.dtype) if weight.device.type == "cpu" else Backend()


def _make_reader(model: AnyDecoder, compile: bool) -> Reader:
    backend = _backend(model.heads.base.weight, compile)
    if isinstance(model, BackboneDecoder):
        return LanguageReader(model, backend)
    if not isinstance(model, CARDecoder) or not all(
        isinstance(layer, TransformerLayer) for layer in model.layers
    ):
        raise ConfigError(f"there is no reader for the layers of a {type(model).__name__}")
    return CARReader(model, backend)
