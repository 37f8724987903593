"""Rates of the models around the decoder, at the papers' sizes (`launch.gpu_models`).

Times do not depend on the weights, except through the length of transcripts. Whisper writes as many
tokens as it may, 8 per second, and the transducer one symbol per frame; both are more than speech
has.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.decoding import Engine, PolicyChunk
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.precision import cast_decoder, matched_policy
from dcar.recognition.base import Recognizer
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.train.car import CARTrainer
from dcar.vocoder.acoustic import SPEAKER_DIM, VocoderConfig
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.training.pack import FRAME_RATE, SAMPLE_RATE, VocoderData
from dcar.vocoder.training.trainer import Trainer, TrainVocoderConfig
from dcar.voices.encoder import SpeakerEncoder
from eval.results.timing import synchronize
from eval.speed.measure import Load
from eval.speed.run import SIZES
from heads.policy import HiddenPolicy, HiddenPolicyConfig
from launch.gpu_models import fastconformer, hubert, hubert_ctc, whisper
from rl.rollout import forced_sizes

CODES, TOKEN_RATE = 2048, 50
TOKENS = 300  # 6 s
VOICED_AT_ONCE = 64


@dataclass
class Found:
    """Figures of a part: rows of the table (name, measured figure, figure to compare with), and
    rates by name for `launch.gpu_hours`."""

    rows: list[tuple[str, str, str]]
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Device and size of a measurement."""

    device: str

    @property
    def tiny(self) -> bool:
        """True for the rehearsal on a CPU."""
        return self.device == "cpu"

    def waves(self, count: int) -> list[np.ndarray]:
        """Return waveforms of noise at 16 kHz, 3 to 9 s long, 6 s on average; two of 0.6 s if
        tiny."""
        random = np.random.default_rng(0)
        seconds = np.full(2, 0.6) if self.tiny else np.linspace(3, 9, count)
        sizes = (seconds * ENCODER_SAMPLE_RATE).astype(int)
        return [(0.1 * random.standard_normal(size)).astype(np.float32) for size in sizes]

    def seconds(self, call: Callable[[], Any], warm_up: Callable[[], Any] | None = None) -> float:
        """Return the seconds that a call takes until the device is done, after a warm-up (by
        default the same call)."""
        (warm_up or call)()
        synchronize(torch.device(self.device))
        started = time.perf_counter()
        call()
        synchronize(torch.device(self.device))
        return time.perf_counter() - started

    def rate(self, waves: Sequence[np.ndarray], call: Callable[[Any], Any]) -> float:
        """Return how many seconds of audio at 16 kHz a call processes per second."""
        audio = sum(map(len, waves)) / ENCODER_SAMPLE_RATE
        return audio / self.seconds(lambda: call(list(waves)), lambda: call(list(waves[::4])))


def memory(device: str) -> str:
    """Format the peak memory since the last call; empty on a CPU."""
    if device == "cpu":
        return ""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"{peak:.1f} GiB"


def prepare_found(bench: Bench) -> Found:
    """Measure tokenisation by HuBERT-Large and k-means, and, if Resemblyzer is installed, the
    speaker encoder."""
    encoder = hubert(bench.device, bench.tiny)
    size = encoder.state_size
    codes = np.random.default_rng(0).standard_normal((CODES, size)).astype(np.float32)
    tokenizer = KMeansTokenizer(encoder, codes, np.zeros(size), np.ones(size))
    waves = bench.waves(64)
    tokens = bench.rate(waves, lambda given: tokenizer.encode(given, ENCODER_SAMPLE_RATE))
    tokenized, voiced = (
        f"{what}, seconds of audio per second"
        for what in ("HuBERT-Large and k-means", "speaker encoder")
    )
    found = Found([(tokenized, f"{tokens:.0f}", memory(bench.device))], {"tokens": tokens})
    if importlib.util.find_spec("resemblyzer") is None:
        found.rows.append((voiced, "not measured", "Resemblyzer is not installed"))
    else:
        speakers = SpeakerEncoder(bench.device)
        voices = bench.rate(
            waves, lambda given: speakers.embed_all(given, [ENCODER_SAMPLE_RATE] * len(given))
        )
        both = 1 / (1 / tokens + 1 / voices)
        found.rates["voices"] = voices
        found.rows.append((voiced, f"{voices:.0f}", ""))
        found.rows.append(("both, seconds of audio per second", f"{both:.0f}", "aim ≥ 500"))
    found.rows.append(
        ("S³ tokenizer", "not measured", "it cannot be made without its published weights")
    )
    return found


RECOGNISERS: dict[str, tuple[str, Callable[[str, bool], Recognizer]]] = {
    "nemo": ("FastConformer transducer large (NeMo)", fastconformer),
    "whisper": ("Whisper-large-v3", whisper),
    "ctc": ("HuBERT-Large with CTC", hubert_ctc),
}


def recognisers_found(bench: Bench) -> Found:
    """Measure transcription by each recogniser of the papers; NeMo only if it is installed."""
    found, waves = Found([]), bench.waves(64)
    for name, (title, make) in RECOGNISERS.items():
        what = f"{title}, seconds of audio per second"
        if name == "nemo" and importlib.util.find_spec("nemo") is None:
            found.rows.append((what, "not measured", "NeMo is not installed"))
            continue
        recognizer = make(bench.device, bench.tiny)
        rate = bench.rate(waves, partial(recognizer.transcribe, sample_rate=ENCODER_SAMPLE_RATE))
        found.rates[name] = rate
        found.rows.append((what, f"{rate:.0f}", memory(bench.device)))
        del recognizer
        gc.collect()
    return found


