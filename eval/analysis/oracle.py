"""The cheapest chunking of the true tokens: how much a perfect schedule could gain (DCAR paper, analyses; upper bound).

    dcar analyse what=oracle decoder=runs/car data=runs/prepared out=runs/oracle

With ce_i(t) the cross entropy of head i at position t for the token i ahead, the cheapest way to cover j tokens in m
passes is

    cost(m, j) = min_k [ cost(m - 1, j - k) + sum_{i=1..k} ce_i(j - k) ],    k <= K,

by dynamic programming over the whole utterance. Compared at equal passes with CAR-k, with sizes drawn at random and
with the entropy rule. It is no decoding method and cannot be one: it looks at the true tokens, those to come included.
And it is teacher-forced: what is best along the recording need not be best along the decoder's own speech.

Writes oracle.json and oracle.png: the comparison, and how often each head is the best or the worst for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dcar.config import load_config, save_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.prompts.load import load_prompts
from dcar.tracking import provenance, write_json
from eval.analysis.teacher import teacher_forced
from eval.verifiers.entropy import entropies

RANDOM_DRAWS = 10  # schedules drawn per utterance
ENTROPY_THRESHOLDS = 8  # points of the entropy rule


@dataclass
class OracleConfig:
    """Settings of the oracle analysis."""

    decoder: str = setting(meaning="Directory of a decoder of either kind; starter = the shipped one.")
    data: str = setting(meaning="Folder written by `dcar prepare`.", place="folder")
    out: str = setting("runs/oracle", "Folder to write.", place="folder")
    split: str = setting("dev", "Split that is read.")
    utterances: int = setting(0, "Of the split; 0 = all.", minimum=0)
    prompt_tokens: int = setting(50, "As in training.", minimum=1)
    random_sizes: list[int] = setting([2, 3, 4], "Chunk sizes of the random schedules.", minimum=1)
    batch_size: int = setting(16, "Utterances read at once.", minimum=1)
    seed: int = seed_setting(0, "Of random schedules.")
    device: str = setting("cpu", "cpu or cuda.")


# ------------------------------------------------------------------------------------------------ dynamic programming


@torch.no_grad()
def loss_matrix(model: AnyDecoder, hidden: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """hidden [n, D], targets [n] (teacher.py) -> cross entropies [K, n] in nats and entropies of heads 2..K [n, K - 1].

    Row k - 1, column t: head k at hidden[t] for targets[t + k - 1]; infinite past the end of speech.
    """
    logits = model.heads(hidden)  # [n, K, V + 1]
    log_probs = logits.double().log_softmax(-1)
    n, heads = logits.shape[:2]
    index = torch.arange(n, device=targets.device)[:, None] + torch.arange(heads, device=targets.device)
    wanted = targets[index.clamp(max=n - 1)]  # [n, K]
    loss = (-log_probs.gather(-1, wanted[:, :, None])[:, :, 0]).masked_fill(index >= n, torch.inf)
    return loss.T.cpu().numpy(), entropies(logits[:, 1:]).cpu().numpy()


def chunk_costs(losses: np.ndarray) -> np.ndarray:
    """losses [K, n] -> cost [K, n] of a chunk of k tokens begun at t: the sum of heads 1..k there."""
    return losses.cumsum(0)


def cheapest(costs: np.ndarray) -> np.ndarray:
    """The recurrence above. costs [K, n] -> totals [n + 1]: least cost of all n tokens in m passes, infinite where m
    passes cannot do it."""
    heads, n = costs.shape
    totals, reached = np.full(n + 1, np.inf), np.concatenate(([0.0], np.full(n, np.inf)))  # of the first 0 … n tokens
    for m in range(1, n + 1):
        options = np.full((heads, n + 1), np.inf)  # with one pass more, by the size of its chunk
        for k in range(1, min(heads, n) + 1):
            options[k - 1, k:] = reached[: n + 1 - k] + costs[k - 1, : n + 1 - k]
        reached = options.min(0)
        totals[m] = reached[n]
    return totals


def walk(costs: np.ndarray, size_at: Callable[[int], int]) -> tuple[float, int]:
    """Cost and number of passes of a schedule that asks size_at(t) tokens at t; the end of speech cuts the last."""
    n, place, total, passes = costs.shape[1], 0, 0.0, 0
    while place < n:
        size = min(size_at(place), n - place)
        total += float(costs[size - 1, place])
        place, passes = place + size, passes + 1
    return total, passes


def head_ranks(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens each head predicts best and worst, counts [K] each, among tokens that all K heads predict."""
    heads, n = losses.shape
    # column j: every head for the same token, head k from k tokens before
    same = np.stack([losses[k, heads - 1 - k : n - k] for k in range(heads)]) if n >= heads else np.empty((heads, 0))
    return (np.bincount(same.argmin(0), minlength=heads), np.bincount(same.argmax(0), minlength=heads))


