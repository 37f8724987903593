"""Inputs that the decoder draws itself: from which head, from which state, where, and how many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dcar.model.own_tokens import LONGEST_CHUNK, with_own_tokens

ROWS, SIZE, STEP = 64, 60, 100
EOS = SIZE * STEP
PROMPT = 7


class TellingHeads:
    """Head k at a state that holds its position t says t * STEP + k for certain; so a draw tells where it came from."""

    def __init__(self, num_heads: int, eos_at: int = -1):
        self.num_heads, self.eos_at = num_heads, eos_at

    def __call__(self, hidden: Tensor, only: int) -> Tensor:
        said = hidden[:, 0].long() * STEP + only
        said[hidden[:, 0].long() == self.eos_at] = EOS
        return 1e4 * torch.nn.functional.one_hot(said, EOS + 1).float()


def inputs_of(heads: TellingHeads, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs, what they were, and the lengths of prompts and rows."""
    torch.manual_seed(0)
    hidden = torch.arange(SIZE).float().expand(ROWS, SIZE)[..., None]
    speech = torch.full((ROWS, SIZE), EOS + 1)  # an id that no head says
    lengths, prompts = torch.randint(40, SIZE + 1, (ROWS,)), torch.full((ROWS,), PROMPT)
    return with_own_tokens(heads, hidden, speech, lengths, prompts, EOS, share), speech, lengths, prompts  # type: ignore[arg-type]


@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_a_token_is_drawn_by_the_head_that_looks_as_far_from_the_state_before_its_chunk(num_heads):
    inputs, speech, lengths, _ = inputs_of(TellingHeads(num_heads), 0.6)
    row, column = (inputs != speech).nonzero(as_tuple=True)
    state, head = inputs[row, column] // STEP, inputs[row, column] % STEP
    assert torch.equal(state + head, column)
    assert set(head.tolist()) == set(range(1, min(num_heads, LONGEST_CHUNK) + 1))
    assert (state >= PROMPT - 1).all() and (column < lengths[row]).all()  # BOS is the first state that is asked


def test_the_tokens_of_a_chunk_come_from_one_state_and_all_of_them_are_replaced_or_none():
    inputs, speech, lengths, _ = inputs_of(TellingHeads(5), 0.5)
    for row in range(ROWS):
        own = (inputs[row] != speech[row]).nonzero()[:, 0].tolist()
        by_state: dict[int, list[int]] = {}
        for column in own:
            by_state.setdefault(int(inputs[row, column]) // STEP, []).append(int(inputs[row, column]) % STEP)
        for heads in by_state.values():
            assert heads == list(range(1, len(heads) + 1))
        whole = {len(heads) for state, heads in by_state.items() if state + 1 + max(map(len, by_state.values()))
                 <= lengths[row]}
        assert len(whole) <= 1  # of one size in a row, but for the end of the utterance


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_as_many_are_replaced_as_was_asked(share):
    inputs, speech, lengths, prompts = inputs_of(TellingHeads(1), share)  # chunks of one token: all may be replaced
    assert ((inputs != speech).sum() / (lengths - prompts).sum()).item() == pytest.approx(share, abs=0.03)


def test_the_end_of_speech_is_never_put_in():
    inputs, speech, _, _ = inputs_of(TellingHeads(1, eos_at=20), 0.9)
    replaced = inputs != speech
    assert not (inputs == EOS).any() and not replaced[:, 21].any() and replaced[:, 22].any()


def test_every_head_is_asked_even_for_nothing():
    """Where heads are sharded every process has to ask alike, whatever its rows say."""
    asked: list[int] = []

    class Listening(TellingHeads):
        def __call__(self, hidden: Tensor, only: int) -> Tensor:
            asked.append(only)
            return super().__call__(hidden, only)

    inputs, speech, _, _ = inputs_of(Listening(3), 0.0)
    assert asked == [1, 2, 3] and torch.equal(inputs, speech)
