"""Settings of a comparison."""

from dataclasses import dataclass
from typing import Any

from dcar.config import check, setting
from dcar.config.commands import (
    DecoderSettings,
    PromptSettings,
    RunSettings,
    SpeechSettings,
    WaitSettings,
)
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.methods import read_methods
from dcar.prompts.texts import SPLIT, name_and_limit
from dcar.sampling import SamplingConfig


@dataclass
class CompareConfig(RunSettings, WaitSettings, SpeechSettings, DecoderSettings, PromptSettings):
    """Settings of a comparison."""

    out: str = "runs/compare"
    texts: list[str] = setting(
        [SPLIT],
        "Sets of texts, each with its own rows and tests; NAME:N = N texts of it. split = the "
        "sentences of the split. Texts without recordings are synthesised with the prompts of the "
        "split in turn: hard, short, thousand = the shipped ones, else a file with one text per "
        "line. The first set is used for references, audio and pictures.",
    )
    language: str = setting(
        "",
        "Language of the texts without recordings, a code of ISO 639; empty = the only one that "
        "the decoder, or the corpus, has.",
    )
    far_decoder: str | None = setting(None, "FAR checkpoint (one head); needed by method far.")
    policies: list[str] = setting([], "Policy folders, as name=folder if there are several.")
    decoders: list[str] = setting(
        [], "Further decoders, as name=folder, for methods such as car-12:name."
    )
    draft: str | None = setting(None, "Draft model of this decoder, for sd, ssd and pcg.")
    statistics: str | None = setting(
        None, "Measured statistics that some methods need (docs/methods.md)."
    )
    methods: list[str | dict[str, Any]] = setting(
        ["car-1", "car-2", "car-3"],
        "Method names from docs/methods.md, or mappings such as {method: ssd, beta: 0.4}; "
        '"ssd-{0,0.4}" is a sweep, car-5@t0.4 has its own sampling.',
    )
    tuned: str | None = setting(
        None, "tuned.json of `dcar tune`: adds a row for each method at its own best sampling."
    )
    seeds: list[int] = seed_setting(
        [0], "Sampling seeds; every utterance is decoded once with each."
    )
    prompt_seeds: list[int] = seed_setting(
        [0],
        "Seeds of the choice of prompts, the same for all methods; several = replicates. The "
        "first one is used for references, audio and timings.",
    )
    scorers: list[str] = setting(
        ["resemblyzer"],
        "Columns of similarity to the voice of the prompt (resemblyzer, wavlm:…, eres2net:…) and "
        "of quality (utmos:…, dnsmos, …), see eval/scorers/load.py.",
    )
    timing_utterances: int = setting(
        10, "Utterances timed at batch 1 for every method; 0 = no timings.", minimum=0
    )
    audio_utterances: int = setting(4, "Utterances whose audio is kept for the report.", minimum=0)
    references: bool = setting(True, "Rows for the recordings and their resynthesis.")
    resamples: int = setting(4000, "Number of bootstrap resamples.", minimum=100)
    threads: int = setting(
        0,
        "Torch threads per process; 0 = one for decoders below 100 M parameters, otherwise the "
        "idle cores.",
        minimum=0,
    )
    training_logs: list[str] = setting(
        [], "log.jsonl of DCPO runs, for the training curves in the report."
    )
    report: bool = setting(True, "Write report.html.")
    sampling: SamplingConfig = setting(
        SamplingConfig,
        "Sampling of methods that do not have their own.",
        bare=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if not (self.methods and self.texts and self.seeds and self.prompt_seeds):
            raise ConfigError(
                "methods, texts, seeds and prompt_seeds: a comparison needs at least one of each"
            )
        for name in ("seeds", "prompt_seeds", "scorers"):
            if len(set(values := getattr(self, name))) != len(values):
                raise ConfigError(f"{name} must differ: {values}")
        if len(self.limits) != len(self.texts):
            raise ConfigError(f"texts must differ: {self.texts}")
        read_methods(self.methods)  # raises for an unknown method before anything is loaded

    @property
    def limits(self) -> dict[str, int]:
        """Number of texts of every set by its name; 0 = all."""
        return dict(map(name_and_limit, self.texts))
