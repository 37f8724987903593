"""Start of a run: the guidance range, and a policy for the decoder, new or loaded."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from dcar.decoding.policy_chunk import check_num_candidates
from dcar.errors import CheckpointError, ConfigError, DCARError
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder
from dcar.sources.shipped import resolve
from heads.chunk_scorer import ChunkScorer
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)
from rl.config import DCPOConfig
from rl.rewards import Reward, check_locate


def guidance_range(config: DCPOConfig, base_checksum: str) -> list[int]:
    """Return the guidance range in the settings, or else in the guidance profile that they name.
    Raises ConfigError if the file is no profile, CheckpointError if it belongs to another
    decoder."""
    if config.chunk_range or not config.guidance:
        return config.chunk_range
    try:
        profile = json.loads(Path(config.guidance).read_text(encoding="utf-8"))
        sizes, made_for = [int(size) for size in profile["range"]], profile["base_checksum"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"guidance {config.guidance}: cannot be read as a guidance profile ({error!r}); run "
            "`dcar profile` first"
        ) from error
    if made_for != base_checksum:
        raise CheckpointError(
            f"guidance {config.guidance} belongs to another decoder; run `dcar profile` with yours"
        )
    return sorted(sizes)


def make_policy(config: DCPOConfig, base: AnyDecoder, checksum: str) -> ChunkPolicy:
    """Return the policy that `config.policy` names, or a new one for this decoder.

    A new policy that reads hidden states is uniform except for `range_prior`. A new one that reads
    candidates starts as the rule-based policy: end on likely tokens and, with a `chunk_scorer`, on
    those that fit together. Raises ConfigError for settings that exclude each other,
    CheckpointError for a policy or chunk scorer of another decoder.
    """
    if config.range_prior and (config.policy or not config.chunk_range):
        raise ConfigError(
            "range_prior makes a new policy favour the guidance range: set guidance=… or "
            "chunk_range=…, and leave policy empty; or leave range_prior out (set 0 if a recipe "
            "sets it)"
        )
    if config.range_prior and config.policy_reads != "hidden":
        raise ConfigError(
            f"range_prior needs policy_reads=hidden, not {config.policy_reads}: leave range_prior "
            "out; policy_sizes restricts the sizes of a policy after the draw"
        )
    if config.chunk_scorer and (config.policy or config.policy_reads == "hidden"):
        raise ConfigError(
            "chunk_scorer is for a new policy with policy_reads=candidates: leave it out if "
            "`policy` is given or policy_reads=hidden"
        )
    if config.policy:
        return bound(load_policy(config.policy), config, checksum)
    chunk_scorer = None
    if config.chunk_scorer:
        chunk_scorer = ChunkScorer.from_pretrained(resolve(config.chunk_scorer, "chunk_scorer"))
        chunk_scorer.check_base(checksum)
    common: dict[str, Any] = {
        "hidden_size": base.config.hidden_size,
        "num_actions": base.config.num_prediction_heads,
        "sizes": tuple(config.policy_sizes),
        "chunk_range": tuple(config.chunk_range),
        "base_checksum": checksum,
        "tokenizer": base.config.tokenizer,
    }
    torch.manual_seed(config.seed)
    try:
        if config.policy_reads == "hidden":
            policy = HiddenPolicy(
                HiddenPolicyConfig(
                    **common, width=config.policy_width, num_attention_heads=config.policy_heads
                )
            )
            policy.output.bias.data[[k - 1 for k in config.chunk_range]] = config.range_prior
            return policy
        shape = None if chunk_scorer is None else chunk_scorer.config
        scored = CandidatePolicy(CandidatePolicyConfig(**common, chunk_scorer=shape))
    except DCARError as error:
        raise ConfigError(
            f"policy_width, policy_heads, policy_sizes and chunk_range do not fit: {error}"
        ) from error
    scored.scores.end_on_likely()
    if chunk_scorer is not None and scored.chunk_scorer is not None:
        scored.chunk_scorer.load_state_dict(chunk_scorer.state_dict())
        scored.scores.end_on_scored()
    return scored


def bound(policy: ChunkPolicy, config: DCPOConfig, checksum: str) -> ChunkPolicy:
    """Return a copy of a loaded policy for training on this decoder. Raises CheckpointError if it
    was trained for another one."""
    policy.check_base(checksum)
    policy = deepcopy(policy)
    policy.config.base_checksum = checksum
    policy.config.chunk_range = tuple(config.chunk_range)
    return policy.train()


def check_fits(policy: ChunkPolicy, config: DCPOConfig, rewards: Sequence[Reward]) -> None:
    """Raise ConfigError if settings of rollouts and rewards do not fit the policy or each other."""
    if not config.chunk_range and config.forced_rows != "none":
        raise ConfigError(
            "chunk_range is empty: set it, or `guidance` (written by `dcar profile`), or "
            "forced_rows=none"
        )
    if config.policy_sizes and tuple(config.policy_sizes) != policy.config.sizes:
        raise ConfigError(
            f"policy_sizes={config.policy_sizes} is for a new policy, but the given one chooses "
            f"among {list(policy.config.sizes) or 'all sizes'}: set policy_sizes=[]"
        )
    if max(config.chunk_range, default=1) > policy.config.num_actions:
        raise ConfigError(
            f"chunk_range {config.chunk_range} contains sizes above {policy.config.num_actions}, "
            "the number of tokens that the decoder's heads predict; remove them"
        )
    if config.forced_rows != "none" and not set(config.chunk_range) <= set(
        policy.config.sizes or config.chunk_range
    ):
        raise ConfigError(
            f"chunk_range {config.chunk_range} contains sizes that the policy cannot choose, "
            f"policy_sizes={list(policy.config.sizes)}: remove them, or set forced_rows=none"
        )
    check_num_candidates(policy, config.num_candidates)
    if config.credit == "decision":
        check_locate(rewards)
    if config.reward_weights and len(config.reward_weights) != len(rewards):
        raise ConfigError(
            f"{len(config.reward_weights)} reward_weights for {len(rewards)} reward_funcs: give "
            "one weight for each"
        )
