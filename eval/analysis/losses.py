"""The loss of every head at every token of a recording, and the paths of chunks through it (DCAR paper, Figure 4).

Teacher-forced: decoder and policy are led along the tokens of the recording. What head k says of token j was said k
tokens before its end, so a pass that keeps a tokens runs down a diagonal: head 1 at the first of them, head a at the
last. The policy's path asks it at the end of each of its chunks; a policy after the draw is shown the recording's
tokens as the candidates. The oracle's path has the least loss that as many passes can have, and sees the future.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcar.model.draft import AnyDecoder
from dcar.prompts.items import PromptItem
from eval.analysis.oracle import cheapest_path, chunk_costs, loss_matrix, walk
from eval.analysis.teacher import along_recordings
from heads.policy import ChunkPolicy

SHOWN = 90  # tokens of the utterance that is drawn, about: a cell must be seen


@torch.no_grad()
def led_path(model: AnyDecoder, policy: ChunkPolicy, states: Tensor, prompt_length: int, targets: Tensor) -> list[int]:
    """Sizes of the chunks that a policy chooses along a recording: states [S, D], P, targets [n] of
    `along_recordings`. They cover all n tokens, so the last may be cut."""
    n = len(targets)
    positions = torch.arange(n, device=states.device) + prompt_length - 1
    candidates = None
    if policy.config.after_draw:
        logits = model.heads(states[prompt_length - 1 :], policy.config.reach)  # [n, K, V + 1]
        ahead = torch.arange(n, device=states.device)[:, None] + torch.arange(logits.shape[1], device=states.device)
        # past the end of speech, where nothing is right: what the heads hold likeliest
        tokens = torch.where(ahead < n, targets[ahead.clamp(max=n - 1)], logits.argmax(-1))
        candidates = policy.see(states[prompt_length - 1 :], logits, tokens)[None]
    chosen = (policy(states[None], positions[None], candidates)[0].argmax(-1) + 1).tolist()
    sizes, place = [], 0
    while place < n:
        sizes.append(min(chosen[place], n - place))
        place += sizes[-1]
    return sizes


def loss_maps(model: AnyDecoder, policies: Mapping[str, ChunkPolicy], items: Sequence[PromptItem],
              batch_size: int = 16) -> dict[str, Any] | None:
    """What the picture and the table of losses are made of; None without a policy or without additional heads.

    table: of all items, by path, tokens a pass and nats a token: fixed sizes, the policies, and for each the oracle in
    as many passes. shown: the item of about SHOWN tokens: id, text, losses [K][n] by token (None where no head of the
    utterance reaches), and the sizes of the paths by name.
    """
    heads = model.config.num_prediction_heads
    if not policies or heads < 2 or not items:
        return None
    shown = min(range(len(items)), key=lambda i: abs(len(items[i].reference_tokens) - SHOWN))
    sums: dict[str, list[tuple[float, int, int]]] = {}  # path -> nats, passes, tokens of every item
    picture: dict[str, Any] = {}
    for i, (states, prompt_length, targets) in enumerate(along_recordings(model, items, batch_size)):
        losses, _ = loss_matrix(model, states[prompt_length - 1 :], targets)
        costs = chunk_costs(losses)
        paths: dict[str, list[int]] = {}
        for name, policy in policies.items():
            paths[name] = led_path(model, policy, states, prompt_length, targets)
            paths[f"oracle for {name}"] = cheapest_path(costs, len(paths[name]))
        for k in range(1, heads + 1):
            sums.setdefault(f"car-{k}", []).append((*walk(costs, lambda t, k=k: k), len(targets)))  # type: ignore[misc]
        for name, sizes in paths.items():
            sums.setdefault(name, []).append((_cost(costs, sizes), len(sizes), len(targets)))
        if i == shown:
            picture = {"id": items[i].prompt.utterance_id, "text": items[i].text, "losses": by_token(losses),
                       "paths": paths}
    return {"utterances": len(items), "heads": heads, "shown": picture, "table": [
        {"path": name, "tokens_per_pass": sum(n - 1 for *_, n in of) / sum(m for _, m, _ in of),
         "nats_per_token": sum(c for c, *_ in of) / sum(n for *_, n in of)} for name, of in sums.items()]}


def by_token(losses: np.ndarray) -> list[list[float | None]]:
    """losses [K, n] by where a head stands (`loss_matrix`) -> [K][n] by the token that it predicts, 3 decimals; None
    where head k would have to stand before the utterance."""
    heads, n = losses.shape
    return [[round(float(losses[k, j - k]), 3) if j >= k else None for j in range(n)] for k in range(heads)]


def _cost(costs: np.ndarray, sizes: Sequence[int]) -> float:
    ends = np.cumsum(sizes)
    return float(sum(costs[a - 1, end - a] for a, end in zip(sizes, ends, strict=True)))
