"""Stage two: train a chunk policy with DCPO on a frozen decoder.

    accelerate launch -m rl.train --config launch/recipes/dcpo_starter.yaml out=runs/dcpo
    dcar train-policy --config launch/recipes/dcpo_starter.yaml num_generations=8

Paper: §4.2–4.4, App. C.2. Departures: the KL is exact, not sampled; a bottleneck policy by default (policy_width: null
is the paper's); what the forced half does is a switch (forced_rows). Leaves behind in out: policy/ (weights,
config, card), config.yaml, log.jsonl, provenance.json, checkpoints. Run again, it goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from dcar.config import load_config
from dcar.errors import CheckpointError, ConfigError
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder, load_policy
from dcar.process import meeting_others, run_command
from dcar.prompts.items import PromptItem
from dcar.prompts.load import load_prompts, vocoder_for
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.recognition.patient import Patience, PatientRecognizer
from dcar.sources.shipped import resolve
from dcar.storage import digest, files_of, writing
from dcar.tracking import provenance, write_json
from dcar.train.checkpoints import latest_checkpoint, why_incomplete
from dcar.vocoder.base import Vocoder
from heads.coherence import Coherence
from heads.policy import ChunkPolicy, ChunkPolicyConfig, shape_of
from rl.config import DCPOConfig, save_settings
from rl.export import policy_card
from rl.rewards import (
    HEARD_AT_ONCE,
    CERReward,
    GroundTruth,
    LikelihoodReward,
    RangePenalty,
    Reward,
    SpeedBonus,
    TokenLikelihoodReward,
    TokenReward,
    WERReward,
    check_hears,
    corpus_distances,
    corpus_token_recognizer,
    ground_truth_errors,
)
from rl.trainer import DCPOTrainer

logger = logging.getLogger(__name__)

HEARING = {"wer", "cer", "log_likelihood"}  # rewards that ask a recogniser
HEARD_FOR_CHECK = 50
"""Training utterances at most by which a recogniser is checked whose rewards need no WER of the recordings."""


def guidance_range(config: DCPOConfig, base_checksum: str) -> list[int]:
    """The range of the config, or of the guidance profile that it names."""
    if config.chunk_range or not config.guidance:
        return config.chunk_range
    try:
        profile = json.loads(Path(config.guidance).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or not UTF-8
        raise ConfigError(f"guidance {config.guidance}: cannot read it ({error}); run `dcar profile` first") from error
    found = profile.get("range") if isinstance(profile, dict) else None
    if not isinstance(found, list) or not found or not all(isinstance(k, int) and k >= 1 for k in found):
        raise ConfigError(f"guidance {config.guidance}: no guidance profile, it has no range of chunk sizes; run "
                          "`dcar profile` first")
    if profile.get("base_checksum") != base_checksum:
        raise CheckpointError(f"guidance {config.guidance} is of another decoder; run `dcar profile` on yours")
    return sorted(found)


def token_reward(config: DCPOConfig) -> TokenReward:
    """The distance to the recording's tokens, over the codebook of the tokenizer that made the corpus."""
    if not config.data:
        raise ConfigError("reward token_distance needs the corpus' tokenizer: give data=<folder of dcar prepare>")
    return TokenReward(corpus_distances(config.data), config.token_scale, locate=config.credit == "decision")


def token_likelihood_reward(config: DCPOConfig) -> TokenLikelihoodReward:
    """The likelihood of the phonemes by a token recogniser that reads the corpus' tokens."""
    if not config.data:
        raise ConfigError("reward token_likelihood has to know the corpus' tokens and phonemes: give data=<folder of "
                          "dcar prepare>")
    recognizer = corpus_token_recognizer(config.token_recognizer, config.data, str(config.device))
    return TokenLikelihoodReward(recognizer, config.token_likelihood_scale, locate=config.credit == "decision")


class Unheard:
    """In place of a recogniser with which nothing of a run hears, so that its packages need not be there."""

    def __init__(self, name: str):
        self.name = name

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """Nothing asks for this; a ConfigError where something does."""
        raise ConfigError(f"recogniser {self.name} was not loaded, because no reward and no evaluation hears; give it "
                          "in Python: build(config, recognizer=…)")


def hears(config: DCPOConfig, evaluates: bool) -> bool:
    """Whether a run asks a recogniser: for a reward, or where the best checkpoint is chosen by word errors."""
    return bool(HEARING & set(config.reward_funcs)) or evaluates and config.metric_for_best_model == "eval_wer"


def make_rewards(config: DCPOConfig, recognizer: Recognizer, ground_truth: dict[str, float]) -> list[Reward]:
    """The rewards that `reward_funcs` names."""
    makers: dict[str, Callable[[], Reward]] = {
        "wer": lambda: WERReward(recognizer, ground_truth, config.wer_cap, locate=config.credit == "decision"),
        "cer": lambda: CERReward(recognizer, config.wer_cap),
        "log_likelihood": lambda: LikelihoodReward(recognizer, config.likelihood_scale,
                                                   locate=config.credit == "decision"),
        "token_distance": lambda: token_reward(config),
        "token_likelihood": lambda: token_likelihood_reward(config),
        "range_penalty": lambda: RangePenalty(
            config.chunk_range, config.alpha, config.penalty if config.chunk_range else "none",
            config.penalty_normalizer),
        "speed_bonus": lambda: SpeedBonus(config.speed_bonus),
    }
    if unknown := [name for name in config.reward_funcs if name not in makers]:
        raise ConfigError(f"reward_funcs: unknown {unknown}; known are {', '.join(makers)}")
    return [makers[name]() for name in config.reward_funcs]


