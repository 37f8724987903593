"""Work of the demo page without the page: text, voice and method in; speech, a picture and facts
out, within limits.

Anyone who reaches the page can send anything, so every limit is checked here and not in the
browser.
"""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dcar.audio import audio_seconds
from dcar.config import check, setting
from dcar.config.commands import DecoderSettings, VocoderSettings
from dcar.errors import AudioError, ConfigError, DCARError, TextError
from dcar.model.companions import load_policy
from dcar.model.precision import matched_policy
from dcar.speak.defaults import NUM_CANDIDATES, POLICY, SAMPLING, fixed_method
from dcar.speak.phrases import MAX_TEXT
from dcar.speak.speaker import Speaker, Spoken
from dcar.speak.voice import MAX_PROMPT_SECONDS, Voice, shipped_voice, starter_voices
from eval.methods.registry import Entry, Models, make_methods

POLICIES = (f"dcar@n{NUM_CANDIDATES}", "dcar", f"dcar@n{2 * NUM_CANDIDATES}", "dcar-sampled")
"""Uses of a policy; the first possible one is the page's default. @n: number of candidates."""
VERIFIERS = ("sd", "ssd-0.4", "pcg-0.42", "vadusa-2", "typical", "topk-verify-5", "entropy-1")
"""Methods that need only the heads of the decoder."""
TEMPERATURES = (0.0, 1.5)


@dataclass
class DemoConfig(VocoderSettings, DecoderSettings):
    """Settings of `dcar demo`."""

    decoder: str = "starter"
    far_decoder: str = setting(
        "starter", "Folder of a FAR decoder of the shipped tokens; empty = none."
    )
    policy: str = setting(POLICY, "Folder of an exported policy of the decoder; empty = none.")
    host: str = setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 admits everyone who can reach this machine."
    )
    port: int = setting(7860, "Port to listen on.", minimum=1, maximum=65535)
    characters: int = setting(600, "Maximum length of a text in characters.", minimum=1)
    megabytes: float = setting(10.0, "Maximum size of a recording of a voice.", above=0)

    def __post_init__(self) -> None:
        check(self)


class Studio:
    """Models that belong together, and the voices and methods that can be chosen."""

    def __init__(self, config: DemoConfig) -> None:
        """Load the models that the settings name. Raises AssetError, CheckpointError or
        DataError if something is missing or does not belong together."""
        self.config, self.voices = config, list(starter_voices())
        self._speakers = [
            Speaker.load(folder, vocoder=config.vocoder, method=method, dtype=config.dtype)
            for folder, method in ((config.decoder, "car-1"), (config.far_decoder, "far"))
            if folder
        ]
        decoder = self._speakers[0].decoder
        far = self._speakers[1].decoder if config.far_decoder else None
        policies = (
            {"": matched_policy(load_policy(config.policy), decoder)} if config.policy else {}
        )
        models = Models(decoder, far, policies)
        heads = decoder.config.num_prediction_heads
        sizes = [f"car-{k}" for k in range(1, heads + 1)]
        self._methods: dict[str, Entry] = {}
        for name in (*POLICIES, *sizes, "far", *VERIFIERS):
            # no policy or FAR decoder, no choice among candidates, or a single head
            with suppress(DCARError):
                (self._methods[name],) = make_methods([name], models)
        self.methods = list(self._methods)
        self.start = next(name for name in (*POLICIES, fixed_method(heads)) if name in self.methods)
        self._warm: set[str] = set()  # methods that have run
        self._lock = threading.Lock()

    def speak(
        self,
        text: str,
        voice: str = "",
        recording: str | Path | None = None,
        method: str = "",
        temperature: float = SAMPLING.temperature,
        seed: int = 0,
    ) -> tuple[Spoken, str]:
        """Speak a text by a method of `methods` (default `start`) with a shipped voice or that
        of a recording, one request at a time. Return the speech and a sentence of facts. Raises
        TextError, AudioError or ConfigError for input that is wrong or beyond the limits."""
        method, (low, high) = method or self.start, TEMPERATURES
        if len(text) > self.config.characters:
            raise TextError(
                f"the text has {len(text)} characters, but this page accepts at most "
                f"{self.config.characters}; shorten it, or use `dcar speak`, which accepts "
                f"{MAX_TEXT}"
            )
        if method not in self.methods:
            raise ConfigError(f"unknown method '{method[:40]}'; choose {', '.join(self.methods)}")
        if not low <= temperature <= high:
            raise ConfigError(f"temperature {temperature:g} must be between {low:g} and {high:g}")
        speaker = self._speakers[-1 if method == "far" else 0].using(
            method=self._methods[method].method, temperature=float(temperature), seed=seed
        )
        with self._lock:
            prompt = self._voice(speaker, voice, recording)
            if method not in self._warm:  # compiling and allocating do not count as its time
                speaker.generate("One, two, three.", prompt)
                self._warm.add(method)
            started = time.perf_counter()
            spoken = speaker.generate(text, prompt)
            return spoken, facts(spoken, method, time.perf_counter() - started)

    def _voice(self, speaker: Speaker, name: str, recording: str | Path | None) -> Voice:
        if recording is None:
            return shipped_voice(name, speaker.tokenizer)
        path = Path(recording)
        # `speaker.voice` refuses a missing file
        size = path.stat().st_size / 1e6 if path.is_file() else 0.0
        for value, most, unit in (
            (size, self.config.megabytes, "MB"),
            (audio_seconds(path) or 0.0, MAX_PROMPT_SECONDS, "s"),
        ):
            if value > most:
                raise AudioError(
                    f"the recording has {value:.1f} {unit}, but this page accepts at most "
                    f"{most:g} {unit}; shorten it, a few seconds of one voice are enough"
                )
        return speaker.voice(path)


def chunk_spans(spoken: Spoken) -> list[tuple[float, float, int]]:
    """Return start and end in seconds, and tokens, of every chunk; the pauses between phrases
    belong to none."""
    spans, at = [], 0.0
    for chunks, pause in zip(spoken.chunks, spoken.pauses, strict=True):
        for tokens in chunks:
            spans.append((at, at + tokens / spoken.token_rate, tokens))
            at = spans[-1][1]
        at += pause
    return spans


def facts(spoken: Spoken, method: str, seconds: float) -> str:
    """Return a sentence on what was generated, and how fast."""
    tokens = sum(len(r.tokens) for r in spoken.results)
    passes = sum(r.passes for r in spoken.results)
    cut = " Cut off by the length limit." if any(r.truncated for r in spoken.results) else ""
    return (
        f"{method}: {spoken.seconds:.2f} s of speech in {seconds:.2f} s end to end (RTF "
        f"{seconds / spoken.seconds:.2f}); {tokens} tokens in {passes} passes, "
        f"{tokens / passes:.2f} per pass.{cut}"
    )
