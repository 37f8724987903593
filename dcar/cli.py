"""`dcar` command: every job of the project under one name. The same code runs as `accelerate
launch -m …`."""

import difflib
import importlib
import sys
import textwrap
from importlib.metadata import version

from dcar.config import recipes
from dcar.errors import ConfigError
from dcar.process import run_command
from dcar.sources.packages import check_extra, check_module

NO_COMMAND = 2  # exit status, the one of argparse

# task -> command -> (module with main(arguments), description). The modules of rl, eval and launch
# are named, not imported: only this table refers from a lower layer to the upper ones.
TASKS = {
    "make data": {
        "fit-tokenizer": ("dcar.tokens.fit", "fit a k-means speech tokenizer to a corpus"),
        "prepare": (
            "dcar.prepare.run",
            "turn a corpus into validated text and speech tokens (validate=true only reports)",
        ),
    },
    "train": {
        "train": ("dcar.train.car", "stage one: train a CAR decoder with K heads, or FAR with one"),
        "distil": (
            "launch.distil",
            "make a corpus from a decoder's own output, the best of several per sentence",
        ),
        "train-draft": (
            "dcar.train.draft",
            "train a shallow draft model made of a decoder's own layers",
        ),
        "train-chunk-scorer": (
            "dcar.train.chunk_scorer",
            "train a joint score of the tokens of a chunk, a feature for policies",
        ),
        "profile": (
            "eval.compare.profile",
            "measure the WER of CAR-1 … CAR-K and choose the guidance range",
        ),
        "train-policy": ("rl.train", "stage two: train a chunk policy with DCPO"),
        "train-recognizer": (
            "dcar.train.token_recognizer",
            "train a recogniser of phonemes in speech tokens, for rewards",
        ),
        "train-residual": (
            "dcar.train.residual",
            "train a model that predicts a codec's further layers from its first, for a vocoder",
        ),
        "train-vocoder": (
            "dcar.vocoder.training.train",
            "train a vocoder: waveform from tokens and a voice",
        ),
        "convert-backbone": (
            "dcar.model.backbones.convert",
            "convert CosyVoice 2, LLaSA or another language model to a decoder",
        ),
    },
    "speak": {"speak": ("dcar.speak.speak", "synthesise speech from text and a prompt voice")},
    "evaluate": {
        "tune": (
            "eval.compare.tune",
            "choose each method's best sampling on development sentences (tuned.json)",
        ),
        "compare": (
            "eval.compare.run",
            "compare methods on the same utterances: WER, similarity, speed",
        ),
        "report": (
            "eval.report.page",
            "write one HTML page of a comparison with tables, plots and audio",
        ),
        "score": (
            "eval.analysis.score",
            "score any audio with its text: WER, similarity to a prompt, quality",
        ),
        "fit-verifiers": (
            "eval.analysis.fit_verifiers",
            "measure a decoder's statistics for verifiers: ranks, transitions",
        ),
        "analyse": (
            "eval.speed.run",
            "measure the speed of a step, or the losses of tokens and vocoder",
        ),
    },
    "serve": {
        "export": ("rl.export", "export a policy directory and a serving program from a DCPO run"),
    },
    "check": {
        "doctor": (
            "dcar.doctor",
            "check this installation, or the digests of the files in a folder",
        )
    },
}
EXTRAS = {"make data": "train", "train": "train", "evaluate": "report"}
"""Extra of this project (pyproject.toml) that the commands of a task need."""
COMMANDS = {name: entry for commands in TASKS.values() for name, entry in commands.items()}

