"""`dcar speak`: text and a prompt voice in, a waveform and the timeline of its chunks out."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, load_audio, save_audio
from dcar.config import load_config, setting
from dcar.config.schema import seed_setting
from dcar.decoding import ChunkMethod, DecodeResult, FixedChunk, PolicyChunk, Prompt, decode
from dcar.decoding.fast.passes import fast
from dcar.errors import AudioError, ConfigError, TextError
from dcar.model.draft import AnyDecoder
from dcar.model.load import Shipped, load_decoder, load_policy, text_encoder
from dcar.process import run_command
from dcar.prompts.together import check_together, made_by
from dcar.sampling import SamplingConfig
from dcar.sources.shipped import shipped
from dcar.text.phonemes import PHONEME_VERSION, normalize_text, text_to_ids
from dcar.tokens.load import load_tokenizer
from dcar.vocoder.base import PromptAudio, Vocoder
from dcar.vocoder.load import load_vocoder
from dcar.vocoder.model import TokenVocoder, speaker_features

MIN_PROMPT_SECONDS = 1.0
MAX_PHONEMES = 200  # of one sentence; the starter decoder has seen about 100
PAUSE_SECONDS = 0.15  # between sentences


@dataclass
class Voice:
    """A prompt ready for decoder and vocoder: speech tokens and voice features [F]."""

    tokens: tuple[int, ...]
    features: np.ndarray


def read_voice(path: str | Path, tokenizer, prompt_tokens: int = 50) -> Voice:
    """Load a prompt recording (any format and rate) and describe its voice. AudioError if it is under a second."""
    from dcar.voices.encoder import SpeakerEncoder

    heard, _ = load_audio(path, ENCODER_SAMPLE_RATE)
    wave, rate = load_audio(path)
    seconds = len(wave) / rate
    if seconds < MIN_PROMPT_SECONDS:
        raise AudioError(f"{path}: the prompt lasts {seconds:.2f} s; give at least {MIN_PROMPT_SECONDS:g} s of speech")
    wave, heard = wave[: 20 * rate], heard[: 20 * ENCODER_SAMPLE_RATE]
    tokens = tokenizer.encode([heard], ENCODER_SAMPLE_RATE)[0]
    start = max(0, (len(tokens) - prompt_tokens) // 2)
    # of the recording as it is: a voice has more than what encoders hear of it
    features = speaker_features(wave, rate, SpeakerEncoder().embed(heard, ENCODER_SAMPLE_RATE))
    return Voice(tuple(int(t) for t in tokens[start : start + prompt_tokens]), features)


def split_sentences(text: str) -> list[str]:
    """Sentences of a text. TextError if there is nothing to speak or a sentence is too long for the model."""
    normal = normalize_text(text)
    sentences = [s.strip() for s in re.split(r"(?<=[.?!])\s+", normal) if re.search(r"\w", s)]
    if not sentences:
        raise TextError("there is nothing to speak in this text; give some words")
    for sentence in sentences:
        if (length := len(text_to_ids(sentence))) > MAX_PHONEMES:
            raise TextError(f"a sentence has {length} phonemes, more than {MAX_PHONEMES}; split it with full stops: "
                            f"{sentence[:60]}…")
    return sentences


def make_method(name: str, policy: str, decoder: AnyDecoder) -> ChunkMethod:
    """far and car-K keep a fixed number of tokens a step; dcar asks the policy."""
    if name == "far":
        return ChunkMethod(FixedChunk(1, "far"))
    if found := re.fullmatch(r"car-(\d+)", name):
        return ChunkMethod(FixedChunk(int(found[1])))
    if name in ("dcar", "dcar-sampled"):
        loaded = load_policy(policy)
        loaded.check_base(decoder.checksum())
        return ChunkMethod(PolicyChunk(loaded, "greedy" if name == "dcar" else "sample"))
    raise ConfigError(f"unknown method '{name}'; choose far, car-1 … car-{decoder.config.num_prediction_heads}, dcar "
                      "or dcar-sampled")


def timeline(result: DecodeResult, rate: float) -> str:
    """The chunks of an utterance as text: their sizes in order, and a histogram."""
    sizes = "".join(str(n) for n in result.emitted if n)
    counts = {k: result.emitted.count(k) for k in sorted(set(result.emitted)) if k}
    share = ", ".join(f"{k} tokens x {n}" for k, n in counts.items())
    return (f"{len(result.tokens) / rate:5.2f} s  {len(result.tokens)} tokens in {result.target_passes} passes "
            f"({result.tokens_per_pass:.2f} a pass): {share}\n         |{sizes}|")


@dataclass
class SpeakConfig:
    """`dcar speak`: text and a prompt voice in, a waveform and the timeline of its chunks out."""

    text: str = setting(meaning="What is said; several sentences are spoken one by one.", positional=True)
    prompt: str | None = setting(None, "Recording of the voice to speak with, 1 s or more; null = a starter voice.",
                                 place="file")
    out: str = setting("out.wav", "File to write; the suffix chooses the format.", old=("output",), short="-o",
                       place="file")
    method: str = setting("dcar", "dcar, dcar-sampled, car-K, or far.")
    decoder: str = setting("starter", "Directory of a decoder (far: of a FAR decoder).")
    policy: str = setting("starter", "Directory of an exported policy.")
    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")
    tokenizer: str = setting("starter", "Folder, or a name that dcar.tokens.load lists.")
    seed: int = seed_setting(0, "Of the draws.")
    stream: bool = setting(False, "Also write 16-bit mono samples to standard output while speaking (… | aplay "
                                  "-r 24000 -f S16_LE); the timeline goes to standard error.")
    sampling: SamplingConfig = setting(lambda: SamplingConfig(0.8, 10), "How tokens are drawn.", flat=True)


def main(arguments: list[str] | None = None) -> None:
    options = load_config(SpeakConfig, arguments)
    sentences = split_sentences(options.text)
    tokenizer = load_tokenizer(options.tokenizer)
    which: Shipped = "far" if options.method == "far" else "decoder"
    decoder, encode = load_decoder(options.decoder, starter=which), text_encoder(options.decoder, which)
    method = make_method(options.method, options.policy, decoder)
    voice = read_voice(options.prompt, tokenizer) if options.prompt else starter_voice()
    heard = PromptAudio([(voice.features, partial(load_audio, options.prompt))] if options.prompt else [])
    vocoder = load_vocoder(options.vocoder, prompts=heard)
    made = made_by(tokenizer, getattr(encode, "name", PHONEME_VERSION))
    check_together(decoder, made, f"tokenizer {options.tokenizer}", vocoder)
    started = time.perf_counter()
    prompts = [Prompt(f"sentence-{i}", tuple(encode(s)), voice.tokens) for i, s in enumerate(sentences)]
    sampling = options.sampling
    pause = np.zeros(int(PAUSE_SECONDS * vocoder.sample_rate), np.float32)
    notes = sys.stderr if options.stream else sys.stdout
    if options.stream:
        results, waves = speak_aloud(decoder, prompts, method, sampling, options.seed, vocoder, voice, pause)
    else:
        results = decode(fast(decoder), prompts, method, sampling, seed=options.seed, batch_size=1)
        waves = vocoder.synthesize([r.tokens for r in results], np.stack([voice.features] * len(results)))
    seconds = time.perf_counter() - started
    pieces = [piece for wave in waves for piece in (wave, pause)][:-1]
    save_audio(options.out, np.concatenate(pieces), vocoder.sample_rate)
    for sentence, result in zip(sentences, results, strict=True):
        print(sentence, file=notes)
        print(timeline(result, tokenizer.rate_hz) + ("  (cut by the length guard)" if result.truncated else ""),
              file=notes)
    audio = sum(len(p) for p in pieces) / vocoder.sample_rate
    print(f"{options.out}: {audio:.2f} s by {method.name}, {seconds / audio:.3f} x real time", file=notes)


def speak_aloud(decoder: AnyDecoder, prompts: list[Prompt], method: ChunkMethod, sampling: SamplingConfig, seed: int,
                vocoder: Vocoder, voice: Voice, pause: np.ndarray) -> tuple[list[DecodeResult], list[np.ndarray]]:
    """Write samples to standard output as they become certain, sentence by sentence; returns results and waves."""
    from dcar.decoding.engine.run import Job, Plan, engine_for
    from dcar.speak.stream import stream_audio

    if not isinstance(vocoder, TokenVocoder):
        raise ConfigError("--stream needs this project's own vocoder, which can be asked for a piece at a time; leave "
                          "--stream out with another one")
    started = time.perf_counter()
    plan = Plan(method, sampling, seed)
    engine = engine_for(decoder, prompts, sampling, batch=1, policy=getattr(plan.schedule, "policy", None))
    waves: list[list[np.ndarray]] = [[] for _ in prompts]
    results: list[DecodeResult] = []
    jobs = [Job(i, p) for i, p in enumerate(prompts)]
    for chunk in stream_audio(engine, jobs, plan, vocoder, {i: voice.features for i in range(len(prompts))}):
        if not any(waves):
            print(f"first audio after {time.perf_counter() - started:.3f} s", file=sys.stderr)
        waves[chunk.index].append(chunk.samples)
        ending = chunk.result is not None and chunk.index + 1 < len(prompts)
        samples = np.concatenate((chunk.samples, pause)) if ending else chunk.samples
        sys.stdout.buffer.write((samples * 32767).astype("<i2").tobytes())
        sys.stdout.buffer.flush()
        if chunk.result is not None:
            results.append(chunk.result)
    return results, [np.concatenate(pieces) for pieces in waves]


def starter_voice() -> Voice:
    """The first unseen voice of the starter corpus."""
    from dcar.prepare.run import load_prepared

    row = load_prepared(shipped("prepared"), "test")[0]
    return Voice(tuple(row["speech"][20:70]), np.asarray(row["voice"], np.float32))


if __name__ == "__main__":
    sys.exit(run_command("dcar.speak.speak", main))
