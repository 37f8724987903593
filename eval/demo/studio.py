"""What the page does, without the page: text, voice and method in; speech, a picture and facts out, within limits.

Whoever reaches the page can send anything, so every limit is checked here and not in the browser.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcar.audio import audio_seconds
from dcar.config import check, setting
from dcar.errors import AudioError, ConfigError, DCARError, TextError
from dcar.model.companions import text_encoder
from dcar.prepare.prepared import load_prepared
from dcar.prompts.together import check_together, made_by
from dcar.sources.shipped import shipped
from dcar.speak.defaults import NUM_CANDIDATES, POLICY, SAMPLING, fixed_method
from dcar.speak.phrases import MAX_TEXT
from dcar.speak.speaker import Speaker, Spoken, make_method
from dcar.speak.voice import MAX_PROMPT_SECONDS, Voice, starter_voices
from dcar.text.inventory import PHONEME_VERSION
from dcar.tokens.alignment import ENOUGH, PhonemeAligner
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.load import load_tokenizer
from dcar.vocoder.base import Vocoder
from dcar.vocoder.load import load_vocoder
from eval.methods.registry import Models, load_models, make_methods, turned
from eval.report.listen import spectrum_picture

VERIFIERS = ("sd", "ssd-0.4", "pcg-0.42", "vadusa-2", "typical", "topk-verify-5", "entropy-1")
"""Rivals that need no more than the heads of the decoder."""
POLICIES = ("dcar", f"dcar@n{NUM_CANDIDATES}", f"dcar@n{2 * NUM_CANDIDATES}", "dcar-sampled")
"""Uses of a policy; behind @n, chunks that it chooses among, where it can."""
TEMPERATURES = (0.0, 1.5)
DIALS = (-2.0, 2.0)
WARM_UP = "One, two, three."
"""What a method speaks once, before it is timed."""


@dataclass
class DemoConfig:
    """Settings of `dcar demo`."""

    decoder: str = setting("starter", "Directory of a decoder.")
    far_decoder: str = setting("starter", "Directory of a FAR decoder of the same tokens; empty = none.")
    policy: str = setting(POLICY, "Directory of an exported policy of the decoder; empty = none.")
    tokenizer: str = setting("starter", "Folder, or a name that dcar.tokens.load lists.")
    vocoder: str = setting("starter", "Folder of this project's own vocoder.")
    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 lets everyone in who can reach this machine.")
    port: int = setting(7860, "Port to listen on.", minimum=1, maximum=65535)
    characters: int = setting(600, "Longest text that is spoken.", minimum=1)
    seconds: float = setting(float(MAX_PROMPT_SECONDS), "Longest recording of a voice.", above=1,
                             maximum=MAX_PROMPT_SECONDS)
    megabytes: float = setting(10.0, "Largest recording of a voice.", above=0)
    votes: str = setting("runs/votes", "Folder that takes the blind votes (votes.jsonl).", place="folder")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Take:
    """What was spoken: the speech, and what to say of it."""

    spoken: Spoken
    facts: str


class Studio:
    """Models that belong together, and the voices and methods that can be chosen."""

    def __init__(self, models: Models, encode, tokenizer: SpeechTokenizer, vocoder: Vocoder,
                 voices: Mapping[str, Voice], config: DemoConfig, aligner: PhonemeAligner | None = None) -> None:
        """encode: text → ids that the decoders read; voices: by the name that is shown; config: of its limits; aligner:
        for phonemes in the pictures."""
        self.models, self.voices, self.config = models, dict(voices), config
        self.aligner, self.methods = aligner, self._methods()
        decoders = [models.decoder, *([models.far_decoder] if models.far_decoder else [])]
        self._speakers = [Speaker(decoder, encode, make_method("car-1", "", decoder), tokenizer, vocoder, SAMPLING)
                          for decoder in decoders]
        self._warm: set[str] = set()  # methods that have spoken: their engines and kernels are made
        self._lock = threading.Lock()

    @classmethod
    def load(cls, config: DemoConfig) -> Studio:
        """What the settings name. AssetError, CheckpointError or DataError where something is missing or does not
        belong together."""
        models = load_models(config.decoder, config.far_decoder, [config.policy] if config.policy else [])
        encode, tokenizer = text_encoder(config.decoder), load_tokenizer(config.tokenizer)
        vocoder = load_vocoder(config.vocoder)
        made = made_by(tokenizer, getattr(encode, "name", PHONEME_VERSION))
        check_together(models.decoder, made, f"tokenizer {config.tokenizer}", vocoder)
        aligner = None
        if config.tokenizer == "starter":  # lays texts along its tokens, as the shipped corpus teaches it
            rows = load_prepared(shipped("prepared"), "test").select(range(ENOUGH))
            aligner = PhonemeAligner.fit(rows["speech"], rows["text"], tokenizer.vocab_size)
        return cls(models, encode, tokenizer, vocoder, starter_voices(), config, aligner)

    def _methods(self) -> list[str]:
        """The names that these models can speak with, the policy first."""
        heads = self.models.decoder.config.num_prediction_heads
        return [*(name for name in POLICIES if self._can(name)), *(f"car-{k}" for k in range(1, heads + 1)),
                *(["far"] if self.models.far_decoder else []), *(name for name in VERIFIERS if self._can(name))]

    def _can(self, method: str) -> bool:
        try:
            make_methods([method], self.models)
        except DCARError:  # no policy, or one that cannot choose among candidates; a decoder with one head
            return False
        return True

    @property
    def start(self) -> str:
        """The policy, choosing among candidates where it can; else a fixed size, as in `dcar speak`."""
        fixed = fixed_method(self.models.decoder.config.num_prediction_heads)
        return next(m for m in (f"dcar@n{NUM_CANDIDATES}", "dcar", fixed) if m in self.methods)

    def speak(self, text: str, voice: str = "", recording: str | Path | None = None, method: str = "",
              temperature: float = SAMPLING.temperature, seed: int = 0) -> Take:
        """Speak a text with a voice of `voices`, or with that of a recording (a file), which goes first.

        method: of `methods`, with a dial behind it if wished (`with_dial`), by default `start`. TextError, AudioError,
        ConfigError for what is wrong or beyond the limits; DistributionError of a broken model. One request at a time.
        """
        method = method or self.start
        undialled = self._check(text, method, temperature)
        speaker = self._speaker(method, float(temperature), seed)
        with self._lock:
            chosen = self._voice(speaker, voice, recording)
            self.warm_up(undialled)
            started = time.perf_counter()
            spoken = speaker.generate(text, chosen)
            seconds = time.perf_counter() - started
        return Take(spoken, facts(spoken, method, seconds))

    def warm_up(self, method: str) -> None:
        """Have a method of `methods` speak once, unless it has: it compiles and allocates, which no time
        that is shown should hold."""
        if method not in self._warm:
            self._speaker(method, SAMPLING.temperature, 0).generate(WARM_UP, next(iter(self.voices.values())))
            self._warm.add(method)

    def _speaker(self, method: str, temperature: float, seed: int) -> Speaker:
        (entry,) = make_methods([method], self.models)
        return self._speakers[-1 if entry.decoder is self.models.far_decoder else 0].using(
            method=entry.build(), temperature=temperature, seed=seed)

    def picture(self, spoken: Spoken) -> np.ndarray:
        """[height, width, 3] uint8: spectrogram, phonemes where an aligner can tell them, and a block for every
        chunk."""
        return spectrum_picture(spoken.wave, spoken.rate, chunk_spans(spoken), phoneme_spans(spoken, self.aligner),
                                width=7.5)

    def _check(self, text: str, method: str, temperature: float) -> str:
        """The method without its dial; the errors of `speak`."""
        if len(text) > self.config.characters:
            raise TextError(f"the text has {len(text)} characters, this page speaks {self.config.characters} at most; "
                            f"shorten it, or use `dcar speak`, which speaks {MAX_TEXT}")
        dial = turned(method)["dial"] if method.startswith("dcar") else None  # others have none: with_dial
        undialled = method.removesuffix(f"@d{dial}") if dial else method
        if len(method) > 40 or undialled not in self.methods:
            raise ConfigError(f"unknown method '{method[:40]}'; choose {', '.join(self.methods)}")
        if dial and not DIALS[0] <= float(dial) <= DIALS[1]:
            raise ConfigError(f"dial {dial} must be between {DIALS[0]:g} and {DIALS[1]:g}")
        low, high = TEMPERATURES
        if not low <= temperature <= high:
            raise ConfigError(f"temperature {temperature:g} must be between {low:g} and {high:g}")
        return undialled

    def _voice(self, speaker: Speaker, name: str, recording: str | Path | None) -> Voice:
        if recording is None:
            name = name or next(iter(self.voices))
            if name not in self.voices:
                raise ConfigError(f"unknown voice '{name[:40]}'; choose {', '.join(self.voices)}")
            return self.voices[name]
        path = Path(recording)
        size = path.stat().st_size / 1e6 if path.is_file() else 0.0  # a missing one is refused where it is read
        if size > self.config.megabytes:
            raise AudioError(f"the recording has {size:.1f} MB, this page takes {self.config.megabytes:g} at most; "
                             "cut it, a few seconds of one voice are enough")
        if (seconds := audio_seconds(path) or 0.0) > self.config.seconds:
            raise AudioError(f"the recording lasts {seconds:.0f} s, this page takes {self.config.seconds:g} at most; "
                             "cut it, a few seconds of one voice are enough")
        return speaker.voice(path)


def chunk_spans(spoken: Spoken) -> list[tuple[float, float, int]]:
    """Start and end in seconds, and tokens, of every chunk in the wave; the pauses between phrases have none."""
    spans, at = [], 0.0
    for chunks, pause in zip(spoken.chunks, spoken.pauses, strict=True):
        for tokens in chunks:
            spans.append((at, at + tokens / spoken.token_rate, tokens))
            at = spans[-1][1]
        at += pause
    return spans


def phoneme_spans(spoken: Spoken, aligner: PhonemeAligner | None) -> list[tuple[float, float, str]]:
    """Start and end in seconds of every phoneme; none without an aligner."""
    spans, at = [], 0.0
    for phrase, result, pause in zip(spoken.phrases, spoken.results, spoken.pauses, strict=True):
        for span in aligner.align(result.tokens, phrase) if aligner else ():
            spans.append((at + span.start / spoken.token_rate, at + span.end / spoken.token_rate, span.phoneme))
        at += len(result.tokens) / spoken.token_rate + pause
    return spans


@contextmanager
def shown(failure: Callable[[str], Exception], recording: str | None = None) -> Iterator[None]:
    """An error that a user can act on becomes what the page shows (`failure` makes it): a recording is called by the
    name that the user knows, not by where it is kept."""
    try:
        yield
    except DCARError as error:
        said = str(error)
        raise failure(said.replace(recording, Path(recording).name) if recording else said) from error


def with_dial(method: str, dial: float) -> str:
    """The method with its policy turned, as a comparison calls it: dcar@n4@d0.5. Others have no dial: as they are."""
    return f"{method}@d{dial:g}" if dial and method.startswith("dcar") else method


def sound(spoken: Spoken) -> tuple[int, np.ndarray]:
    """What an audio element of the page plays: rate in Hz, samples [n] int16."""
    return spoken.rate, (np.clip(spoken.wave, -1.0, 1.0) * 32767).astype(np.int16)


def facts(spoken: Spoken, method: str, seconds: float) -> str:
    """What was spoken and at which speed, a sentence or two."""
    tokens = sum(len(r.tokens) for r in spoken.results)
    passes = sum(r.target_passes for r in spoken.results)
    cut = " Cut off by the length limit." if any(r.truncated for r in spoken.results) else ""
    return (f"{method}: {spoken.seconds:.2f} s of speech in {seconds:.2f} s end to end (RTF "
            f"{seconds / spoken.seconds:.2f}); {tokens} tokens in {passes} passes, {tokens / passes:.2f} a pass.{cut}")
