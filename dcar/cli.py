"""The `dcar` command: every job of the project under one name. The same code runs as `accelerate launch -m …`."""

from __future__ import annotations

import importlib
import logging
import sys

from dcar.process import run_command

NO_COMMAND = 2  # exit status, as of argparse

# command -> (module with main(arguments), what it does). The modules of rl and eval are named, not imported: this
# table is the only place where the lower floor knows of the upper ones.
COMMANDS = {
    "prepare": ("dcar.prepare.run", "corpus -> validated text and speech tokens (validate=true only reports)"),
    "fit-tokenizer": ("dcar.tokens.fit", "k-means speech tokenizer from a corpus"),
    "train-vocoder": ("dcar.vocoder.training.train", "tokens + voice -> waveform"),
    "vocoder-quality": ("eval.analysis.vocoder_quality", "what tokens and vocoder lose of words and voices"),
    "resynthesize": ("dcar.vocoder.resynthesize",
                     "a prepared split through the vocoder: training speech for the recogniser, or wavs"),
    "train-encoder-recognizer": ("dcar.train.encoder_recognizer",
                                 "the reward recogniser: characters from a frozen speech encoder's states"),
    "train-recognizer": ("dcar.recognition.train", "a recogniser from nothing (NeMo FastConformer-CTC)"),
    "train-token-recognizer": ("dcar.train.token_recognizer",
                               "what reads phonemes in speech tokens, for the reward token_likelihood"),
    "train-coherence": ("dcar.train.coherence",
                        "how well the tokens of a chunk go together, for a policy after the draw"),
    "convert-backbone": ("dcar.model.backbones.convert",
                         "decoder from CosyVoice 2, LLaSA or another causal language model"),
    "retokenize": ("dcar.prepare.retokenize", "prepared corpus with such a decoder's own text tokens"),
    "estimate": ("launch.estimate", "GPU-hours and memory of a recipe, before it runs"),
    "train": ("dcar.train.car", "stage one: CAR decoder with K heads, or FAR with one"),
    "train-draft": ("dcar.train.draft", "a shallow draft model from a decoder's own layers, for speculative decoding"),
    "tune-voice": ("launch.tune_voice", "recordings of one speaker -> a tuned decoder, if it is better than before"),
    "profile": ("rl.profile", "WER of CAR-1 … CAR-K -> guidance range"),
    "train-policy": ("rl.train", "stage two: DCPO"),
    "export": ("rl.export", "policy directory and serving program from a DCPO run"),
    "export-medusa": ("dcar.model.medusa", "the heads as a Medusa checkpoint, which vLLM reads"),
    "speak": ("dcar.speak.speak", "text + prompt voice -> audio"),
    "demo": ("eval.demo.page", "a page to play with: two methods side by side (needs the extra dcar[demo])"),
    "score": ("eval.analysis.score", "any audio and its text: WER by recognisers, similarity to a prompt, quality"),
    "fit-verifiers": ("eval.analysis.fit_verifiers",
                      "rank accuracies, token transitions, entropy thresholds for the verifiers"),
    "oracle": ("eval.analysis.oracle", "cheapest chunking of the true tokens: what a perfect schedule could gain"),
    "tune": ("eval.compare.tune", "each method's best sampling on development sentences -> tuned.json"),
    "compare": ("eval.compare.run", "methods on the same utterances: WER, similarity, speed"),
    "report": ("eval.report.page", "one HTML page with tables, plots and audio"),
    "export-results": ("eval.results.export", "a comparison's audio and scores as VERSA and seed-tts-eval read them"),
    "speed": ("eval.speed.run", "cost of a decoding step against its floor"),
    "verify": ("dcar.verify", "checkpoints, comparisons and prepared sets against their own digests"),
    "doctor": ("dcar.doctor", "check this installation"),
}


def usage() -> str:
    rows = [f"  {name:17} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: dcar COMMAND [options]   (dcar COMMAND --help lists them)", "", *rows, "",
                      "  --print-completion bash|zsh|fish: completion of commands and settings for that shell"])


def print_completion(shells: list[str]) -> int:
    """The completion script for one shell, which holds the settings of every command; imports all of them."""
    from dcar.completion import SHELLS, command_of, script
    from dcar.config import schema_of

    if len(shells) != 1 or shells[0] not in SHELLS:
        print(f"dcar: --print-completion needs one of {', '.join(SHELLS)}", file=sys.stderr)
        return NO_COMMAND
    commands = [command_of(name, summary, schema_of(importlib.import_module(module).main))
                for name, (module, summary) in COMMANDS.items()]
    print(script(shells[0], commands), end="")
    return 0


def call(arguments: list[str]) -> object:
    """Import the module of a command and run it; its exit status, or None."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name == "--print-completion":
        return print_completion(rest)
    if name not in COMMANDS:
        print(f"dcar: unknown command '{name}'\n\n{usage()}", file=sys.stderr)
        return NO_COMMAND
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.argv = [f"dcar {name}", *rest]
    return importlib.import_module(COMMANDS[name][0]).main(rest)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exits where its status is not 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"dcar {arguments[0]}" if arguments and arguments[0] in COMMANDS else "dcar"
    if status := run_command(name, lambda: call(arguments)):
        sys.exit(status)


if __name__ == "__main__":
    main()