def make_policy(config: DCPOConfig, base: AnyDecoder, checksum: str) -> ChunkPolicy:
    """A new policy for this decoder, uniform but for `range_prior` and `policy_start`, or the one to start from."""
    if config.policy_start != "uniform" and (config.policy or config.policy_reads == "hidden"):
        raise ConfigError(f"policy_start={config.policy_start} is where a new policy that sees candidates begins: "
                          "leave it out where `policy` is given or policy_reads=hidden")
    if config.range_prior and (config.policy or not config.chunk_range):
        raise ConfigError("range_prior is where a new policy starts inside the guidance range: give guidance=… or "
                          "chunk_range=…, and no policy, or leave range_prior out (0, where a recipe sets it)")
    if config.range_prior and config.policy_reads != "hidden":
        raise ConfigError("range_prior is for policies that read hidden states; after the draw, policy_sizes says what "
                          "they choose among: leave range_prior out")
    if config.policy_start == "coherent" and not config.policy_coherence:
        raise ConfigError("policy_start=coherent begins from how well candidates go together: give policy_coherence=…, "
                          "a folder of `dcar train-coherence`")
    if config.policy_coherence and (config.policy or config.policy_reads == "hidden"):
        raise ConfigError("policy_coherence is for a new policy that sees candidates: leave it out where `policy` is "
                          "given or policy_reads=hidden")
    if config.policy:
        policy = load_policy(config.policy)
        policy.check_base(checksum)
        policy.config.base_checksum = checksum
        policy.config.chunk_range = tuple(config.chunk_range)
        return policy.train()
    coherence = None
    if config.policy_coherence:
        coherence = Coherence.from_pretrained(resolve(config.policy_coherence, "coherence"))
        coherence.check_base(checksum)
    torch.manual_seed(config.seed)
    try:
        policy = ChunkPolicy(ChunkPolicyConfig(
            base.config.hidden_size, base.config.num_prediction_heads, config.policy_width, config.policy_heads,
            config.policy_ffn_size, tuple(config.chunk_range), checksum, base.config.tokenizer, config.policy_reads,
            tuple(config.policy_sizes), config.score_width, **shape_of(coherence)))
    except (CheckpointError, ValueError) as error:
        raise ConfigError(f"policy_width, policy_heads, policy_sizes, chunk_range do not fit: {error}") from error
    if policy.scores is not None:
        if coherence is not None and policy.coherence is not None:
            policy.coherence.load_state_dict(coherence.state_dict())
        if config.policy_start != "uniform":
            policy.scores.end_on_likely()
        if config.policy_start == "coherent":
            policy.scores.end_on_coherent()
        return policy
    sizes = torch.arange(1, policy.config.num_actions + 1)
    policy.output.bias.data[torch.isin(sizes, torch.tensor(config.chunk_range))] = config.range_prior
    return policy


