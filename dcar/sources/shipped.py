"""Assets that ship inside the package: the starter corpus and the models trained on it."""

from pathlib import Path

from dcar.errors import AssetError, ConfigError

ASSETS = Path(__file__).parents[1] / "assets"
NAMES = {
    "corpus": "starter_corpus",  # half an hour of speech, parquet with Ogg Opus
    "prepared": "starter_prepared",  # the tokens of six hours, written by `dcar prepare`
    "voices": "voices.safetensors",  # prompts and features of its voices, for `dcar speak`
    # texts without recordings that are hard to speak; nothing is tuned on them
    "hard_texts": "hard_texts.tsv",
    "short_texts": "short_texts.tsv",  # texts of one to four words, likewise
    "thousand_texts": "thousand_texts.tsv",  # sentences of five kinds, likewise
    "tokenizer": "tokenizer",
    "vocoder": "vocoder",
    "decoder": "decoder",  # CAR, 16 tokens from one light head
    "decoder-undistilled": "decoder_undistilled",  # the same, trained on recordings alone
    "far": "far",  # next-token decoder, trained alike with one head
    "far-undistilled": "far_undistilled",
    # chunk policies for the decoder, for these temperatures
    "policy-t1.0": "policy_t1.0",
    "policy-t0.4": "policy_t0.4",
    "chunk_scorer": "chunk_scorer",  # joint score of a chunk's tokens; the policy holds the same
    "recognizer": "recognizer",  # reward ASR
    "token_recognizer": "token_recognizer",  # the same of the speech tokens, without sound
}


def shipped(name: str) -> Path:
    """Return the path of a shipped asset. Raises AssetError if this installation lacks it."""
    path = ASSETS / NAMES[name]
    if not path.exists():
        raise AssetError(
            f"{path}: the shipped {name} is missing; install the project again from a complete "
            "checkout"
        )
    return path


def resolve(path_or_starter: str, name: str) -> Path:
    """Return a path as given, or that of the shipped asset for "starter". Policies ship for two
    temperatures: "starter-t1.0", "starter-t0.4". Raises ConfigError for one without it."""
    starter, _, variant = path_or_starter.partition("-")
    key = f"{name}-{variant}" if variant else name
    if starter != "starter" or (variant and key not in NAMES):
        return Path(path_or_starter)
    if key not in NAMES:
        choices = [known for known in NAMES if known.startswith(f"{name}-")]
        raise ConfigError(
            f"a {name} ships for each of several temperatures: write "
            f"{' or '.join(known.replace(name, 'starter', 1) for known in choices)}"
        )
    return shipped(key)
