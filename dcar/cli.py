"""The `dcar` command: every job of the project under one name. The same code runs as `accelerate
launch -m …`."""

from __future__ import annotations

import difflib
import importlib
import sys
import textwrap
from importlib.metadata import version

from dcar.config import recipes
from dcar.errors import ConfigError
from dcar.process import run_command

NO_COMMAND = 2  # exit status, as of argparse

# task -> command -> (module with main(arguments), what it does). The modules of rl, eval and launch
# are named, not imported: this table is the only place where the lower layer knows of the upper
# ones.
TASKS = {
    "make data": {
        "fit-tokenizer": ("dcar.tokens.fit", "k-means speech tokenizer from a corpus"),
        "prepare": (
            "dcar.prepare.run",
            "corpus -> validated text and speech tokens (validate=true only reports)",
        ),
    },
    "train": {
        "train": ("dcar.train.car", "stage one: CAR decoder with K heads, or FAR with one"),
        "distil": (
            "launch.distil",
            "training sentences as a decoder speaks them, the best of several",
        ),
        "train-draft": ("dcar.train.draft", "a shallow draft model from a decoder's own layers"),
        "train-chunk-scorer": (
            "dcar.train.chunk_scorer",
            "joint score of the tokens of a chunk, for a policy to read",
        ),
        "profile": ("rl.profile", "WER of CAR-1 … CAR-K -> guidance range"),
        "train-policy": ("rl.train", "stage two: DCPO"),
        "train-recognizer": (
            "dcar.train.token_recognizer",
            "phonemes from speech tokens, for rewards",
        ),
        "train-residual": (
            "dcar.train.residual",
            "further layers of a codec from its first one, for a vocoder",
        ),
        "train-vocoder": ("dcar.vocoder.training.train", "tokens + voice -> waveform"),
        "convert-backbone": (
            "dcar.model.backbones.convert",
            "decoder from CosyVoice 2, LLaSA, another language model",
        ),
    },
    "speak": {
        "speak": ("dcar.speak.speak", "text + prompt voice -> audio"),
    },
    "evaluate": {
        "tune": (
            "eval.compare.tune",
            "each method's best sampling on development sentences -> tuned.json",
        ),
        "compare": ("eval.compare.run", "methods on the same utterances: WER, similarity, speed"),
        "report": (
            "eval.report.page",
            "one HTML page of a comparison with tables, plots and audio",
        ),
        "score": (
            "eval.analysis.score",
            "any audio and its text: WER, similarity to a prompt, quality",
        ),
        "fit-verifiers": (
            "eval.analysis.fit_verifiers",
            "what verifiers need of a decoder: ranks, transitions",
        ),
        "analyse": ("eval.speed.run", "speed of a step, losses of tokens and vocoder"),
    },
    "serve": {
        "demo": (
            "eval.demo.page",
            "a page that plays two methods side by side (needs the extra dcar[demo])",
        ),
        "export": ("rl.export", "policy directory and serving program from a DCPO run"),
    },
    "check": {
        "doctor": (
            "dcar.doctor",
            "this installation; with a folder, the digests of the files below it",
        ),
    },
}
COMMANDS = {name: entry for commands in TASKS.values() for name, entry in commands.items()}

# command -> (its setting that chooses among several jobs, value -> (module, what it does)); the
# first is the default
CHOICES = {
    "prepare": (
        "mode",
        {
            "corpus": COMMANDS["prepare"],
            "retokenize": (
                "dcar.prepare.retokenize",
                "a prepared corpus with the text tokens of a converted decoder",
            ),
            "join": (
                "dcar.prepare.join",
                "prepared corpora as one, with sentences joined, for long texts",
            ),
            "resynthesize": (
                "dcar.vocoder.resynthesize",
                "a prepared split through the vocoder: speech for a recogniser",
            ),
        },
    ),
    "analyse": (
        "what",
        {
            "speed": (COMMANDS["analyse"][0], "cost of a decoding step against its lower bound"),
            "vocoder": (
                "eval.analysis.vocoder_quality",
                "what tokens and vocoder lose of words and voices",
            ),
            "swap": (
                "eval.analysis.swap",
                "what speech loses where PCG's groups stand in for their tokens",
            ),
            "heads": (
                "eval.analysis.heads",
                "which head predicts a token best, and what the first layer attends to",
            ),
        },
    ),
}
# first words of a recipe's name -> its command
RECIPES = {
    "tokenizer": "fit-tokenizer",
    "prepare": "prepare",
    "car": "train",
    "finetune": "train",
    "draft": "train-draft",
    "distil": "distil",
    "chunk_scorer": "train-chunk-scorer",
    "vocoder": "train-vocoder",
    "profile": "profile",
    "dcpo": "train-policy",
    "token_recognizer": "train-recognizer",
    "residual": "train-residual",
    "verifiers": "fit-verifiers",
    "tune": "tune",
    "compare": "compare",
}


