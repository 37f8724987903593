"""World without audio in which the right chunk size depends on context.

Speech of N units: each unit is a start, zero to three mids, and an end; code = 3 * unit + {start 0,
mid 1, end 2}. After an end the next token is certain; elsewhere it is a choice. Heads sample
independently, so a chunk that spans a choice can emit impossible pairs. The decoder is a table of
the exact distributions of its K heads; the vocoder is the identity; the recogniser returns a unit
if start, mids and end are contiguous, and "junk" for each broken run.
"""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from dcar.decoding.backend import Backend
from dcar.decoding.reader import Layout, Reader
from dcar.decoding.storage import CacheStorage
from dcar.model.car import CARConfig
from dcar.prompts.items import PromptItem
from dcar.recognition.ctc import Alignment, viterbi
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from heads.layers import KVCache

UNITS = ("red", "blue", "green", "black", "white", "brown", "pink", "yellow")
CODES, END = 24, 24
START, MID, STOP = 0, 1, 2
State = tuple[int, int, int]  # unit, kind of the last token, mids so far
FIRST: State = (-1, STOP, 0)
FEATURES = 24


def step(state: State, units: int) -> dict[State | None, float]:
    """Return the next states and their probabilities; None is the end of speech."""
    unit, kind, mids = state
    if kind == STOP:
        return {(unit + 1, START, 0): 1.0} if unit + 1 < units else {None: 1.0}
    end = 1 / (4 - mids) if mids < 3 else 1.0
    after: dict[State | None, float] = {(unit, STOP, 0): end}
    if end < 1:
        after[(unit, MID, mids + 1)] = 1 - end
    return after


@lru_cache(None)
def ahead(state: State, k: int, units: int) -> dict[State | None, float]:
    """Return the distribution of the state k tokens later."""
    if k == 1:
        return step(state, units)
    out: dict[State | None, float] = {}
    for middle, p in ahead(state, k - 1, units).items():
        following = {None: 1.0} if middle is None else step(middle, units)
        for last, q in following.items():
            out[last] = out.get(last, 0.0) + p * q
    return out


def consume(state: State, code: int) -> State:
    """Return the state after reading a token, even one that is impossible there."""
    unit, kind = divmod(code, 3)
    if kind != MID:
        return unit, kind, 0
    return unit, MID, min(3, state[2] + 1) if state[0] == unit and state[1] != STOP else 1


class ToyHeads(nn.Module):
    def __init__(self, features: Tensor, probs: Tensor):
        super().__init__()
        self.register_buffer("features", features)  # [states, D], rows distinct
        self.register_buffer("probs", probs.log())  # [states, K, V + 1]

    def forward(self, hidden: Tensor, k: int, first: int = 1) -> Tensor:
        return self.probs[(hidden @ self.features.T).argmax(-1), first - 1 : k]

    logits = forward  # the heads of a reader are called, those of a decoder have `logits`