# --------------------------------------------------------------------------------------------------------- the analysis


def analyse(model: AnyDecoder, states: Sequence[tuple[Tensor, Tensor]], config: OracleConfig) -> dict[str, Any]:
    """All figures of oracle.json from hidden states and targets (teacher.py)."""
    heads = model.config.num_prediction_heads
    if not config.random_sizes or not all(1 <= size <= heads for size in config.random_sizes):
        raise ConfigError(f"random_sizes {config.random_sizes}: this decoder keeps 1..{heads} tokens a pass")
    best, worst, sums, counts = (np.zeros(heads) for _ in range(4))
    costs, entropy, totals = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()  # of every utterance
    for hidden, targets in tqdm(states, desc="oracle", disable=None):
        losses, uncertain = loss_matrix(model, hidden, targets)
        b, w = head_ranks(losses)
        best, worst = best + b, worst + w
        finite = np.isfinite(losses)
        sums, counts = sums + np.where(finite, losses, 0).sum(1), counts + finite.sum(1)
        costs.append(chunk_costs(losses))
        entropy.append(uncertain)
        totals.append(cheapest(costs[-1]))
    lengths = np.array([len(t) - 1 for t in totals])  # the end of speech is one of the tokens to predict

    def point(passes: Sequence[float], cost: float) -> dict[str, Any]:
        return {"tokens_per_pass": float((lengths - 1).sum() / sum(passes)),
                "nats_per_token": float(cost / lengths.sum())}

    def row(name: str, walks: Sequence[Sequence[tuple[float, int]]]) -> dict[str, Any]:
        """A schedule and the oracle in as many passes for every utterance; several walks of one count alike."""
        cost = float(sum(np.mean([c for c, _ in w]) for w in walks))
        found = point([float(np.mean([m for _, m in w])) for w in walks], cost)
        least = sum(np.mean([t[m] for _, m in w]) for t, w in zip(totals, walks, strict=True)) / lengths.sum()
        return {"schedule": name, **found, "oracle_nats_per_token": float(least),
                "gain": float(found["nats_per_token"] - least)}

    def oracle(passes: Sequence[int]) -> dict[str, Any]:
        return point(passes, sum(float(t[m]) for t, m in zip(totals, passes, strict=True)))

    rows = [row(f"car-{k}", [[walk(c, lambda t, k=k: k)] for c in costs]) for k in range(1, heads + 1)]  # type: ignore[misc]
    rng = np.random.default_rng(config.seed)
    rows.append(row("random-" + "-".join(map(str, config.random_sizes)), [
        [walk(c, lambda t: int(rng.choice(config.random_sizes))) for _ in range(RANDOM_DRAWS)] for c in costs]))
    if heads > 1:
        # head k is kept where all of 2..k are below the threshold, so where their maximum is
        levels = np.concatenate([np.maximum.accumulate(e, 1).ravel() for e in entropy])
        for threshold in np.quantile(levels, np.linspace(0.05, 0.95, ENTROPY_THRESHOLDS)):
            sizes = [1 + np.cumprod(e <= threshold, 1).sum(1) for e in entropy]
            rows.append(row(f"entropy-{threshold:.3f}", [
                [walk(c, lambda t, n=n: int(n[t]))] for c, n in zip(costs, sizes, strict=True)]))  # type: ignore[misc]
    return {
        "heads": heads, "utterances": len(costs), "tokens_all_heads_predict": int(best.sum()),
        "best_share": (best / max(1, best.sum())).tolist(), "worst_share": (worst / max(1, worst.sum())).tolist(),
        "head_nats": (sums / counts.clip(1)).tolist(), "rows": rows,
        "frontier": [oracle([math.ceil(n / size) for n in lengths]) for size in np.arange(1, heads + 0.01, 0.25)],
        "unconstrained": oracle([int(t.argmin()) for t in totals]), "decoder": model.checksum(),
        "teacher_forced": True,
    }