def jobs() -> dict[str, tuple[str, str]]:
    """Return every job as it is called, `prepare` or `prepare mode=retokenize` -> (module,
    description)."""
    found: dict[str, tuple[str, str]] = {}
    for name, entry in COMMANDS.items():
        key, values = CHOICES.get(name, ("", {"": entry}))
        found |= {
            f"{name} {key}={value}" if i else name: job
            for i, (value, job) in enumerate(values.items())
        }
    return found


def resolve(words: list[str]) -> tuple[str, str, list[str]]:
    """Return (job as it is called, its module, its arguments), given the words after `dcar`.
    Raises ConfigError for an unknown job."""
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"unknown command '{name}'{hint}")
    key, values = CHOICES.get(name, ("", {"": COMMANDS[name]}))
    chosen = [word for word in rest if key and word.removeprefix("--").startswith(f"{key}=")]
    if not chosen:
        return name, COMMANDS[name][0], rest
    value = chosen[-1].partition("=")[2]
    if value not in values:
        raise ConfigError(f"{name}: {key} must be one of {', '.join(values)}; not '{value}'")
    return f"{name} {key}={value}", values[value][0], [word for word in rest if word not in chosen]


def usage() -> str:
    """Return the commands by task, one line each."""
    lines = [
        "usage: dcar COMMAND [--config RECIPE] [key=value …]   (dcar COMMAND --help lists its "
        "settings)"
    ]
    for task, commands in TASKS.items():
        lines += ["", f"{task}:", *(f"  {name:18} {text}" for name, (_, text) in commands.items())]
    lines += [
        "",
        "  --recipes           recipes by command, for --config NAME or --config NAME:VARIANT",
        "  --version",
    ]
    return "\n".join(lines)


def recipes_text() -> str:
    """Return recipes and their variants by command, one line each."""
    lines = ["usage: dcar COMMAND --config NAME[:VARIANT] [key=value …]"]
    for kind, command in RECIPES.items():
        lines += ["", f"dcar {command}:"] if kind != "finetune" else []
        for r in (r for r in recipes.shipped() if kind_of(r.name) == kind):
            rows = {
                r.name: r.summary,
                **{f"  {r.name}:{variant}": text for variant, text in r.variants.items()},
            }
            for name, text in rows.items():
                left = f"  {name:34} "
                lines.append(left + textwrap.shorten(text, 120 - len(left), placeholder=" …"))
    return "\n".join(lines)


def kind_of(recipe: str) -> str:
    """Return the longest prefix of a recipe's name that is in RECIPES."""
    return max((kind for kind in RECIPES if recipe.startswith(f"{kind}_")), key=len)


def choices_text(name: str) -> str:
    """Return the part of --help on the jobs of a command that has several."""
    key, values = CHOICES.get(name, ("", {}))
    rows = [f"  {key}={value:13} {text}" for value, (_, text) in values.items()]
    return (
        "\n".join(
            [
                f"\nOne of several jobs, each with settings of its own (dcar {name} {key}=… "
                "--help):",
                *rows,
            ]
        )
        if rows
        else ""
    )


def call(arguments: list[str]) -> object:
    """Import the module of a command and run it. Return its exit status, or None."""
    first, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    shown = {
        "-h": usage,
        "--help": usage,
        "help": usage,
        "--recipes": recipes_text,
        "--version": lambda: f"dcar {version('dcar')}",
    }
    if first in shown:
        print(shown[first]())
        return 0
    try:
        job, module, rest = resolve(arguments)
    except ConfigError as error:
        print(f"dcar: {error}\n\n{usage()}", file=sys.stderr)
        return NO_COMMAND
    sys.argv = [f"dcar {job}", *rest]
    run = importlib.import_module(module).main
    try:
        return run(rest)
    except SystemExit:
        if {"-h", "--help"} & set(rest) and job in CHOICES:
            print(choices_text(job))
        raise


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit if its status is not 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"dcar {arguments[0]}" if arguments and arguments[0] in COMMANDS else "dcar"
    if status := run_command(name, lambda: call(arguments)):
        sys.exit(status)


if __name__ == "__main__":
    main()
