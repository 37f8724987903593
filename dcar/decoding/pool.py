"""`decode`, and the engines that it keeps for the next call.

On a GPU an engine captures a graph for each shape that it meets. So it is kept with its buffers, by
decoder, method, sampling and number of rows, for callers that decode again and again: evaluations
during training, comparisons, profiles. Engines of one decoder never run at the same time, so they
share the memory of keys and values.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from dcar.config.schema import check_seed
from dcar.decoding.engine import Engine
from dcar.decoding.prompts import PromptBlocks
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.decoding.records import DecodeResult, Prompt
from dcar.decoding.step import Method
from dcar.decoding.storage import CacheStorage
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from dcar.sampling import SamplingConfig

KEPT = 32
"""Number of engines that are kept for a decoder: those that were used last."""


class EnginePool:
    """Engines of one decoder. `lock` is held while one of them runs."""

    def __init__(self, reader: Reader):
        self.reader, self.lock = reader, threading.Lock()
        self.engines: OrderedDict[Hashable, Engine] = OrderedDict()
        self._storage = CacheStorage()
        fixed = reader.device.type != "cpu"
        self._blocks = PromptBlocks(reader, None) if fixed else None

    def engine(self, method: Method, sampling: SamplingConfig, rows: int) -> Engine:
        """Return the engine for this method, sampling and number of rows."""
        key = method.key(), sampling, rows
        engine = self.engines.pop(key, None)
        if engine is None:
            shared: dict[str, Any] = {"storage": self._storage, "blocks": self._blocks}
            engine = Engine(self.reader, method, sampling, rows, **shared)
        engine.method = method  # another name, or object, of the same settings
        self.engines[key] = engine
        if len(self.engines) > KEPT:
            self.engines.popitem(last=False)
        return engine


_pools: WeakKeyDictionary[nn.Module, EnginePool] = WeakKeyDictionary()


def engine_pool(model: AnyDecoder) -> EnginePool:
    """Return the engines that are kept for the present weights of a decoder."""
    reader = reader_of(model)
    if model not in _pools or _pools[model].reader is not reader:
        _pools[model] = EnginePool(reader)
    return _pools[model]


def decode(
    model: AnyDecoder | Reader,
    prompts: Sequence[Prompt],
    method: Method,
    sampling: SamplingConfig,
    *,
    seed: int = 0,
    group_size: int = 1,
    common_random_numbers: bool = False,
    record_hidden: bool = False,
    batch_size: int = 32,
) -> list[DecodeResult]:
    """Decode every prompt `group_size` times. Return results in the order of the prompts, members
    of a group adjacent.

    Args:
        model: decoder in eval mode; its device and dtype are used.
        method: proposes and keeps tokens (a `ChunkRule`, or a verifier of `eval`).
        seed: with it, every draw is addressed by utterance id, member of the group, and position.
        common_random_numbers: give the members of a group common random numbers for tokens; sizes
            keep their own.
        record_hidden: return the hidden states of all consumed positions, on the model's device,
            and the features that decisions after the draw read: ordinary tensors, on which a
            policy can be trained.
        batch_size: utterances decoded at once (times group_size rows); no effect on the tokens.

    Raises ConfigError for a batch or group of nobody or a seed below 0, TextError or DataError if a
    prompt cannot be decoded by this model; nothing has been decoded then. Raises DistributionError
    if the model returns no distribution for some token; its `finished` are the utterances that were
    complete.
    """
    for name, number in (("batch_size", batch_size), ("group_size", group_size)):
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    check_seed(seed)
    if not prompts:
        return []
    rows = min(batch_size, len(prompts)) * group_size
    how: dict[str, Any] = {
        "seed": seed,
        "group_size": group_size,
        "common_random_numbers": common_random_numbers,
    }
    # On a CPU buffers of a batch save no time. Hidden states of many positions are large.
    if not isinstance(model, Reader) and not record_hidden:
        engines = engine_pool(model)
        if (rows == 1 or engines.reader.device.type != "cpu") and engines.lock.acquire(
            blocking=False
        ):
            try:
                return engines.engine(method, sampling, rows).decode(prompts, **how)
            finally:
                engines.lock.release()
    return Engine(model, method, sampling, rows, record_hidden=record_hidden).decode(prompts, **how)