# command -> (setting that chooses among several jobs, value -> (module, description)); the first
# value is the default
CHOICES = {
    "prepare": (
        "mode",
        {
            "corpus": COMMANDS["prepare"],
            "retokenize": (
                "dcar.prepare.retokenize",
                "replace the text tokens of a prepared corpus by those of a converted decoder",
            ),
            "join": ("dcar.prepare.join", "join prepared corpora, and sentences into longer texts"),
            "resynthesize": (
                "dcar.vocoder.resynthesize",
                "resynthesise a prepared split with the vocoder, to train a recogniser",
            ),
        },
    ),
    "analyse": (
        "what",
        {
            "speed": (
                COMMANDS["analyse"][0],
                "compare the time of a decoding step with its lower bound",
            ),
            "vocoder": (
                "eval.analysis.vocoder_quality",
                "measure the loss of words and voices through tokens and vocoder",
            ),
            "swap": (
                "eval.compare.swap",
                "measure the loss of speech if tokens are swapped within PCG's groups",
            ),
            "heads": (
                "eval.analysis.heads",
                "find the head that predicts a token best, and what the first layer attends to",
            ),
        },
    ),
}
# prefix of a recipe's name -> its command
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
    """Return every job by its command line, `prepare` or `prepare mode=retokenize` -> (module,
    description)."""
    commands: dict[str, tuple[str, str]] = {}
    for name, entry in COMMANDS.items():
        key, values = CHOICES.get(name, ("", {"": entry}))
        (_, commands[name]), *others = values.items()
        for value, job in others:
            commands[f"{name} {key}={value}"] = job
    return commands


def resolve(words: list[str]) -> tuple[str, str, list[str]]:
    """Return (command line of the job, its module, its arguments), given the words after `dcar`.
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
        raise ConfigError(f"{name}: {key} must be one of {', '.join(values)}, not '{value}'")
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
        "  --recipes           list recipes by command, for --config NAME or --config NAME:VARIANT",
        "  --version           print the version",
    ]
    return "\n".join(lines)


def recipes_text() -> str:
    """Return recipes and their variants by command, one line each."""
    lines = ["usage: dcar COMMAND --config NAME[:VARIANT] [key=value …]"]
    for kind, command in RECIPES.items():
        if kind != "finetune":  # listed with those of `car`
            lines += ["", f"dcar {command}:"]
        for recipe in recipes.shipped():
            if kind_of(recipe.name) != kind:
                continue
            rows = {recipe.name: recipe.summary}
            for variant, text in recipe.variants.items():
                rows[f"  {recipe.name}:{variant}"] = text
            for name, text in rows.items():
                left = f"  {name:34} "
                lines.append(left + textwrap.shorten(text, 120 - len(left), placeholder=" …"))
    return "\n".join(lines)


def kind_of(recipe: str) -> str:
    """Return the longest prefix of a recipe's name that is in RECIPES."""
    return max((kind for kind in RECIPES if recipe.startswith(f"{kind}_")), key=len)


def choices_text(name: str) -> str:
    """Return the part of --help that lists the jobs of a command with several; empty for other
    commands."""
    key, values = CHOICES.get(name, ("", {}))
    if not values:
        return ""
    title = (
        f"\nThe command has several jobs, each with its own settings (dcar {name} {key}=… --help):"
    )
    rows = [f"  {key}={value:13} {text}" for value, (_, text) in values.items()]
    return "\n".join([title, *rows])


def needed_extra(command: str) -> str:
    """Return the extra without which a command cannot run, or nothing."""
    if command == "score":
        return "judge"
    return next((EXTRAS.get(task, "") for task, of in TASKS.items() if command in of), "")


def call(arguments: list[str]) -> object:
    """Import the module of a command, run it, and return its exit status or None."""
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
    if extra := needed_extra(first):
        check_extra(extra, f"dcar {job}")
    try:
        return importlib.import_module(module).main(rest)
    except ModuleNotFoundError as error:
        check_module(error.name or "", f"dcar {job}")
        raise
    except SystemExit:
        if {"-h", "--help"} & set(rest) and job in CHOICES:
            print(choices_text(job))
        raise


def main(arguments: list[str] | None = None) -> None:
    """Run a command, and exit if its status is not 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"dcar {arguments[0]}" if arguments and arguments[0] in COMMANDS else "dcar"
    if status := run_command(name, lambda: call(arguments)):
        sys.exit(status)


if __name__ == "__main__":
    main()