def made_up_audio(device: str) -> VocoderData:
    """Return training data for the vocoder: rows of noise with random tokens."""
    rows, tokens = 8, 120
    count = rows * tokens
    frames = count * FRAME_RATE // TOKEN_RATE
    torch.manual_seed(0)
    with torch.device(device):
        samples = torch.randint(-3000, 3000, (count * SAMPLE_RATE // TOKEN_RATE,))
        return VocoderData(
            waves=samples.to(torch.int16),
            tokens=torch.randint(CODES, (count,)),
            log_f0=torch.full((frames,), 5.0),
            voiced=torch.ones(frames),
            lengths=torch.full((rows,), tokens),
            speaker=torch.randn(rows, SPEAKER_DIM),
            voice=torch.arange(rows) % 2,
            validation=torch.arange(rows) == 0,
            top=torch.full((rows,), 12_000.0),
            tokenizer_checksum="",
        )


def vocoder_found(bench: Bench) -> Found:
    """Measure the vocoder: synthesis of utterances of 6 s in batches, and training steps."""
    vocoder = TokenVocoder(VocoderConfig(vocab_size=CODES)).to(bench.device).eval()
    tokens = 25 if bench.tiny else TOKENS
    found = Found([])
    for batch in (1, 2) if bench.tiny else (1, 16, VOICED_AT_ONCE):
        spoken = [[(7 * i + b) % CODES for i in range(tokens)] for b in range(batch)]
        speakers = np.random.default_rng(0).standard_normal((batch, SPEAKER_DIM)).astype(np.float32)
        seconds = bench.seconds(partial(vocoder.synthesize, spoken, speakers))
        rate = batch * tokens / TOKEN_RATE / seconds
        found.rates["vocoder"] = rate  # the rate of the largest batch is kept
        what = f"vocoder, batch {batch}, seconds of audio per second"
        found.rows.append((what, f"{rate:.0f}", memory(bench.device)))
    config = TrainVocoderConfig(data="random", model={"vocab_size": CODES}, bf16=not bench.tiny)
    trainer = Trainer(config, made_up_audio(bench.device), torch.device(bench.device))
    steps = 1 if bench.tiny else 20
    rate = steps / bench.seconds(lambda: [trainer.step() for _ in range(steps)])
    found.rates["vocoder_steps"] = rate
    found.rows.append(("vocoder, training steps per second", f"{rate:.1f}", memory(bench.device)))
    return found


def rollouts_found(bench: Bench) -> Found:
    """Measure the rollouts of a DCPO step, half of them with forced sizes: decoding, and with
    the vocoder."""
    torch.manual_seed(0)
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    made = CARDecoder(CARConfig(**SIZES["tiny" if bench.tiny else "paper"])).eval()
    decoder = cast_decoder(made, dtype).to(bench.device)
    config = decoder.config
    shape = HiddenPolicyConfig(
        config.hidden_size,
        config.num_prediction_heads,
        width=None,
        num_attention_heads=config.num_attention_heads,
    )
    policy = matched_policy(HiddenPolicy(shape).eval().to(bench.device), decoder)
    load = Load(20, 10, 12) if bench.tiny else Load(60, 150, 250)
    groups, size = (1, 2) if bench.tiny else (8, 8)
    prompts = load.prompts(decoder, groups)
    forced = {
        p.utterance_id: forced_sizes(i, size, [2, 3], "policy_ratio") for i, p in enumerate(prompts)
    }
    method = PolicyChunk(policy, "sample", forced=forced)
    engine = Engine(decoder, method, load.sampling(), groups * size, record_hidden=True)
    results: list[Any] = []

    def decode_all() -> None:
        results[:] = engine.decode(prompts, seed=0, group_size=size)

    seconds = bench.seconds(decode_all)
    used = memory(bench.device)
    vocoder = (
        TokenVocoder(VocoderConfig(vocab_size=config.speech_vocab_size)).to(bench.device).eval()
    )
    speakers = np.zeros((len(results), SPEAKER_DIM), np.float32)
    voiced = seconds + bench.seconds(
        lambda: vocoder.synthesize([r.tokens for r in results], speakers)
    )
    rows = groups * size
    what = f"rollouts of {load.tokens} tokens, {rows} rows, per second"
    return Found(
        [
            (f"{what}: tokens only", f"{rows / seconds:.1f}", f"aim ≥ 400; {used}".rstrip("; ")),
            (f"{what}: with the vocoder", f"{rows / voiced:.1f}", memory(bench.device)),
        ],
        {"rollouts": rows / seconds},
    )


@contextmanager
def clocked(steps: int) -> Iterator[dict[str, float]]:
    """Measure a training of `steps` steps: `seconds` and `tokens` of its second half, except the
    last step.

    A step is timed from its batch to the next one, so the last step has no end.
    """
    original, found = CARTrainer.training_step, dict.fromkeys(("seconds", "tokens"), 0.0)
    first, last, seen, started = steps // 2, steps - 1, 0, 0.0

    def step(self: CARTrainer, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        nonlocal seen, started
        if seen in (first, last):
            synchronize(self.args.device)
            started, found["seconds"] = time.perf_counter(), time.perf_counter() - started
        if first <= seen < last:
            found["tokens"] += len(inputs["positions"])
        seen += 1
        return original(self, model, inputs, *rest)

    with patch.object(CARTrainer, "training_step", step):
        yield found
