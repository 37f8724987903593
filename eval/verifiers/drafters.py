"""Sources of drafts: the decoder's own additional heads, or a small draft model.

Both draw x_i from a distribution after `dcar.sampling.warp` with the sampling of the run, with EOS
forbidden as for the target, and return that distribution. Both stop after a drafted EOS.
"""

import torch
from torch import Tensor

from dcar.decoding import BatchState, Draft
from dcar.decoding.chunks import draw_chunk
from dcar.decoding.columns import real_positions
from dcar.decoding.reader import Reader
from dcar.decoding.readers import reader_of
from dcar.decoding.step import Prefilled
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from dcar.model.models import Borrowed
from heads.layers import at

DEFAULT_LENGTH = 3  # of a draft, the best in the papers of SSD and PCG


class Drafter:
    """Source of a drafted chain for every row. Its data for each row are in the state.

    length: most tokens of a draft; runs_passes: True if a draft takes passes of a draft model.
    """

    length: int
    runs_passes = False

    def start(self, state: BatchState) -> None:
        """Allocate the data that the drafter keeps for each row."""
        raise NotImplementedError

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        """See `Method.prefill`."""

    def propose(self, state: BatchState, counts: Tensor, most: int) -> Draft:
        """Draft up to counts [B] tokens after the emitted ones, with their distributions. most:
        upper bound of the counts."""
        raise NotImplementedError

    def keep(self, state: BatchState, hidden: Tensor) -> None:
        """Record the target's hidden states [B, D] of the last accepted tokens (of the token
        before the draft if none was accepted)."""


class HeadDrafter(Drafter):
    """Self-speculation: drafts by heads 2 … m + 1 at the hidden state from which the last emitted
    token was drawn.

    That token was drawn from the base head (or its residual), so head 1 + i predicts the i-th token
    after it. The heads see neither the token nor each other: p_i is the distribution of head 1 + i
    given the state. Drafting needs no pass.
    """

    def __init__(self, length: int):
        self.length = length

    def start(self, state: BatchState) -> None:
        if (heads := state.reader.config.num_prediction_heads) <= self.length:
            raise ConfigError(
                f"a draft of {self.length} tokens by the heads needs {self.length + 1} heads, but "
                f"this decoder has {heads}"
            )
        state.own["drawn_from"] = torch.zeros_like(state.states[:, 0])

    def propose(self, state: BatchState, counts: Tensor, most: int) -> Draft:
        logits = state.heads(state.own["drawn_from"], most + 1, first=2)
        tokens, probs = draw_chunk(state, logits)
        # tokens up to the first EOS
        ends = torch.where(tokens == state.eos, state.offsets[1 : most + 1], most).amin(1)
        return Draft(tokens, torch.minimum(counts, ends), probs)

    def keep(self, state: BatchState, hidden: Tensor) -> None:
        state.own["drawn_from"].copy_(hidden)


class ModelDrafter(Drafter):
    """Drafts by a draft model with its own KV cache, kept in step with the target's.

    A draft of m tokens needs m passes. The first reads the tokens emitted since the last draft (the
    correction or bonus token, and x_m of the last draft if all of it was accepted); the others read
    x_1 … x_{m-1}. Rejected tokens are removed from the cache.
    """

    runs_passes = True

    def __init__(self, draft: AnyDecoder | Reader, length: int):
        self.draft, self.length = draft, length

    def start(self, state: BatchState) -> None:
        state.shared["draft"] = reader = reader_of(self.draft, state.reader.backend.compiled)
        state.caches["draft"] = reader.new_cache(
            state.rows, state.cache.prefix, state.cache.capacity
        )
        state.caches["draft"].eager = state.eager
        reader.cover(state.caches["draft"])

    def prefill(self, state: BatchState, rows: Tensor, read: Prefilled) -> None:
        cache, _ = state.shared["draft"].prefill(*read.batch)
        state.caches["draft"].copy_rows(rows, cache, read.origins)
        state.draft_passes[rows] = 1  # the prefill

    def propose(self, state: BatchState, counts: Tensor, most: int) -> Draft:
        reader, cache = state.shared["draft"], state.caches["draft"]
        hidden = self._catch_up(state, counts > 0)
        # rows whose chain continues, and its length
        drafting, real = counts > 0, torch.zeros_like(counts)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for i in range(most):
            position = state.positions[:, i]  # of rows that have stopped: anything
            history = state.histories(torch.stack(tokens, 1) if tokens else None)
            last = None if history is None else history[:, -1]
            probs.append(state.probs(reader.heads(hidden, 1)[:, 0], position, last))
            tokens.append(state.sample(probs[-1], state.uniform("token", position)))
            real = real + drafting
            drafting = drafting & (tokens[-1] != state.eos) & (real < counts)
            if i + 1 == most or (state.eager and not bool(drafting.any())):
                break
            hidden = reader.read(
                cache, tokens[-1][:, None], state.longest_of(cache, self.length + 1 + i)
            )[:, 0]
            cache.lengths.add_(drafting)
        return Draft(torch.stack(tokens, 1), real, torch.stack(probs, 1), passes=real)

    def _catch_up(self, state: BatchState, rows: Tensor) -> Tensor:
        """Read the emitted tokens, one or two, that the draft model has not read in these rows.
        Return its hidden states [B, D]."""
        reader, cache = state.shared["draft"], state.caches["draft"]
        # The last emitted token was not drafted, so the draft model cannot have read it; after it
        # nothing is valid.
        cache.lengths.copy_(
            torch.minimum(cache.lengths, state.prompt_lengths + state.generated - 1)
        )
        read = cache.lengths - state.prompt_lengths
        missing = (state.generated - read) * rows
        width = state.most(missing, 2)
        index = (read[:, None] + state.offsets[:width]).clamp(0, state.tokens.shape[1] - 1)
        real = real_positions(missing, width) if state.eager and state.rows > 1 else None
        hidden = reader.read(
            cache, state.tokens.gather(1, index), state.longest_of(cache, self.length), real=real
        )
        cache.lengths.add_(missing)
        return at(hidden, (missing - 1).clamp(min=0))


def make_drafter(models: Borrowed, draft: str, length: int | None) -> Drafter:
    """Return the source of drafts: "heads", or the "draft" model. Without a length, it drafts as
    many tokens as there are heads to draft with, at most DEFAULT_LENGTH. Raises ConfigError if
    there is no draft model, or if the heads are too few."""
    if draft == "draft":
        return ModelDrafter(models.draft(), length or DEFAULT_LENGTH)
    most = models.heads - 1
    length = length or min(DEFAULT_LENGTH, most)
    if not 1 <= length <= most:
        raise ConfigError(
            f"this decoder has {most} additional heads to draft with; draft at most that many "
            "tokens, or use a draft model: @draft"
        )
    return HeadDrafter(length)
