"""Export a trained policy: a directory to load, and a program to serve.

    dcar export run=runs/dcpo decoder=runs/car out=runs/policy program=true

The directory holds model.safetensors, config.json (action set, range, base checksum, tokenizer), a
model card with the run's metrics, and provenance.json. The program (`serving.pt2`, torch.export,
dynamic batch and length) maps the decoder's hidden states to the policy's decision and the
distributions of all heads; loading it needs torch alone. With num_candidates=4 it draws four
candidates side by side and chooses among them, which needs a policy that holds a chunk scorer.
"""

import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcar.config import load_config, setting
from dcar.decoding.policy_chunk import check_num_candidates
from dcar.errors import CheckpointError, ConfigError
from dcar.model.cards import model_card
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.process import run_claimed, run_command
from dcar.sources.packages import templates
from dcar.sources.shipped import resolve
from dcar.storage import read_manifest
from dcar.tracking import write_provenance
from heads.build import Heads
from heads.layers import at
from heads.policy import CandidatePolicy, CandidatePolicyConfig, ChunkPolicy, HiddenPolicyConfig

PROGRAM = "serving.pt2"
MAX_BATCH, MAX_LENGTH = 1024, 8192  # limits of the serving program


@dataclass
class ExportConfig:
    """Settings of `dcar export`."""

    run: str = setting(
        meaning="Folder of a DCPO run, one of its checkpoints, or a policy directory; "
        "starter-t1.0 and starter-t0.4 ship.",
        place="folder",
    )
    out: str = setting("runs/policy", "Folder to write.", place="folder")
    decoder: str = setting(
        "",
        "Directory of the decoder; needed for the program, and compared with the policy's "
        "checksum.",
    )
    program: bool = setting(True, "Also write the torch.export program (needs decoder).")
    num_candidates: int = setting(
        1,
        "Candidates that the program draws side by side and chooses among; more than 1 needs a "
        "policy with a chunk scorer.",
        minimum=1,
    )


