"""Stage two: train a chunk policy with DCPO on a frozen decoder.

    accelerate launch -m dcar.cli train-policy --config dcpo_starter out=runs/dcpo
    dcar train-policy --config dcpo_starter num_generations=8

Paper: §4.2–4.4, App. C.2. Departures: the KL is exact, not sampled; a bottleneck policy by default
(policy_width: null is the paper's); the use of the forced half is a setting (forced_rows). Writes
to out: policy/ (weights, config, card), config.yaml, log.jsonl, provenance.json and checkpoints.
The same command resumes from the last checkpoint.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcar.config import load_config
from dcar.model.precision import precision_of
from dcar.prepare.prepared import prepared_folder
from dcar.process import claimed, run_command
from dcar.storage import digest, writing
from dcar.tracking import provenance, write_json, write_provenance
from dcar.train.checkpoints import resume_point
from rl.config import DCPOConfig, resumed_settings, save_settings
from rl.export import policy_card
from rl.trainer import DCPOTrainer

logger = logging.getLogger(__name__)


def run(config: DCPOConfig, **parts: Any) -> Path:
    """Train, or resume training, then write the best policy with its card and return its directory.

    `parts`: arguments of `DCPOTrainer` that replace what would be loaded.
    """
    checkpoint = resume_point(
        config.resume_from_checkpoint, config.output_dir
    )  # may raise, before anything is written
    trainer = DCPOTrainer(args=config, **parts)
    config = trainer.args  # with the guidance range
    out = Path(config.output_dir)
    prepared = prepared_folder(config.data) / "prepared.json" if config.data else None
    trainer.origin = provenance(
        settings=resumed_settings(config) | {"reward_funcs": trainer.reward_versions},
        seed=config.seed,
        base_checksum=trainer.policy.config.base_checksum,
        precision=precision_of(trainer.base),
        data={
            "path": config.data,
            "prepared.json": digest(prepared) if prepared and prepared.is_file() else None,
        },
    )
    if checkpoint:
        trainer.check_resume(checkpoint)
    if trainer.is_world_process_zero():
        with writing(out):
            save_settings(config, out / "config.yaml")
        parameters = sum(p.numel() for p in trainer.policy.parameters())
        facts = [
            f"training prompts: {len(trainer.train_dataset)}",
            f"processes: {config.world_size}",
            f"parameters of the policy: {parameters:,}",
        ]
        if config.chunk_range:
            facts.append(f"guidance range: {list(config.chunk_range)}")
        if trainer.ground_truth.errors:
            facts.append(f"error rate of the recordings: {trainer.ground_truth.corpus():.3f}")
        logger.info(", ".join(facts))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    with trainer.doing("evaluating and exporting the policy"), writing(out):
        return export(trainer)


def export(trainer: DCPOTrainer) -> Path:
    """Evaluate once more, write the policy with its card and provenance, and return its
    directory."""
    config, out = trainer.args, Path(trainer.args.output_dir)
    policy = out / "policy"
    metrics: dict[str, Any] = {}
    if trainer.ground_truth.errors:
        metrics["wer_gt"] = trainer.ground_truth.corpus()
    if config.eval_strategy != "no":
        metrics.update(trainer.evaluate())
    trainer.check_weights()
    if trainer.is_world_process_zero():
        source = provenance(
            config=json.loads(json.dumps(config.to_dict(), default=str)),
            metrics=metrics,
            steps=trainer.state.global_step,
            processes=config.world_size,
            best_checkpoint=Path(trainer.state.best_model_checkpoint or "").name,
            recognizer=trainer.recognizer.name,
            base_checksum=trainer.policy.config.base_checksum,
            precision=precision_of(trainer.base),
            resumed=trainer.origin.get("resumed", []),
        )
        trainer.policy.save_pretrained(policy, card=policy_card(trainer.policy, source))
        write_provenance(policy, source)
        write_json(out / "provenance.json", source)
    trainer.accelerator.wait_for_everyone()
    return policy


CONFIG = DCPOConfig


def main(arguments: Sequence[str] | None = None, **parts: Any) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(CONFIG, arguments)
    with claimed(config.output_dir, resumes=True):
        run(config, **parts)


if __name__ == "__main__":
    sys.exit(run_command("rl.train", main))
