"""Reading of prompts, before utterances start in rows of a `BatchState`.

With fixed shapes, prompts are read in blocks, several at once and ahead of the rows that will
continue them. On a GPU a block is then one CUDA graph, and a row that becomes free costs a copy.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from dcar.decoding.columns import power_of_two, round_up
from dcar.decoding.graphs import StepGraphs
from dcar.decoding.reader import Reader
from dcar.decoding.records import Prompt, PromptBatch, batch_of
from heads.layers import KVCache

AHEAD = 8
"""Largest number of prompts that are read at once with fixed shapes: enough to fill a GPU."""
TEXT_BLOCK, PROMPT_BLOCK = 32, 64
"""Blocks of units of text and of speech positions of a prompt."""


class ReadPrompts(NamedTuple):
    """Prompts that were read: U of them, and padding."""

    batch: PromptBatch
    cache: KVCache
    hidden: Tensor  # [U, P, D]
    places: dict[int, int]  # by the identity of a prompt


def read_prompts(reader: Reader, prompts: Sequence[Prompt]) -> ReadPrompts:
    """Read prompts without any padding but that of a batch."""
    batch = batch_of(prompts, reader.config, reader.device)
    return ReadPrompts(batch, *reader.prefill(*batch), _places(prompts))


def _places(prompts: Sequence[Prompt]) -> dict[int, int]:
    return {id(prompt): place for place, prompt in enumerate(prompts)}


class PromptBlocks:
    """Reader of prompts in blocks, into buffers that are the same for all engines of a decoder.
    `users`: engines that are asked to `release` what they have captured when the buffers move."""

    def __init__(self, reader: Reader, graphs: bool | None):
        self.reader, self.graphs = reader, StepGraphs(graphs, reader.device)
        self.users: WeakSet[Any] = WeakSet()
        self._room: tuple[int, ...] = (0, 0, 0)  # prompts, units of text, speech positions

    def reserve(self, prompts: int, text: int, speech: int) -> None:
        """Make room for blocks of so many prompts of so many units of text and speech positions."""
        need = (
            power_of_two(min(prompts, AHEAD)),
            round_up(text, TEXT_BLOCK),
            round_up(speech, PROMPT_BLOCK),
        )
        rows, text, speech = room = tuple(map(max, need, self._room))
        if room == self._room:
            return
        for user in self.users:
            user.release()
        self.graphs.reset()
        reader = self.reader
        self._cache = reader.new_cache(rows, reader.text_room(text), speech)
        self._hidden = torch.zeros(
            rows, speech, reader.config.hidden_size, dtype=reader.hidden_dtype, device=reader.device
        )
        self._ids = torch.zeros(rows * (2 + text + speech), dtype=torch.long, device=reader.device)
        self._room = room

    def read(self, prompts: Sequence[Prompt], most: int) -> ReadPrompts:
        """Read prompts in a block of at most `most` speech positions. The result is valid until
        the next call."""
        bos = int(self.reader.config.bos)
        rows = power_of_two(len(prompts))
        text = round_up(max(len(p.text_ids) for p in prompts), TEXT_BLOCK)
        longest = max(len(p.prompt_ids) for p in prompts) + bos
        speech = min(round_up(longest, PROMPT_BLOCK), most)
        packed = torch.zeros(rows, 2 + text + speech, dtype=torch.long)
        padded = batch_of(
            [*prompts, *[prompts[-1]] * (rows - len(prompts))], self.reader.config, "cpu"
        )
        packed[:, 0], packed[:, 1] = padded.text_lengths, padded.prompt_lengths
        packed[:, 2 : 2 + padded.text_ids.shape[1]] = padded.text_ids
        packed[:, 2 + text : 2 + text + longest] = padded.prompt_ids
        ids = self._ids[: packed.numel()].view(packed.shape)
        ids.copy_(packed, non_blocking=True)
        batch = PromptBatch(ids[:, 2 : 2 + text], ids[:, 0], ids[:, 2 + text :], ids[:, 1])
        hidden = self._hidden[:rows, :speech]
        fill = partial(self._fill, batch, hidden)
        if self.graphs.enabled:
            self.graphs.run((rows, text, speech), fill)
        else:
            fill()
        return ReadPrompts(batch, self._cache, hidden, _places(prompts))

    def _fill(self, batch: PromptBatch, hidden: Tensor) -> None:
        cache, states = self.reader.prefill(*batch)
        rows = torch.arange(len(hidden), device=hidden.device)
        self._cache.copy_rows(rows, cache, rows)
        hidden.copy_(states)