class ServingStep(nn.Module):
    """One decision: from the hidden states so far to the policy's distribution, and the logits of
    the heads.

    A policy that reads candidates needs the tokens drawn inside the program: the argmax of logits +
    noise. That is a draw at temperature T if the noise is T times a standard Gumbel variable (the
    Gumbel-max trick), and greedy if it is 0. Candidates drawn with independent noise are
    independent, whereas those of `dcar.decoding` use equidistant random numbers.
    """

    def __init__(self, policy: ChunkPolicy, heads: Heads):
        super().__init__()
        self.policy, self.heads = policy, heads

    def forward(
        self, hidden: Tensor, lengths: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities [B, K] (column a - 1: keep a tokens) and head logits [B, K, V +
        1] (row k - 1: the token k steps ahead), given hidden [B, S, D] of the speech positions
        (prompt first) and lengths [B].

        With noise [B, N, n, V + 1] for N candidates of the n tokens that the policy may keep:
        log-probabilities [B, N K] (column i K + a - 1: keep a tokens of candidate i), head logits
        [B, n, V + 1], and the candidates [B, N, n].
        """
        last = at(hidden, lengths - 1)
        if noise is None:
            return self.policy(hidden, (lengths - 1)[:, None])[:, 0], self.heads.logits(last)
        assert isinstance(self.policy, CandidatePolicy)
        logits = self.heads.logits(last, noise.shape[2])
        tokens = (logits.unsqueeze(1) + noise).argmax(-1)
        features = self.policy.candidate_features(last, logits, tokens)
        return self.policy.log_probs(features), logits, tokens


def export_program(
    policy: ChunkPolicy, base: AnyDecoder, path: Path, num_candidates: int = 1
) -> None:
    """Write the serving program of a policy for this decoder, which chooses among
    `num_candidates` candidates. Raises CheckpointError if the written program does not compute
    the same."""
    step, generator = ServingStep(policy, base.heads).eval(), torch.Generator().manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    length = torch.export.Dim("length", min=1, max=MAX_LENGTH)
    inputs = [
        torch.randn(2, 5, policy.config.hidden_size, generator=generator),
        torch.tensor([5, 3]),
    ]
    shapes: dict[str, dict[int, Any]] = {"hidden": {0: batch, 1: length}, "lengths": {0: batch}}
    if isinstance(policy, CandidatePolicy):
        shape = 2, num_candidates, policy.config.reach, base.config.output_size
        inputs.append(torch.randn(shape, generator=generator))
        shapes["noise"] = {0: batch}
    with torch.no_grad(), warnings.catch_warnings():
        # tracing makes torch's GRU list its weights again; they are parameters, and the written
        # program is compared with the model below
        warnings.filterwarnings("ignore", message="The tensor attributes .*_flat_weights")
        expected = step(*inputs)  # also builds the rotary table, outside the traced program
        program = torch.export.export(step, tuple(inputs), dynamic_shapes=shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, str(path))
    written = torch.export.load(str(path)).module()(*inputs)
    for a, b in zip(expected, written, strict=True):
        if not torch.allclose(a, b, atol=1e-4):
            raise CheckpointError(
                f"{path}: the program's outputs differ from the model's by up to "
                f"{float((a - b).abs().max())}; report this with the versions of torch and dcar"
            )


def program_card(policy: ChunkPolicy, codes: int, num_candidates: int = 1) -> str:
    """Return the part of the policy's card on the serving program: its inputs and outputs, and
    an example that runs it. codes: number of speech tokens of the decoder."""
    config = policy.config
    template = templates("rl").get_template("program_card.md")
    return template.render(
        program=PROGRAM,
        max_batch=MAX_BATCH,
        max_length=MAX_LENGTH,
        config=config,
        codes=codes,
        after_draw=policy.after_draw,
        n=config.reach if isinstance(config, CandidatePolicyConfig) else config.num_actions,
        num_candidates=num_candidates,
    )


def policy_card(policy: ChunkPolicy, source: dict[str, Any], program: str = "") -> str:
    """Return README.md of an exported policy, with the metrics of its run and the `program_card`
    of the serving program next to it, if there is one."""
    config = policy.config
    size = f"{sum(p.numel() for p in policy.parameters()):,} parameters"
    if isinstance(config, HiddenPolicyConfig):
        reads = "the hidden states so far, before tokens are drawn"
        size += f", a layer {config.layer_width} wide with {config.num_attention_heads} heads"
    else:
        reads = "the drawn candidates: likelihood and certainty of every token"
    if policy.chunk_scorer is not None:
        reads += "; a score of how well they fit together"
    if config.sizes:
        reads += f"; chooses among {list(config.sizes)} tokens"
    actions = f"keep 1..{config.num_actions} tokens"
    if config.chunk_range:
        actions += f"; guidance range of the training: {list(config.chunk_range)}"
    note = "The reward recogniser was the training signal: judge with another one (`dcar compare`)."
    if program:
        note += f"\n\n{program}\n## The policy itself"
    return model_card(
        "Chunk policy (DCAR)",
        "Decides at every step of a chunk-wise autoregressive speech decoder how many of the "
        f"{config.num_actions} predicted tokens are kept. Trained with DCPO on the frozen decoder; "
        "loading it with another decoder is an error.",
        [
            ("actions", actions),
            (
                "decoder",
                f"checksum `{config.base_checksum or 'not bound'}`, hidden size "
                f"{config.hidden_size}",
            ),
            ("speech tokenizer", config.tokenizer or "not recorded"),
            ("reads", reads),
            ("size", size),
            ("policy checksum", f"`{policy.checksum()}`"),
        ],
        source,
        metrics_of=f"development prompts, reward recogniser {source.get('recognizer', '?')}",
        tags=("reinforcement-learning", "dcpo"),
        settings=(
            "forced_rows num_generations num_candidates optim learning_rate beta alpha "
            "num_train_epochs"
        ).split(),
        note=note,
        code="from heads.policy import ChunkPolicy\n\npolicy = "
        'ChunkPolicy.from_pretrained("path/to/this/directory")\n'
        "policy.check_base(decoder.checksum())",
    )


def find_policy(run: str | Path) -> Path:
    """Return the policy directory of a run, of one of its checkpoints, or the directory itself;
    "starter-t1.0" and "starter-t0.4" ship."""
    folder = resolve(str(run), "policy")
    for path in (folder / "policy", folder):
        if (path / "model.safetensors").is_file():
            return path
    raise CheckpointError(
        f"{run}: neither a finished DCPO run (with policy/) nor a policy directory; give the out "
        "folder of `dcar train-policy`, one of its checkpoints, or starter-t1.0"
    )


def read_provenance(source: Path) -> dict[str, Any]:
    """Return what is recorded about a policy's origin: of a checkpoint, what its manifest records
    about the run, which has no metrics of these weights; empty if there is nothing."""
    path = source / "provenance.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    manifest = read_manifest(source) or {}
    if not (run := manifest.get("run")):
        return {}
    record = {"steps": manifest["step"], "processes": manifest["processes"]}
    return {**run, **record, "config": run.get("settings", {})}


def export(config: ExportConfig) -> Path:
    """Write the policy directory and return its path."""
    if config.program and not config.decoder:
        raise ConfigError(
            "program=true needs the heads of the decoder: give decoder=…, or set program=false"
        )
    if config.num_candidates > 1 and not config.program:
        raise ConfigError(
            f"num_candidates={config.num_candidates} is a setting of the serving program: set "
            "program=true, or leave num_candidates out"
        )
    source, out = find_policy(config.run), Path(config.out)
    policy, origin = ChunkPolicy.from_pretrained(source), read_provenance(source)
    check_num_candidates(policy, config.num_candidates)
    base, program = load_decoder(config.decoder) if config.decoder else None, ""
    if base is not None:
        policy.check_base(base.checksum())
        if config.program:
            program = program_card(policy, base.config.speech_vocab_size, config.num_candidates)
    policy.save_pretrained(out, card=policy_card(policy, origin, program))
    logs = [p for p in (source / "log.jsonl", source.parent / "log.jsonl") if p.is_file()]
    if logs and logs[0].parent != out:
        shutil.copyfile(logs[0], out / "log.jsonl")
    (out / PROGRAM).unlink(missing_ok=True)  # of another policy, which was here before
    if config.program and base is not None:
        export_program(policy, base, out / PROGRAM, config.num_candidates)
    write_provenance(out, origin)
    return out


CONFIG = ExportConfig


def main(arguments: Sequence[str] | None = None) -> None:
    print(f"exported to {run_claimed(export, load_config(CONFIG, arguments))}")


if __name__ == "__main__":
    sys.exit(run_command("rl.export", main))
