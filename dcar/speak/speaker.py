"""`Speaker`: text to a waveform with a decoder, policy, tokenizer and vocoder, whole or
streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from dcar.audio import save_audio
from dcar.config.schema import check_seed
from dcar.decoding import DecodeResult, Engine, Method, PolicyChunk, Prompt
from dcar.decoding.declare import has_setting
from dcar.decoding.readers import reader_of
from dcar.errors import ConfigError
from dcar.methods.names import MethodSpec
from dcar.model.companions import language_for, load_policy, note_temperature, text_units
from dcar.model.draft import AnyDecoder
from dcar.model.load import Shipped, load_decoder
from dcar.model.models import Borrowed, Models
from dcar.process import SMALL, cores, own_device
from dcar.prompts.together import check_together, made_by
from dcar.sampling import SamplingConfig
from dcar.speak.defaults import DIALS, NUM_CANDIDATES, POLICY, SAMPLING, fixed_method
from dcar.speak.phrases import Phrase, note_what_is_not_read, phrases
from dcar.speak.stream import EVERY, Piece, in_one_thread, stream_audio
from dcar.speak.voice import Voice, find_voice, shipped_voice
from dcar.text.base import TextUnits
from dcar.text.languages import language_of
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.load import load_tokenizer
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import load_vocoder
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.voicing import synthesize
from heads.policy import ChunkPolicy

Policy = str | Path | ChunkPolicy
AnyMethod = str | Method
PHRASES_AT_ONCE = 16  # decoded and synthesised before their audio is returned
CACHED_ENGINES = 2  # of two methods, for comparisons


@dataclass(frozen=True)
class Spoken:
    """Waveform, and how each of its phrases was decoded."""

    audio: np.ndarray  # [samples] float32, pauses included
    sample_rate: int
    phrases: list[str]  # in spoken form
    results: list[DecodeResult]  # one a phrase
    token_rate: float  # speech tokens a second
    pauses: list[float]  # seconds of silence after each phrase

    @property
    def seconds(self) -> float:
        return len(self.audio) / self.sample_rate

    @property
    def tokens(self) -> list[list[int]]:
        """Speech tokens of every phrase."""
        return [list(result.tokens) for result in self.results]

    @property
    def chunks(self) -> list[list[int]]:
        """Number of tokens from each pass, in order, for every phrase."""
        return [[n for n in result.emitted if n] for result in self.results]

    def save(self, path: str | Path) -> None:
        """Write an audio file; the suffix selects the format. Raises AudioError if it is
        unknown."""
        save_audio(path, self.audio, self.sample_rate)

    def timeline(self) -> str:
        """Return every phrase with its chunks, as text."""
        return timeline_of(self.phrases, self.results, self.token_rate)


class Speaker:
    """Text-to-speech with a decoder, policy, tokenizer and vocoder that belong together.

    model = dcar.load("starter")                          # or "runs/car", policy="runs/policy"
    model.generate("The tide came in.", voice="voice.wav").save("out.wav")
    model.generate("Longer chunks.", dial=0.5, temperature=0.3, seed=1)
    for piece in model.stream("The tide came in."):       # samples as they become available
        play(piece.samples, piece.rate)
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        units: TextUnits,
        method: Method,
        tokenizer: SpeechTokenizer,
        vocoder: Vocoder,
        sampling: SamplingConfig,
        seed: int = 0,
        recordings: PromptAudio | None = None,
    ) -> None:
        """Combine loaded models. units: in which the decoder reads text. recordings: audio of
        voices, for vocoders that read prompts."""
        self.decoder, self.units, self.method = decoder, units, method
        self.tokenizer, self.vocoder, self.sampling, self.seed = tokenizer, vocoder, sampling, seed
        self._recordings = PromptAudio([]) if recordings is None else recordings
        self.language = ""  # of the texts; "" = the only one that the decoder speaks
        self._policy: Policy = POLICY
        self._engines: dict[Hashable, Engine] = {}  # idle ones for the next texts; shared by copies
        self._load_far: Callable[[], AnyDecoder] | None = None  # None: the decoder itself

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engines": {}}  # buffers and graphs stay with the process

    @classmethod
    def load(
        cls,
        decoder: str | Path = "starter",
        *,
        policy: Policy = POLICY,
        tokenizer: str | Path = "starter",
        vocoder: str | Path = "starter",
        method: AnyMethod = "",
        sampling: SamplingConfig = SAMPLING,
        seed: int = 0,
        dial: float = 0.0,
        num_candidates: int = 0,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> Speaker:
        """Load each model by folder, or "starter" for the shipped one (of policies
        "starter-t1.0" and "starter-t0.4", for these temperatures); tokenizer and vocoder also by
        the names of `dcar.tokens.load` and `dcar.vocoder.load`.

        method: a name of docs/methods.md (dcar, car-K, sd, …; far with "starter" is the shipped FAR
        decoder); a chunk rule of your own (`dcar.ChunkRule`) or any other `Method`; "" = dcar if a
        policy, dial or number of candidates is given, or the shipped policy was trained for the
        decoder, else `fixed_method`. dial: of the policy, above 0 for longer chunks and less time,
        below for shorter ones (`PolicyChunk`). num_candidates: number of candidates for the policy;
        0 = `NUM_CANDIDATES` if it can choose among them, else 1. dtype: type of the decoder's
        weights (`dcar.model.precision`). device: cpu, cuda, or auto = a GPU if there is one. Raises
        AssetError, CheckpointError, ConfigError or DataError if something is missing or does not
        belong together.
        """
        check_seed(seed)
        device = own_device(device)
        asked = policy != POLICY or dial or num_candidates
        which: Shipped = "far" if method == "far" else "decoder"
        speech_tokenizer = load_tokenizer(str(tokenizer), device)
        car = load_decoder(decoder, device, starter=which, dtype=dtype)
        units = text_units(decoder, which)
        if not method:
            method = (
                "dcar"
                if asked or shipped_policy_fits(car)
                else fixed_method(car.config.num_prediction_heads)
            )
        origin = made_by(speech_tokenizer, units)
        recordings = PromptAudio([])
        spoken_by = load_vocoder(str(vocoder), device, prompts=recordings)
        chunks = make_method(method, policy, car, dial, num_candidates)
        check_together(car, origin, f"tokenizer {tokenizer}", spoken_by)
        speaker = cls(car, units, chunks, speech_tokenizer, spoken_by, sampling, seed, recordings)
        speaker._policy = policy
        speaker._note_policy()
        if str(decoder) == "starter":
            speaker._load_far = partial(load_decoder, decoder, device, starter="far", dtype=dtype)
        return speaker

    def using(
        self,
        *,
        policy: Policy | None = None,
        method: AnyMethod = "",
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        num_candidates: int = 0,
        dial: float = 0.0,
        language: str = "",
    ) -> Speaker:
        """Return a speaker with the same models and other settings. language: of the texts, a code
        of ISO 639, for a decoder that speaks several. A policy, a dial or a number
        of candidates implies method dcar. Raises ConfigError or CheckpointError for a
        combination that does not fit."""
        if seed is not None:
            check_seed(seed)
        other = copy(self)
        other._engines = self._engines
        other.language = language or self.language
        policy = self._policy if policy is None else policy
        if policy is not self._policy or dial or num_candidates:
            method = method or "dcar"
        if method:
            if method == "far" and self._load_far is not None:
                other.decoder = self._load_far()
            other.method = make_method(method, policy, other.decoder, dial, num_candidates)
        settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k}
        changed = {name: value for name, value in settings.items() if value is not None}
        other.sampling = replace(self.sampling, **changed)
        other.seed = self.seed if seed is None else seed
        other._policy = policy
        other._note_policy()
        return other

    def _note_policy(self) -> None:
        if isinstance(self.method, PolicyChunk) and isinstance(self._policy, str | Path):
            note_temperature(self._policy, self.sampling.temperature)

    def generate(
        self, text: str, voice: str | Path | Voice | None = None, **settings: Any
    ) -> Spoken:
        """Speak a text with a `voice`: a recording of a second or more, or the name of
        a shipped voice; None = the first shipped one.

        Sentences are decoded one by one, long ones clause by clause. settings: policy
        ("starter-t1.0", a folder or a `ChunkPolicy`), method, temperature, top_k, seed,
        num_candidates, dial, language, as in `using`. Raises TextError, AudioError, DataError;
        DistributionError for a broken model.
        """
        model = self.using(**settings)
        return model.join(text, list(model.sentences(text, voice)))

    def voice(self, name: str | Path | Voice | None) -> Voice:
        """Return the voice for a `voice` of `generate`, which also accepts the result, so that
        a recording is read once. Raises AudioError if the recording cannot be used, ConfigError
        for an unknown name."""
        if name is None:
            voice = shipped_voice("", self.tokenizer)
        else:
            voice = name if isinstance(name, Voice) else find_voice(name, self.tokenizer)
        if voice.recording is not None:
            self._recordings.add(voice.features, voice.recording)
        return voice

    def sentences(
        self, text: str, voice: str | Path | Voice | None = None, **settings: Any
    ) -> Iterator[Piece]:
        """Generate one piece per phrase, otherwise as `generate`, so that a long text is never
        in memory as a whole. Text and voice are checked at the call, before the first piece."""
        model = self.using(**settings)
        parts, whose = model._phrases(text), model.voice(voice)
        if isinstance(model.vocoder, TokenVocoder):
            # Longer pieces than for a listener are cheaper; on a GPU, or without a second core,
            # whole phrases are.
            at_once = cores() > 1 and model.vocoder.device.type == "cpu"
            return whole_phrases(model._stream(parts, whose, 64 if at_once else sys.maxsize))
        return model._by_phrase(parts, whose)

    def _phrases(self, text: str, note: bool = True) -> list[Phrase]:
        language = language_of(language_for(self.units, self.decoder.config, self.language))
        if note and self.units.languages:
            note_what_is_not_read(text, language)
        return phrases(text, self.units, language)

    def _by_phrase(self, parts: list[Phrase], voice: Voice) -> Iterator[Piece]:
        """Generate one piece per phrase, for vocoders that need whole phrases."""
        prompts = self._prompts(parts, voice)
        for start in range(0, len(parts), PHRASES_AT_ONCE):
            now = slice(start, start + PHRASES_AT_ONCE)
            with self._engine() as engine:
                results = engine.decode(prompts[now], seed=self.seed)
            waves = synthesize(
                self.vocoder,
                [r.tokens for r in results],
                np.stack([voice.features] * len(results)),
                [part.text for part in parts[now]],
            )
            for i, (part, wave, result) in enumerate(
                zip(parts[now], waves, results, strict=True), start
            ):
                yield Piece(
                    np.concatenate((wave, self._pause(part))), self.vocoder.sample_rate, i, result
                )

    def stream(
        self, text: str, voice: str | Path | Voice | None = None, **settings: Any
    ) -> Iterator[Piece]:
        """Generate pieces as soon as they are final, otherwise as `generate`; concatenated, they
        are its waveform (up to rounding).

        Text, voice and models are checked at the call, before the first piece. Raises ConfigError
        if the vocoder cannot stream.
        """
        model = self.using(**settings)
        if not isinstance(model.vocoder, TokenVocoder):
            raise ConfigError(
                "streaming needs this project's own vocoder, which synthesises piece by piece; "
                "with another one omit --stream (use Speaker.generate)"
            )
        return model._stream(model._phrases(text), model.voice(voice))

    def _is_small(self) -> bool:
        return sum(p.numel() for p in self.decoder.parameters()) < SMALL

    def join(self, text: str, pieces: list[Piece]) -> Spoken:
        """Join all pieces of `text` (of `sentences` or `stream`)."""
        parts = self._phrases(text, note=False)
        results = [piece.result for piece in pieces if piece.result is not None]
        return Spoken(
            np.concatenate([piece.samples for piece in pieces]),
            self.vocoder.sample_rate,
            [p.text for p in parts],
            results,
            self.tokenizer.rate_hz,
            [p.pause for p in parts],
        )

    def _stream(self, parts: list[Phrase], voice: Voice, every: int = EVERY) -> Iterator[Piece]:
        pieces = self._pieces(parts, voice, every)
        return in_one_thread(pieces) if self._is_small() else pieces

    def _pieces(self, parts: list[Phrase], voice: Voice, every: int) -> Iterator[Piece]:
        prompts, vocoder = self._prompts(parts, voice), cast(TokenVocoder, self.vocoder)
        with self._engine() as engine:
            for piece in stream_audio(
                engine, prompts, self.seed, vocoder, [voice.features] * len(prompts), every
            ):
                if piece.result is not None:
                    piece = replace(
                        piece,
                        samples=np.concatenate((piece.samples, self._pause(parts[piece.phrase]))),
                    )
                yield piece

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        """Return an engine that decodes one phrase at a time. It serves one text at a time, so
        another thread gets its own."""
        key = reader_of(self.decoder), self.method, self.sampling
        engine, failed = self._engines.pop(key, None) or Engine(*key), False
        try:
            yield engine
        except Exception:
            failed = True  # raised again; this engine is not used again
            raise
        finally:  # also after a stream that nobody heard to its end
            if not failed:
                self._engines[key] = engine
                if len(self._engines) > CACHED_ENGINES:
                    del self._engines[next(iter(self._engines))]

    def _prompts(self, parts: list[Phrase], voice: Voice) -> list[Prompt]:
        return [
            Prompt(f"sentence-{i}", tuple(self.units(p.text)), voice.tokens)
            for i, p in enumerate(parts)
        ]

    def _pause(self, part: Phrase) -> np.ndarray:
        return np.zeros(int(part.pause * self.vocoder.sample_rate), np.float32)