# --------------------------------------------------------------------------------------------------------------- output


def plot(result: dict[str, Any], path: Path) -> None:
    """Cross entropy against tokens per pass, and how often each head is best or worst."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), dpi=120)

    lines = [([r for r in result["rows"] if r["schedule"].startswith(prefix)], label, style)
             for prefix, label, style in (("car-", "CAR-k", "o-"), ("entropy-", "entropy rule", "s-"),
                                          ("random-", "random", "x"))]
    lines += [(result["frontier"], "oracle (sees the future)", "k--"),
              ([result["unconstrained"]], "oracle, any number of passes", "k*")]
    for points, label, style in lines:
        if points:
            left.plot([p["tokens_per_pass"] for p in points], [p["nats_per_token"] for p in points], style, label=label)
    left.set_xlabel("tokens per pass of the decoder")
    left.set_ylabel("cross entropy of the true tokens, nats a token")
    left.set_title(f"Teacher-forced chunking, {result['utterances']} utterances")
    left.legend()
    head = np.arange(1, result["heads"] + 1)
    right.bar(head - 0.2, [100 * s for s in result["best_share"]], 0.4, label="best head for the token")
    right.bar(head + 0.2, [100 * s for s in result["worst_share"]], 0.4, label="worst head for the token")
    right.set_xlabel("head (1 = base)")
    right.set_ylabel("% of tokens")
    right.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def table(result: dict[str, Any]) -> str:
    lines = ["schedule        tokens/pass  nats/token   oracle at equal passes    gain"]
    lines += [f"{r['schedule']:15} {r['tokens_per_pass']:11.2f} {r['nats_per_token']:11.3f} "
              f"{r['oracle_nats_per_token']:25.3f} {r['gain']:7.3f}" for r in result["rows"]]
    free = result["unconstrained"]
    lines.append(f"{'any passes':15} {free['tokens_per_pass']:11.2f} {'':11} {free['nats_per_token']:25.3f}")
    lines.append("head best for a token, %:  " + "  ".join(f"{100 * s:5.2f}" for s in result["best_share"]))
    lines.append("head worst for a token, %: " + "  ".join(f"{100 * s:5.2f}" for s in result["worst_share"]))
    return "\n".join(lines)


def run(config: OracleConfig) -> dict[str, Any]:
    """Analyse and write oracle.json, oracle.png and config.yaml into `config.out`."""
    model = load_decoder(config.decoder, config.device)
    items = load_prompts(config.data, config.split, model, config.prompt_tokens, config.seed, config.utterances)
    result = analyse(model, list(teacher_forced(model, items, config.batch_size)), config)
    result["provenance"] = provenance(decoder=config.decoder, data=config.data, split=config.split)
    out = Path(config.out)
    write_json(out / "oracle.json", result)
    plot(result, out / "oracle.png")
    save_config(config, out / "config.yaml")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    print(table(run(load_config(OracleConfig, arguments))))