class ToyDecoder(nn.Module, Reader):
    """Decoder and its reader, from tables."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.config = CARConfig(
            text_vocab_size=16,
            speech_vocab_size=CODES,
            hidden_size=FEATURES,
            num_layers=1,
            num_attention_heads=1,
            ffn_size=1,
            num_prediction_heads=heads,
            bos=True,
        )
        self.norm = nn.LayerNorm(1)
        self.device = torch.device("cpu")
        self.dtype = self.hidden_dtype = torch.float32
        self.backend = Backend()
        kinds = ((START, 0), (MID, 1), (MID, 2), (MID, 3), (STOP, 0))
        states: list[tuple[int, State]] = []
        for n in range(4, 9):
            states.append((n, FIRST))
            states += [(n, (unit, kind, mids)) for unit in range(n) for kind, mids in kinds]
        self.number = {state: i for i, state in enumerate(states)}
        features = torch.zeros(len(states), FEATURES)
        probs = torch.zeros(len(states), heads, CODES + 1)
        following = torch.zeros(len(states), CODES, dtype=torch.long)
        for i, (n, state) in enumerate(states):
            unit, kind, mids = state
            features[i, [kind, 3 + mids, 7 + unit + 1, 16 + n - 4]] = 1.0
            for k in range(1, heads + 1):
                for after, p in ahead(state, k, n).items():
                    probs[i, k - 1, END if after is None else 3 * after[0] + after[1]] += p
            for code in range(3 * n):
                following[i, code] = self.number[n, consume(state, code)]
        self.register_buffer("features", features)
        self.register_buffer("following", following)
        self.heads = ToyHeads(features, probs)

    def new_cache(
        self, rows: int, text: int, capacity: int, storage: CacheStorage | None = None
    ) -> KVCache:
        """Return a cache that holds, for each position, the number of the state after it."""
        return KVCache(1, rows, 1, capacity, 1)

    def text_room(self, units: int) -> int:
        return 0

    def cover(self, cache: KVCache) -> None:
        """Do nothing: there is nothing to prepare."""

    def prefill(
        self, text_ids: Tensor, text_lengths: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor
    ) -> tuple[KVCache, Tensor]:
        cache = self.new_cache(len(text_lengths), 0, 1)
        states = torch.tensor([self.number[int(n), FIRST] for n in text_lengths])
        cache.kv[0][:, 0, 0, 0] = states.float()
        cache.lengths = prompt_lengths
        return cache, self.features[states][:, None]

    def read(
        self,
        cache: KVCache,
        tokens: Tensor,
        longest: int,
        layout: Layout | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        assert layout is None
        row, states, hidden = torch.arange(len(tokens)), cache.by_row()[0][:, :, 0, 0, 0], []
        state = states[row, cache.lengths - 1].long()
        for j, codes in enumerate(tokens.clamp(max=CODES - 1).unbind(1)):  # padding has any value
            state = self.following[state, codes]
            states[row, cache.lengths + j] = state.float()
            hidden.append(self.features[state])
        return torch.stack(hidden, 1)


class ToyVocoder:
    """Identity: a wave of token ids. `breaks(tokens)`: True for
    tokens at which it fails."""

    sample_rate, tokenizer = 50, ""

    def __init__(self, breaks=lambda tokens: False):
        self.breaks = breaks

    def synthesize(self, token_lists, speaker) -> list[np.ndarray]:
        if any(self.breaks(tokens) for tokens in token_lists):
            raise RuntimeError("the toy vocoder broke")
        return [np.asarray(tokens, np.float32) for tokens in token_lists]


class ToyRecognizer:
    name = "toy"

    def transcribe(self, waves, sample_rate) -> list[str]:
        return [" ".join(read(wave.astype(int).tolist())) for wave in waves]


class ToyCTC(ToyRecognizer):
    """CTC model with one frame per token, which recognises the unit of every code; words are its
    units."""

    name = "toy-ctc"

    def align(self, waves, sample_rate, texts) -> list[Alignment]:
        found = []
        for wave, text in zip(waves, texts, strict=True):
            logits = torch.zeros(len(wave), len(UNITS) + 1)
            logits[:, -1] = 1.0  # a blank is likelier than another unit
            logits[torch.arange(len(wave)), torch.from_numpy(wave).long() // 3] = 4.0
            target = [UNITS.index(word) for word in text.split()]
            costs, units = viterbi(logits.log_softmax(-1).numpy(), target, len(UNITS))
            [transcript] = self.transcribe([wave], sample_rate)
            likelihood = -float(costs.sum()) / len(target)
            found.append(Alignment(costs, units, likelihood, len(target), transcript))
        return found

    def log_likelihood(self, waves, sample_rate, texts) -> list[float]:
        """Return the log-likelihood of the likeliest path."""
        return [a.log_likelihood for a in self.align(waves, sample_rate, texts)]


def toy_token_recognizer() -> TokenRecognizer:
    """Return a recogniser that reads tokens as `ToyCTC` does: the unit of every code, whose text
    id is one more; a blank is likelier than another unit."""
    model = TokenRecognizer(TokenRecognizerConfig(CODES, len(UNITS) + 1, CODES, ())).eval()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(CODES + 1, CODES))  # 4.8 and −0.2 after the norm
        model.output.weight.copy_(
            torch.cat([torch.zeros(1, CODES), torch.eye(len(UNITS)).repeat_interleave(3, 1)])
        )
        model.output.bias.copy_(torch.tensor([1.0] + [0.0] * len(UNITS)))
    return model


def faster(completions, chunk_sizes, **columns) -> list[float]:
    """Reward of a user's own: more tokens per decision. It has no parameter `audio`, so nothing
    is synthesised for it."""
    return [
        0.3 * (1 - len(sizes) / max(1, len(tokens)))
        for tokens, sizes in zip(completions, chunk_sizes, strict=True)
    ]


def read(codes: list[int]) -> list[str]:
    """Return the units whose start, mids and end are contiguous, and "junk" for each maximal
    broken run."""
    words: list[str] = []
    current: int | None = None
    junk = False
    for unit, kind in (divmod(code, 3) for code in codes):
        if kind == START:
            junk |= current is not None
            current = unit
        elif kind == MID:
            if current != unit:
                junk, current = True, None
        elif current == unit:
            if junk:
                words.append("junk")
            words.append(UNITS[unit])
            junk, current = False, None
        else:
            junk, current = True, None
    if junk or current is not None:
        words.append("junk")
    return words


def toy_items(count: int, seed: int = 0, name: str = "toy") -> list[PromptItem]:
    rng = random.Random(seed)
    items = []
    for i in range(count):
        units = rng.randint(4, 8)
        tokens = [3 * u + k for u in range(units) for k in (START, MID, STOP)]
        items.append(
            PromptItem(
                f"{name}{i}",
                tuple(range(1, units + 1)),
                (),
                " ".join(UNITS[:units]),
                "toy",
                np.zeros(2, np.float32),
                tokens,
                f"{name}{i}",
                len(tokens) / 50,
            )
        )
    return items
