"""The progress bar of a DCPO run: one line that moves, and one line for every evaluation."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

SHOWN = {"reward_sampled": "sampled", "reward_forced": "forced", "wer": "wer", "tokens_per_pass": "tok/pass",
         "entropy": "entropy", "failed_rewards": "failed"}


class Progress(TrainerCallback):
    """Shows the few of the logged quantities that tell whether a run is well; the log has them all."""

    def __init__(self, quiet: bool = False):
        self.quiet, self.bar = quiet, None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not self.quiet:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="DCPO", dynamic_ncols=True)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs):
        if not state.is_world_process_zero or self.quiet or not logs:
            return
        if "loss" in logs and self.bar is not None:
            self.bar.set_postfix({text: f"{logs[name]:.3f}" for name, text in SHOWN.items() if name in logs})
            self.bar.update(state.global_step - self.bar.n)
        elif "eval_wer" in logs:
            tqdm.write(
                f"step {state.global_step}: WER {100 * logs['eval_wer']:.2f} % at {logs['eval_tokens_per_pass']:.2f} "
                f"tokens a pass (sampled {100 * logs['eval_wer_sampled']:.2f} % at "
                f"{logs['eval_tokens_per_pass_sampled']:.2f}), chunk sizes "
                + " ".join(f"{k}:{share:.0%}" for k, share in enumerate(logs["eval_action_histogram"], 1)))

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None
