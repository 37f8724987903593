"""Comparison on a random tiny decoder with a fake vocoder and judge; run as a script by the
two-process test."""

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tiny_decoders import tiny_decoder

from dcar.methods import MethodSpec, Models
from dcar.model.car import CARDecoder
from dcar.process import end_process_group
from dcar.prompts.items import PromptItem
from dcar.sampling import SamplingConfig
from dcar.text.bootstrap import Interval
from dcar.text.wer import WordErrors
from eval.compare.config import CompareConfig
from eval.compare.run import run
from eval.compare.tools import Tools
from eval.methods.families import family_of, setting_text
from eval.results.rows import power_of
from eval.results.types import (
    RECORD_VERSION,
    RECORDING,
    RESYNTHESIS,
    Decoded,
    Measured,
    Record,
    Result,
    Row,
    Timing,
    read_records,
)
from eval.scorers.load import Scorer
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)

WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan willow".split()
HOP = 480


def words_of(levels: Sequence[int]) -> str:
    """Return one word for each run of equal levels among the first twelve."""
    return " ".join(WORDS[level] for level, _ in itertools.groupby(levels[:12]))


class ToneVocoder:
    """Vocoder in which every token is a level for 20 ms, so that the tokens can be read from the
    waveform."""

    sample_rate, token_rate, tokenizer = 24_000, 50, ""

    def synthesize(self, token_lists, speaker):
        assert len(token_lists) == len(speaker)
        ripple = 1 + 0.01 * np.sin(np.arange(HOP) / 3)
        return [
            np.concatenate([np.zeros(0), *[(t + 1) / 20 * ripple for t in tokens]]).astype(
                np.float32
            )
            for tokens in token_lists
        ]


class LevelJudge:
    """Recogniser that returns one word for each run of equal levels; `calls` counts the
    waveforms."""

    def __init__(self, name: str = "level-judge", fail_after: int | None = None):
        self.name, self.calls, self.fail_after = name, 0, fail_after

    def transcribe(self, waves, sample_rate):
        assert sample_rate == 24_000
        out = []
        for wave in waves:
            self.calls += 1
            if self.fail_after is not None and self.calls > self.fail_after:
                raise KeyboardInterrupt
            levels = (wave.reshape(-1, HOP).mean(1) * 20).round().astype(int) - 1
            out.append(words_of(levels))
        return out


def loudness(wave: np.ndarray, rate: int, speaker: np.ndarray) -> float | None:
    """Return the mean level plus the voice's first feature; None from 1.1 on."""
    level = float(wave.mean()) + float(speaker[0])
    return level if level < 1.1 else None


def tiny_policy(seed: int = 0, base: str = "") -> ChunkPolicy:
    torch.manual_seed(seed)
    policy = HiddenPolicy(
        HiddenPolicyConfig(32, 4, width=16, num_attention_heads=2, base_checksum=base)
    ).eval()
    torch.nn.init.normal_(policy.output.weight, std=2.0)
    return policy


def scored_policy(decoder: CARDecoder) -> ChunkPolicy:
    """Return a random policy that can choose among several candidates drawn side by side."""
    torch.manual_seed(0)
    width, heads = decoder.config.hidden_size, decoder.config.num_prediction_heads
    chunk_scorer = ChunkScorer(ChunkScorerConfig(width, heads, decoder.config.output_size, 4, 8))
    shape = CandidatePolicyConfig(
        width, heads, base_checksum=decoder.checksum(), chunk_scorer=chunk_scorer.config
    )
    return CandidatePolicy(shape).eval()


def tiny_items(count: int = 6) -> list[PromptItem]:
    items = []
    for i in range(count):
        rng = np.random.default_rng(i)
        tokens = [int(t) for t in rng.integers(0, 12, 15)]
        text = words_of(tokens)
        text_ids = tuple(int(t) for t in rng.integers(1, 20, 4 + i % 3))
        items.append(
            PromptItem(
                f"utt<{i}>",
                text_ids,
                tuple(tokens[:3]),
                text,
                f"speaker & {i % 2}",
                rng.random(298).astype(np.float32),
                tokens,
                f"utt<{(i + 2) % count}>",
                len(tokens) / 50,
            )
        )
    return items


def tiny_tools(judge: LevelJudge | None = None, count: int = 6) -> Tools:
    decoder, vocoder = tiny_decoder(), ToneVocoder()
    items = tiny_items(count)
    tokens = {i.utterance_id: i.reference_tokens for i in items}
    models = Models(
        decoder, tiny_decoder(heads=1, seed=5), {"": tiny_policy(base=decoder.checksum())}
    )
    return Tools(
        {"split": {0: items}},
        models,
        vocoder,
        judge or LevelJudge(),
        recording=lambda uid: (vocoder.synthesize([tokens[uid]], [0])[0], 24_000),
        identity={"vocoder": "tone"},
        scorers={"loudness": Scorer("loudness", "similarity", "loudness", loudness)},
    )