def build(config: DCPOConfig, *, base: AnyDecoder | None = None, vocoder: Vocoder | None = None,
          recognizer: Recognizer | None = None, train_items: Sequence[PromptItem] | None = None,
          eval_items: Sequence[PromptItem] | None = None) -> DCPOTrainer:
    """A trainer with everything loaded that is not given. Errors are of `dcar.errors`."""
    for name, given in (("decoder", base), ("data", None if vocoder is None else train_items)):
        if given is None and not getattr(config, name):
            raise ConfigError(f"{name} is not set: give {name}=… (recipes are in launch/recipes/)")
    base = load_decoder(config.decoder) if base is None else base
    checksum = base.checksum() if hasattr(base, "checksum") else ""
    config.chunk_range = guidance_range(config, checksum)
    if train_items is None:
        train_items = load_prompts(config.data, config.train_split, base, config.prompt_tokens, config.seed,
                                   config.max_train_prompts, config.min_seconds)
        if config.eval_split != "none":
            eval_items = load_prompts(config.data, config.eval_split, base, config.prompt_tokens, config.seed,
                                      config.max_eval_prompts)
    if vocoder is None:
        spoken = [*train_items, *(eval_items or ())]
        vocoder = vocoder_for(base, config.data, spoken, config.vocoder, str(config.device))
    if recognizer is None and hears(config, evaluates=eval_items is not None):
        recognizer = load_recognizer(config.recognizer, device=str(config.device))
    recognizer = recognizer or Unheard(config.recognizer)
    patient = PatientRecognizer(recognizer, Patience(config.reward_attempts, config.reward_timeout))
    rewards = make_rewards(config, patient, {})
    trainer = DCPOTrainer(make_policy(config, base, checksum), base, config, rewards, train_items, vocoder, patient,
                          eval_items)
    if any(isinstance(reward, WERReward) for reward in rewards):
        truth = measure_ground_truth(trainer, train_items)
    elif any(isinstance(reward, CERReward | LikelihoodReward) for reward in rewards):
        few = train_items[:: -(-len(train_items) // HEARD_FOR_CHECK)]  # these rewards need it for the check alone
        truth = measure_ground_truth(trainer, few)
    else:
        return trainer
    check_hears(recognizer.name, truth.corpus(), config.max_reward_wer)
    for reward in rewards:
        if isinstance(reward, WERReward):
            reward.ground_truth = truth.rates()
    return trainer


def measure_ground_truth(trainer: DCPOTrainer, items: Sequence[PromptItem]) -> GroundTruth:
    """WER_gt of every training utterance, shared among the processes and kept in out/ground_truth.json as it grows."""
    args, main = trainer.args, trainer.is_world_process_zero()
    truth = GroundTruth(Path(args.output_dir) / "ground_truth.json", trainer.recognizer.name, items)
    missing = len(truth.missing())
    with tqdm(desc="recordings", total=missing, unit="utt", disable=not (main and missing)) as bar:
        while truth.missing():  # the same in all processes
            part = truth.missing(args.process_index, args.world_size)[:HEARD_AT_ONCE]
            found: dict[str, Any] = {}
            for told in gather_object([ground_truth_errors(part, trainer.vocoder, trainer.recognizer)]):
                found.update(told)
            truth.add(found, save=main)
            bar.update(len(found))
    return truth


def resume_point(config: DCPOConfig) -> str | None:
    """The checkpoint that `resume` asks for."""
    if config.resume in ("never", "", "False"):
        return None
    if config.resume not in ("auto", "True"):
        if not Path(config.resume).is_dir():
            raise CheckpointError(f"resume: {config.resume} is no directory; use auto, never, or a checkpoint")
        if why := why_incomplete(Path(config.resume)):
            raise CheckpointError(f"resume: {config.resume} is not complete: {why}; resume=auto takes the newest one "
                                  "that is")
        return config.resume
    found = latest_checkpoint(config.output_dir)
    return None if found is None else str(found)


def run(config: DCPOConfig, **parts: Any) -> Path:
    """Train (or go on training), then write the best policy with its card; returns the policy's directory.

    `parts` replace what would be loaded, see `build`.
    """
    trainer = build(config, **parts)
    out, main = Path(config.output_dir), trainer.is_world_process_zero()
    truth = GroundTruth(out / "ground_truth.json", trainer.recognizer.name, trainer.train_dataset.items)
    if main:
        with writing(out):
            save_settings(config, out / "config.yaml")
        heard = f"recordings' WER {truth.corpus():.3f}" if truth.errors else "recordings were not heard"
        logger.info("%d training prompts, %d processes, range %s, policy of %s parameters, %s",
                    len(trainer.train_dataset), config.world_size, config.chunk_range,
                    f"{sum(p.numel() for p in trainer.policy.parameters()):,}", heard)
    prepared = Path(config.data) / "prepared.json" if config.data else None
    trainer.origin = provenance(
        config=json.loads(json.dumps(config.to_dict(), default=str)), seed=config.seed,
        base_checksum=trainer.policy.config.base_checksum,
        data={"path": config.data, "prepared.json": digest(prepared) if prepared and prepared.is_file() else None})
    trainer.train(resume_from_checkpoint=resume_point(config))
    with trainer.doing("evaluating and exporting the policy"), writing(out):
        return export(trainer, truth)


def export(trainer: DCPOTrainer, truth: GroundTruth) -> Path:
    """The last evaluation, and the policy with its card and provenance; returns the policy's directory."""
    config, out = trainer.args, Path(trainer.args.output_dir)
    policy = out / "policy"
    metrics: dict[str, Any] = {"wer_gt": truth.corpus()} if truth.errors else {}
    if config.eval_strategy != "no":
        metrics.update(trainer.evaluate())
    trainer.check_weights()
    if trainer.is_world_process_zero():
        source = provenance(config=json.loads(json.dumps(config.to_dict(), default=str)), metrics=metrics,
                            steps=trainer.state.global_step, processes=config.world_size,
                            best_checkpoint=Path(trainer.state.best_model_checkpoint or "").name,
                            recognizer=trainer.recognizer.name, base_checksum=trainer.policy.config.base_checksum)
        trainer.policy.save_pretrained(policy, card=policy_card(trainer.policy, source))
        files = {name: digest(policy / name) for name in files_of(policy) if name != "provenance.json"}
        write_json(policy / "provenance.json", {**source, "files": files})
        write_json(out / "provenance.json", source)
    trainer.accelerator.wait_for_everyone()
    return policy


def main(arguments: Sequence[str] | None = None, **parts: Any) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with meeting_others():  # the settings bring the processes together
        config = load_config(DCPOConfig, arguments)
    run(config, **parts)


if __name__ == "__main__":
    sys.exit(run_command("rl.train", main))