def whole_phrases(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Return one piece per phrase."""
    held: list[np.ndarray] = []
    for piece in pieces:
        held.append(piece.samples)
        if piece.result is not None:
            yield replace(piece, samples=np.concatenate(held))
            held = []


def make_method(
    name: AnyMethod, policy: Policy, decoder: AnyDecoder, dial: float = 0.0, num_candidates: int = 0
) -> Method:
    """Return the method with a compact name (docs/methods.md), bound to the decoder and, if it uses
    one, to the policy with this `dial` and `num_candidates` (0: as in `Speaker.load`). A chunk rule
    or a method is used as it is."""
    spec = MethodSpec.parse(name) if isinstance(name, str) else None
    asked = {"dial": dial, "num_candidates": num_candidates}
    for setting, value in asked.items():
        if value and not (spec and has_setting(spec.of, setting)):
            raise ConfigError(
                f"{setting}={value:g} is for a policy, but method '{getattr(name, 'name', name)}' "
                "uses none: omit it, or choose dcar"
            )
    if not DIALS[0] <= dial <= DIALS[1]:
        raise ConfigError(
            f"dial={dial:g} must be between {DIALS[0]:g} and {DIALS[1]:g}; for chunks of one size "
            "choose car-K"
        )
    if spec is None:
        assert not isinstance(name, str)
        return name
    if spec.sampling:
        raise ConfigError(f"method '{name}': give the sampling as temperature and top_k")
    policies: dict[str, ChunkPolicy] = {}
    if has_setting(spec.of, "policy"):
        where = decoder.speech_embedding.weight.device
        loaded = policy if isinstance(policy, ChunkPolicy) else load_policy(policy, where)
        policies[str(spec.settings.get("policy", ""))] = loaded
        if not num_candidates and loaded.chunk_scorer is not None:
            asked["num_candidates"] = NUM_CANDIDATES
        settings = {key: value for key, value in asked.items() if value}
        spec = replace(spec, settings={**settings, **spec.settings})
    try:
        return spec.bound(Borrowed(Models(decoder, decoder, policies)))
    except ConfigError as error:
        raise ConfigError(f"method '{name}': {error}") from error


def shipped_policy_fits(decoder: AnyDecoder) -> bool:
    """Return whether `POLICY` was trained for this decoder. The checksum of a large decoder,
    which takes long, is not computed."""
    policy, own = load_policy(POLICY).config, decoder.config
    alike = (policy.hidden_size, policy.num_actions) == (own.hidden_size, own.num_prediction_heads)
    return alike and policy.base_checksum == decoder.checksum()


load = Speaker.load
"""Load the models of a speaker, by folder or name (`dcar.load`)."""


def timeline_of(texts: Sequence[str], results: Sequence[DecodeResult], rate: float) -> str:
    """Return every phrase with its chunks, as text."""
    return "\n".join(
        f"{phrase}\n{timeline(result, rate)}" + "  (cut by the length guard)" * result.truncated
        for phrase, result in zip(texts, results, strict=True)
    )


def timeline(result: DecodeResult, rate: float) -> str:
    """Return the chunks of an utterance as text: their sizes in order, and a histogram."""
    sizes = ("" if max(result.emitted, default=0) < 10 else " ").join(
        str(n) for n in result.emitted if n
    )
    counts = {k: result.emitted.count(k) for k in sorted(set(result.emitted)) if k}
    share = ", ".join(f"{k} tokens x {n}" for k, n in counts.items())
    return (
        f"{len(result.tokens) / rate:5.2f} s  {len(result.tokens)} tokens in "
        f"{result.passes} passes ({result.tokens_per_pass:.2f} a pass): {share}\n         "
        f"|{sizes}|"
    )