SHORT = SamplingConfig(max_tokens=20, max_tokens_per_text_unit=4)


def tiny_config(out: Path | str, **changes) -> CompareConfig:
    settings = dict(
        methods=["far", "car-1", "car-3", "random-2-3", "dcar", "dcar-sampled"],
        seeds=[0, 1],
        batch_size=3,
        sampling=SHORT,
        resamples=200,
        timing_utterances=0,
        audio_utterances=2,
        device="cpu",
        out=str(out),
    )
    return CompareConfig(**{**settings, **changes})


def spoken(out: Path | str, tools: Tools | None = None, **changes) -> Result:
    """Run a comparison of one seed without report, sounds and references, unless `changes` ask
    for them."""
    quiet = {"seeds": [0], "report": False, "audio_utterances": 0, "references": False}
    return run(tiny_config(out, **{**quiet, **changes}), tools or tiny_tools())


def transcribed(out: Path | str, tools: Tools | None = None, **changes) -> int:
    """Return the number of waveforms that the evaluation ASR transcribed in such a comparison."""
    tools = tools or tiny_tools()
    spoken(out, tools, **changes)
    return tools.recognizer.calls


def records_of(out: Path) -> list[Record]:
    """Return the gathered records without timings."""
    return [replace(r, seconds={}) for r in read_records(out / "records.jsonl")]


def mapping_of(method: str) -> dict | None:
    """Return a method as its mapping; None for a reference."""
    if method in (RECORDING, RESYNTHESIS):
        return None
    return MethodSpec.parse(method).to_mapping()


def made_record(method: str, uid: str, errors: int = 0, **changes) -> Record:
    """Return a record as a comparison stores it: ten words in two seconds, ten tokens in five
    passes. changes: of the record, and of how it was decoded."""
    decoded = dict(
        truncated=False,
        passes=5,
        draft_passes=0,
        proposed=[],
        accepted=[],
        emitted=[2] * 5,
        sizes=[2] * 5,
    )
    decoded = {name: changes.pop(name, value) for name, value in decoded.items()}
    spec = mapping_of(method)
    record = Record(
        version=RECORD_VERSION,
        fingerprint="",
        method=method,
        spec=spec,
        seed=0,
        id=uid,
        text="",
        recognizer="j",
        hypothesis="x",
        duration=2.0,
        reference_duration=2.0,
        normalizer="n",
        words=WordErrors(errors, 0, 0, 10),
        characters=WordErrors(errors, 0, 0, 50),
        tokens=[1] * 10,
        decoded=None if spec is None else Decoded(**decoded),
    )
    return replace(record, **changes)


def made_timing(method: str, uid: str, lm: float, **changes) -> Timing:
    """Return the times of an utterance of one second."""
    times = dict(vocoder=0.0, first_audio=0.1, audio=1.0, tokens=10)
    return Timing(changes.pop("of", ""), method, uid, lm, **{**times, **changes})


def made_row(method: str, wer: float | Interval = 0.1, **changes) -> Row:
    """Return a row of ten utterances."""
    wer = wer if isinstance(wer, Interval) else Interval(wer, None, None)
    spec = mapping_of(method)
    named = {"family": family_of(spec), "setting": setting_text(spec)} if spec else {}
    counts = dict(n=10, seeds=1, prompts=1, records=10)
    rates = dict(wer=wer, cer=wer, wer_capped=wer.value)
    errors = dict(errors=WordErrors(0, 0, 0, 100), empty_transcripts=0, duration_ratio=1.0)
    return Row(method, spec, **{**counts, **rates, **errors, "scores": {}, **named, **changes})


def made_measured(rows: list[Row], **changes) -> Measured:
    """Return a comparison of made-up rows."""
    parts = dict(pairs=[], equal_variety=[], by_length=None, by_category=None, power=power_of(rows))
    of = dict(texts="split", title="sentences", limit=0, utterances=10)
    return Measured(rows=rows, **{**of, **parts, **changes})


def made_result(rows: list[Row], **changes) -> Result:
    """Return compare.json for made-up rows, without the parts that a comparison derives from its
    records and sounds. changes: of the comparison."""
    return Result(
        recognizer="j",
        recognizer_note="",
        normalizer="n",
        scorers={},
        sampling=SamplingConfig(),
        seeds=[0],
        prompt_seeds=[0],
        corpus={"texts": []},
        methods={row.method: {} for row in rows if row.decodes},
        models={},
        parameters=5_000_000,
        heads=7,
        codes=512,
        training="",
        tuned=None,
        threads=1,
        processes=1,
        device="cpu",
        provenance={},
        config={"limit": 0},
        comparisons=[made_measured(rows, **changes)],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = run(tiny_config(sys.argv[1], report=False), tiny_tools())
    # one write, so that the lines of two processes cannot mix
    os.write(1, f"processes {result.processes}\n".encode())
    end_process_group()
