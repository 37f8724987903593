"""`dcar fit-tokenizer`: fit the k-means speech tokenizer on a corpus and report the content of its
codes.

    dcar fit-tokenizer corpus=starter path=dcar/assets/starter_corpus out=dcar/assets/tokenizer
    dcar fit-tokenizer encoder=hubert:/models/hubert-large-ll60k vocab_size=2048 sample_hours=73 \\
        max_frames=1000000 \\
        standardize=false corpus=libritts path=/data/LibriTTS out=runs/hubert-km2048

The papers quantise HuBERT-Large (second command); the default encoder is whisper-base's, because it
ships in a package. The report shows whether the codes represent words or voices: the number of bits
of a held-out code that the phoneme predicts, and the number that the speaker predicts.

k-means spends its codes where the states vary, and much of that variation is due to the voice and
the position in the utterance. `projection_size` keeps the directions that distinguish phonemes.
Linear discriminant analysis (Fisher 1936; in recognisers Haeb-Umbach and Ney 1992) finds the
directions in which the means of phonemes differ most, relative to the spread within a phoneme. The
times of the phonemes are found by aligning the text to the codes of a first k-means; each phoneme
is split into thirds, so that transitions are distinguished as well. The papers' S3 tokens are
supervised by a recogniser for the same reason.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg

from dcar.config import load_config, setting
from dcar.config.commands import DeviceSettings, SeedSettings
from dcar.corpus.read import KINDS, Decoded, examine, read_corpus
from dcar.corpus.rows import Problem, Utterance, describe, in_turn
from dcar.corpus.texts import CorpusTexts
from dcar.errors import ConfigError, DataError
from dcar.process import one_ahead, own_device, run_claimed
from dcar.text.base import SymbolUnits
from dcar.text.languages import DEFAULT
from dcar.text.units import Characters
from dcar.tokens.alignment import best_path, fit_alignment, phoneme_states, smoothed
from dcar.tokens.base import SpeechTokenizer
from dcar.tokens.kmeans import KMeansTokenizer, StateEncoder, fit_centroids, of_one_rate
from dcar.tokens.whisper import WhisperEncoder
from dcar.tracking import write_json

logger = logging.getLogger(__name__)

REPORT_SPLIT = "dev"
"""Split that the report is about, if the corpus has splits."""
PARTS = 3
"""Number of classes per phoneme: its beginning, middle and end."""


@dataclass(kw_only=True)
class FitTokenizerConfig(SeedSettings, DeviceSettings):
    """Settings of `dcar fit-tokenizer`."""

    out: str = setting(meaning="Folder to write the tokenizer and its report to.", place="folder")
    encoder: str = setting(
        "whisper-base",
        "Encoder: whisper-base, or hubert:FOLDER_OR_NAME[@LAYER] (the last layer by default).",
    )
    corpus: str = setting("starter", "Kind of corpus.", choices=KINDS)
    path: str | None = setting(None, "Location of the corpus; by default the shipped one.")
    language: str = setting(DEFAULT, "Language of the corpus, a code of ISO 639.")
    split: str | None = setting(
        "train", "Split to fit on; the report is on dev. Empty = the whole corpus for both."
    )
    vocab_size: int = setting(1024, "Number of codes; 512 to 1024 are usual.", minimum=1)
    max_frames: int = setting(
        200_000, "Number of encoder states to fit on (50 per second; 2 kB each).", minimum=1
    )
    sample_hours: float | None = setting(
        None,
        "Hours of audio to read, keeping an even share of the states, max_frames in all; if "
        "not given, the first max_frames states are used.",
        above=0,
    )
    standardize: bool = setting(True, "Scale every dimension of the states to unit variance.")
    projection_size: int = setting(
        0, "Number of directions that distinguish phonemes; 0 = no projection.", minimum=0
    )
    skip_bad: bool = setting(False, "Leave out bad rows instead of stopping.")
    report_utterances: int = setting(
        600, "Largest number of utterances in the report; 0 = no report.", minimum=0
    )


def run(config: FitTokenizerConfig) -> dict[str, Any]:
    """Fit a tokenizer, save it to `out`, write `report.json` there, and return the report.

    Raises DataError, AudioError, ConfigError.
    """
    order, texts = np.random.default_rng(config.seed), CorpusTexts(config.language)
    rows, problems = read_corpus(config.corpus, config.path)
    _leave_out(problems, config.skip_bad)
    utterances = _of_split(rows, config.split or None, config)
    held_out = []
    if config.report_utterances:
        held_out = _of_split(rows, REPORT_SPLIT if config.split else None, config)
    units = texts.units or Characters.collected((u.text for u in rows), [config.language])
    shuffled = [utterances[i] for i in order.permutation(len(utterances))]
    encoder: StateEncoder = WhisperEncoder(device=own_device(config.device))
    if config.encoder != encoder.name:
        from dcar.tokens.hubert import parse_encoder, shared_hubert

        encoder = shared_hubert(*parse_encoder(config.encoder), own_device(config.device))
    tokenizer = KMeansTokenizer.fit(
        (wave for _, wave in usable(shuffled, encoder.max_seconds, config.skip_bad, texts)),
        encoder,
        vocab_size=config.vocab_size,
        max_frames=config.max_frames,
        seed=config.seed,
        standardize=config.standardize,
        sample_hours=config.sample_hours,
    )
    if config.projection_size:
        tokenizer = sharpen(tokenizer, shuffled, config, units)
    tokenizer.provenance |= {"corpus": config.corpus, "split": config.split}
    tokenizer.save_pretrained(config.out)
    report: dict[str, Any] = {"config": asdict(config), "checksum": tokenizer.checksum}
    if config.report_utterances:
        chosen = [held_out[i] for i in order.permutation(len(held_out))]
        good = usable(chosen, encoder.max_seconds, config.skip_bad, texts)
        report |= describe_codes(
            tokenizer, [u for u, _ in islice(good, config.report_utterances)], units
        )
        logger.info(
            "fit-tokenizer: %s", json.dumps({k: v for k, v in report.items() if k != "config"})
        )
    write_json(Path(config.out) / "report.json", report)
    return report


def _of_split(
    rows: Sequence[Utterance], split: str | None, config: FitTokenizerConfig
) -> list[Utterance]:
    """Return the utterances of a split; None: of all. Raises DataError if there are none."""
    chosen = [u for u in rows if split in (None, u.split)]
    if not chosen:
        hint = ", or report_utterances=0" if split == REPORT_SPLIT else ""
        raise DataError(
            f"fit-tokenizer: the {config.corpus} corpus {config.path or ''} has no utterances in "
            f"split {split}; if the corpus has no splits, set split= (the whole "
            f"corpus){hint}, or give lists of ids (docs/data.md)"
        )
    return chosen


def _leave_out(problems: list[Problem], skip_bad: bool) -> None:
    """Log bad rows that are left out. Raises DataError for them if `skip_bad` is false."""
    if problems and not skip_bad:
        raise DataError(
            f"fit-tokenizer: {len(problems)} bad rows; repair them or set skip_bad=true:\n"
            f"{describe(problems, 50)}"
        )
    if problems:
        logger.warning("%d bad rows are left out:\n%s", len(problems), describe(problems, 5))


def usable(
    utterances: Iterable[Utterance], max_seconds: float, skip_bad: bool, texts: CorpusTexts
) -> Iterator[tuple[Utterance, Decoded]]:
    """Iterate over the utterances that can be read, with their waveforms and rates.

    Raises DataError for a text that cannot be spoken, or a recording that cannot be read or is
    longer than `max_seconds`, unless `skip_bad` is set.
    """
    for u in utterances:
        problems, decoded, _ = examine(u, 0, max_seconds, texts)
        _leave_out(problems, skip_bad)
        if decoded is not None and not problems:
            yield u, decoded


def sharpen(
    tokenizer: KMeansTokenizer,
    utterances: Sequence[Utterance],
    config: FitTokenizerConfig,
    units: SymbolUnits,
) -> KMeansTokenizer:
    """Return the tokenizer with codes fitted in the directions of its states that distinguish
    phonemes.

    The texts of the utterances (about max_frames states at most, speakers in turn) are aligned to
    the tokenizer's codes; the aligned phonemes are the classes of the projection. Raises
    ConfigError if projection_size does not fit.
    """
    # standardised states [T, D] of each utterance, and its phonemes
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    frames = 0
    turns = (utterances[i] for i in in_turn([u.speaker for u in utterances]))
    for u, wave in usable(
        turns, tokenizer.max_seconds, config.skip_bad, CorpusTexts(config.language)
    ):
        states = tokenizer.encoder(*wave)
        sequence = phoneme_states(units(u.text))
        if len(states) >= len(sequence):
            pairs.append((tokenizer.coordinates(states), sequence))
        frames += len(states)
        if frames >= config.max_frames:
            break
    codes = [tokenizer.nearest(s) for s, _ in pairs]
    emission = np.log2(
        fit_alignment(codes, [sequence for _, sequence in pairs], tokenizer.vocab_size, units.size)
    )
    labels = [
        parts_of_phonemes(best_path(emission, own, sequence))
        for own, (_, sequence) in zip(codes, pairs, strict=True)
    ]
    stacked = np.concatenate([s for s, _ in pairs])
    projection = discriminant_projection(stacked, np.concatenate(labels), config.projection_size)
    # not standardised again, because the projected directions have comparable spread
    centroids, _, _ = fit_centroids(stacked @ projection, config.vocab_size, config.seed, False)
    logger.info(
        "fit-tokenizer: %d directions from %d aligned utterances",
        config.projection_size,
        len(pairs),
    )
    tokenizer.provenance |= {
        "projection_size": config.projection_size,
        "aligned_utterances": len(pairs),
    }
    return tokenizer.projected(projection, centroids)


def parts_of_phonemes(labels: np.ndarray) -> np.ndarray:
    """Turn the phoneme of every frame [T] into its class [T]: PARTS · phoneme + the part of its
    stretch."""
    changes = np.flatnonzero(np.concatenate(([True], labels[1:] != labels[:-1], [True])))
    part = np.concatenate([np.arange(n) * PARTS // n for n in np.diff(changes)])
    return labels * PARTS + part


def discriminant_projection(
    states: np.ndarray, classes: np.ndarray, size: int, shrinkage: float = 0.01
) -> np.ndarray:
    """Return the `size` most discriminative directions of states [N, D] with classes [N]: [D, size]
    float32.

    Projected states have unit spread within a class, on average. shrinkage: share of the mean
    variance that is added to every direction of the within-class covariance. Raises ConfigError if
    there are fewer classes than directions.
    """
    labels, index = np.unique(classes, return_inverse=True)
    dimensions = states.shape[1]
    if not 0 < size <= min(dimensions, len(labels) - 1):
        raise ConfigError(
            f"projection_size={size}: {len(labels)} parts of phonemes in the speech and "
            f"{dimensions} dimensions allow 1 to {min(dimensions, len(labels) - 1)}; change "
            "projection_size, or fit on more speech"
        )
    counts = np.bincount(index).astype(np.float64)
    sums = np.zeros((len(labels), dimensions))
    np.add.at(sums, index, states.astype(np.float64))
    means = sums / counts[:, None]
    centred = states - means[index]
    within = centred.T @ centred / len(states)
    within += shrinkage * np.trace(within) / dimensions * np.eye(dimensions)
    deviations = means - states.mean(0)
    between = (deviations * counts[:, None]).T @ deviations / len(states)
    # between v = λ within v, the largest λ first; v' within v = 1. scikit-learn's LDA shrinks
    # `between` as well.
    directions = scipy.linalg.eigh(between, within)[1][:, : -size - 1 : -1]
    # the sign of an eigenvector is arbitrary; it is fixed, so that the codes' checksum repeats
    signs = np.sign(directions[np.abs(directions).argmax(0), np.arange(size)])
    return (directions * signs).astype(np.float32)


def describe_codes(
    tokenizer: SpeechTokenizer, utterances: Sequence[Utterance], units: SymbolUnits
) -> dict[str, Any]:
    """Return the usage of the codes on held-out speech, and the bits of a code that phonemes and
    voices predict.

    codes_used, perplexity (2 to the entropy), repeat_share (codes equal to the one before),
    code_entropy_bits, phoneme_bits with its chance level phoneme_bits_wrong_text, speaker_bits with
    speaker_bits_wrong_speaker.
    """
    waves = (u.load() for u in utterances)
    batches = one_ahead(of_one_rate(waves))
    codes = [row for batch, rate in batches for row in tokenizer.encode(batch, rate)]
    every = np.concatenate(codes)
    counts = np.bincount(every, minlength=tokenizer.vocab_size)
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log2(share)).sum())
    repeats = sum(int((c[1:] == c[:-1]).sum()) for c in codes)
    neighbours = sum(len(c) - 1 for c in codes)
    texts = [units(u.text) for u in utterances]
    return {
        "utterances": len(codes),
        "seconds": round(len(every) / tokenizer.rate_hz, 1),
        "codes_used": int((counts > 0).sum()),
        "perplexity": round(2**entropy, 1),
        "repeat_share": round(repeats / max(1, neighbours), 4),
        "code_entropy_bits": round(entropy, 3),
        **information(
            codes, texts, [u.speaker for u in utterances], tokenizer.vocab_size, units.size
        ),
    }


def information(
    codes: Sequence[np.ndarray],
    texts: Sequence[Sequence[int]],
    speakers: Sequence[str],
    vocab_size: int,
    num_labels: int,
) -> dict[str, float]:
    """Return the bits per code that the phoneme and the speaker predict on held-out utterances;
    nothing for fewer than two.

    For a label x with p(code | x) estimated on one half of the utterances, this is the mean over
    the other half of log2 p(code | x) / p(code), averaged over both directions. Speakers label
    whole utterances. Phonemes label frames through a Viterbi alignment with the same p(code | x),
    trained from a flat start (a discrete hidden Markov model). Since the alignment picks the best
    path, it predicts something even from wrong texts; that chance level is returned as well. Bits
    are below 0 if the estimate does not carry over to the other half. The measure is meant for
    corpora whose speakers read different sentences: if all read the same ones, the right speaker
    looks worse than a wrong one.
    """
    sequences = [phoneme_states(text) for text in texts]
    keep = [i for i, c in enumerate(codes) if len(c) >= len(sequences[i])]
    if len(keep) < 2:
        logger.warning("%d utterances are too few to estimate the bits per code", len(keep))
        return {}
    halves = keep[::2], keep[1::2]
    ids = {name: n for n, name in enumerate(sorted(set(speakers)))}
    voices = [np.full(len(c), ids[s]) for c, s in zip(codes, speakers, strict=True)]
    names = (
        "phoneme_bits",
        "phoneme_bits_wrong_text",
        "speaker_bits",
        "speaker_bits_wrong_speaker",
    )
    totals = dict.fromkeys(names, 0.0)
    for train, test in (halves, halves[::-1]):
        every = np.concatenate([codes[i] for i in train])
        marginal = smoothed(every, None, vocab_size, 1)[0]
        emission = fit_alignment(
            [codes[i] for i in train], [sequences[i] for i in train], vocab_size, num_labels
        )
        gain = np.log2(emission / marginal)  # [labels, codes]
        # wrong texts are those of utterances of similar length, so that only the words differ
        by_length = sorted(test, key=lambda i: len(sequences[i]))
        wrong = dict(zip(by_length, by_length[1:] + by_length[:1], strict=True))
        by_voice = np.concatenate([voices[i] for i in train])
        voice_gain = np.log2(smoothed(every, by_voice, vocab_size, len(ids)) / marginal)
        present = sorted(set(by_voice.tolist()))
        other = dict(zip(present, present[1:] + present[:1], strict=True))
        paired = [i for i in test if int(voices[i][0]) in other]
        pairs = {
            "phoneme_bits": [gain[best_path(gain, codes[i], sequences[i]), codes[i]] for i in test],
            "phoneme_bits_wrong_text": [
                gain[best_path(gain, codes[i], sequences[wrong[i]]), codes[i]]
                for i in test
                if len(sequences[wrong[i]]) <= len(codes[i])
            ],
            "speaker_bits": [voice_gain[voices[i], codes[i]] for i in paired],
            "speaker_bits_wrong_speaker": [
                voice_gain[other[int(voices[i][0])], codes[i]] for i in paired
            ],
        }
        for name, values in pairs.items():
            totals[name] += float(np.concatenate(values).mean()) / 2 if values else float("nan")
    return {name: round(value, 3) for name, value in totals.items()}


CONFIG = FitTokenizerConfig


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: `[--config FILE.yaml] [key=value …]`."""
    run_claimed(run, load_config(CONFIG, arguments))
