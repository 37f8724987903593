"""Training data of the vocoder: one portable file (the pack), and the same data unpacked onto one
device.

A pack contains each recording once and lists *rows*: a recording played at some speed, with the
tokens and the speaker features of exactly that signal. Playing at another speed moves pitch and
formants, so a corpus with few speakers benefits more. Waves are resampled when the pack is
unpacked. Tokens have the rate of the corpus' tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.config import load_config, setting
from dcar.corpus.rows import Utterance
from dcar.errors import ConfigError, DataError
from dcar.prepare.prepared import load_prepared, prepared_info, recording_of
from dcar.prepare.recordings import source_utterances
from dcar.process import claimed, own_device, run_command
from dcar.progress import Progress
from dcar.tokens.base import fitted
from dcar.tokens.codebook import codebook_of
from dcar.tokens.kmeans import KMeansTokenizer, states_of
from dcar.tokens.load import load_tokenizer
from dcar.voices.features import (
    EMBEDDING_DIM,
    FRAME_HOP,
    MIN_VOICED_FRAMES,
    SAMPLE_RATE,
    track_f0,
    voice_statistics,
)

logger = logging.getLogger(__name__)

FORMAT = "dcar-vocoder-pack-1"
MAKE = "make one: python -m dcar.vocoder.training.pack prepared=runs/prepared out=pack.safetensors"
FRAME_RATE = SAMPLE_RATE // FRAME_HOP
MIN_SECONDS = 0.5  # shortest row to train on


@dataclass(frozen=True)
class PackRow:
    """One signal to train on: a recording at a speed."""

    recording: int  # index into the recordings
    speed: float
    # int64 [T]; token k covers samples [n k, n (k + 1)) of the signal, n = 24000 / token rate
    tokens: np.ndarray
    embedding: np.ndarray  # float32 [256], speaker embedding of the signal at this speed
    voice: str  # rows of one voice share speaker features at random during training
    validation: bool
    # float16 [T, P], the encoder's states, which were quantised to the tokens
    states: np.ndarray | None = None
    rate: int = SAMPLE_RATE  # original sampling rate in Hz: the signal has nothing above half of it


def write_pack(
    out: str | Path,
    recordings: Iterable[np.ndarray],
    rows: Sequence[PackRow],
    tokenizer_checksum: str,
    token_rate: float = 50,
    codebook: np.ndarray | None = None,
) -> None:
    """Write a pack (safetensors). recordings: float32 waves at 24 kHz.

    token_rate: tokens per second. codebook: the tokenizer's centroids [V, P], which initialise the
    token embedding. Raises DataError if a token is not a whole number of frames, or if there is
    nothing to pack.
    """
    recordings, token_rate = list(recordings), whole_rate(token_rate, out)
    if not rows or not recordings:
        raise DataError(f"{out}: there is nothing to pack; the prepared dataset has no rows")
    parts = [
        torch.from_numpy((np.clip(r, -1, 1) * 32767).round().astype(np.int16)) for r in recordings
    ]
    wide = max(int(np.max(r.tokens, initial=0)) for r in rows) > np.iinfo(np.int16).max
    voices = sorted({(r.voice, r.speed) for r in rows})
    number = {key: i for i, key in enumerate(voices)}
    tensors = {
        "audio": torch.cat(parts),
        "audio_offsets": _offsets([len(p) for p in parts]),
        "tokens": torch.cat(
            [torch.from_numpy(np.asarray(r.tokens, np.int32 if wide else np.int16)) for r in rows]
        ),
        "token_offsets": _offsets([len(r.tokens) for r in rows]),
        "recording": torch.tensor([r.recording for r in rows]),
        "speed": torch.tensor([r.speed for r in rows], dtype=torch.float64),
        "embedding": torch.from_numpy(np.stack([r.embedding for r in rows])).to(torch.float16),
        "voice": torch.tensor([number[r.voice, r.speed] for r in rows]),
        "validation": torch.tensor([r.validation for r in rows]),
        "rate": torch.tensor([r.rate for r in rows]),
    }
    if rows[0].states is not None:
        tensors["states"] = torch.cat(
            [torch.from_numpy(np.asarray(r.states, dtype=np.float16)) for r in rows]
        )
    if codebook is not None:
        tensors["codebook"] = torch.from_numpy(np.ascontiguousarray(codebook, dtype=np.float32))
    header = {
        "format": FORMAT,
        "tokenizer_checksum": tokenizer_checksum,
        "token_rate": str(token_rate),
        "voices": json.dumps([f"{voice} x{speed:g}" for voice, speed in voices]),
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, metadata=header)


def pack_digest(path: str | Path) -> str:
    """Return the SHA-256 of a pack's content. safetensors does not fix the order of the header,
    so two packs of the same content may differ as files."""
    with Path(path).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        content = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        return hashlib.file_digest(file, lambda: content).hexdigest()


def whole_rate(token_rate: float, where: str | Path) -> int:
    """Return `token_rate` as an int. Raises DataError if a token is not a whole number of the
    vocoder's frames of 10 ms."""
    if token_rate <= 0 or token_rate != int(token_rate) or FRAME_RATE % int(token_rate):
        raise DataError(
            f"{where}: has tokens of {token_rate:g} Hz, but the vocoder's frames run at "
            f"{FRAME_RATE} Hz, so only rates of 100, 50, 25, 20, 10 … can be trained; choose a "
            "tokenizer with such a rate"
        )
    return int(token_rate)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths).tolist()])


class Crop(NamedTuple):
    """Part of some rows; zeros outside the row, except log_f0, which repeats its end values."""

    tokens: Tensor  # int64 [B, T]
    mask: Tensor  # float32 [B, T], 1 inside the row
    log_f0: Tensor  # float32 [B, F], F = T frames_per_token
    voiced: Tensor  # float32 [B, F]
    positions: Tensor  # int64 [B, T], index of each token in VocoderData.tokens

    @property
    def frame_mask(self) -> Tensor:
        """Mask of the frames inside the row, float32 [B, F], 1 inside."""
        return self.mask.repeat_interleave(self.voiced.shape[1] // self.mask.shape[1], dim=1)


@dataclass
class VocoderData:
    """Everything that a training step reads, as flat tensors on one device; R rows, S samples, N
    tokens in total."""

    waves: Tensor  # int16 [S], the rows one after another, samples_per_token samples per token
    tokens: Tensor  # int64 [N]
    log_f0: Tensor  # float32 [N frames_per_token]
    voiced: Tensor  # float32 [N frames_per_token]
    lengths: Tensor  # int64 [R], tokens
    speaker: Tensor  # float32 [R, 298], speaker features
    voice: Tensor  # int64 [R]
    validation: Tensor  # bool [R]
    top: Tensor  # float32 [R], highest frequency in Hz that the row's recording contains
    tokenizer_checksum: str
    token_rate: int = 50  # tokens per second
    codebook: Tensor | None = None  # float32 [V, P], the tokenizer's centroids if it has any
    # float16 [N, P], the states that were quantised to the tokens, if the pack has them
    states: Tensor | None = None

    def __post_init__(self) -> None:
        self.starts = self.lengths.cumsum(0) - self.lengths  # int64 [R], first token of each row

    @property
    def samples_per_token(self) -> int:
        return SAMPLE_RATE // self.token_rate

    @property
    def frames_per_token(self) -> int:
        return FRAME_RATE // self.token_rate

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device) -> VocoderData:
        """Unpack a file onto `device`: decode, change speed, track pitch. Raises DataError if
        the file is not a valid pack."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                pack = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: not a readable training pack: {error}; {MAKE}") from error
        if header.get("format") != FORMAT:
            raise DataError(
                f"{path}: has format {header.get('format')}, but this program reads {FORMAT}; "
                f"{MAKE}"
            )
        token_rate = whole_rate(float(header["token_rate"]), path)
        samples_per_token = SAMPLE_RATE // token_rate
        recordings = pack["audio"].split(pack["audio_offsets"].diff().tolist())
        counts = pack["token_offsets"].diff().tolist()
        by_token = {name: pack[name].split(counts) for name in ("tokens", "states") if name in pack}
        rows: list[dict[str, Tensor]] = []
        for row, count in enumerate(Progress(counts, desc="unpack", unit="row")):
            if count < MIN_SECONDS * token_rate:
                continue
            recording = recordings[int(pack["recording"][row])].numpy() / np.float32(32767)
            speed, rate = float(pack["speed"][row]), int(pack["rate"][row])
            # independent of the speed, as in the features of a prompt and of `dcar prepare`
            top = min(rate, SAMPLE_RATE) / 2
            played = resample(recording, SAMPLE_RATE * speed, SAMPLE_RATE)
            size = count * samples_per_token
            if abs(len(played) - size) > 3 * samples_per_token:
                raise DataError(
                    f"{path}: {len(played)} samples of audio but tokens for {size}, so they "
                    "belong to other audio; prepare the corpus again"
                )
            wave = torch.from_numpy(fitted(played, size)).to(device)
            log_f0, voiced = track_f0(wave)
            if int(voiced.sum()) < MIN_VOICED_FRAMES:
                continue
            embedding = pack["embedding"][row].to(device, torch.float32)
            speaker = torch.cat([embedding, voice_statistics(wave, log_f0, voiced, top)])
            rows.append(
                {
                    "waves": (wave.clamp(-1, 1) * 32767).round().to(torch.int16),
                    "log_f0": log_f0,
                    "voiced": voiced.float(),
                    "speaker": speaker[None],
                    "top": torch.tensor([top]),
                    "lengths": torch.tensor([count]),
                    "voice": pack["voice"][row][None],
                    "validation": pack["validation"][row][None],
                    **{name: parts[row] for name, parts in by_token.items()},
                }
            )
        if not rows:
            raise DataError(
                f"{path}: no row has at least {MIN_SECONDS} s and {MIN_VOICED_FRAMES} voiced "
                "frames; pack a corpus with longer utterances"
            )
        if len(rows) < len(counts):
            logger.warning(
                "%s: %d rows are left out, because they are too short or have too few voiced "
                "frames",
                path,
                len(counts) - len(rows),
            )
        whole = {
            name: torch.cat([row.pop(name) for row in rows]).to(device) for name in list(rows[0])
        }
        return cls(
            **{**whole, "tokens": whole["tokens"].long()},
            token_rate=token_rate,
            tokenizer_checksum=header["tokenizer_checksum"],
            codebook=pack.get("codebook"),
        )

    @classmethod
    def join(cls, parts: Sequence[VocoderData]) -> VocoderData:
        """Return several packs as one; no two of them share a voice. Raises DataError if they
        have different tokenizers, or if only some of them have states."""
        first = parts[0]
        for number, part in enumerate(parts[1:], 2):
            if (part.tokenizer_checksum, part.token_rate) != (
                first.tokenizer_checksum,
                first.token_rate,
            ):
                raise DataError(
                    f"data: pack 1 has tokens of {first.tokenizer_checksum[:12]} at "
                    f"{first.token_rate} Hz, but pack {number} of {part.tokenizer_checksum[:12]} "
                    f"at {part.token_rate} Hz; packs of different tokenizers cannot be trained on "
                    "together: prepare all corpora with one tokenizer"
                )
            if (part.states is None) != (first.states is None):
                raise DataError(
                    f"data: only one of packs 1 and {number} has states; make all packs with "
                    "states=true, or none"
                )
        if len(parts) == 1:
            return first
        voices = np.cumsum([0, *(int(part.voice.max()) + 1 for part in parts)]).tolist()
        columns = ["waves", "tokens", "log_f0", "voiced", "lengths", "speaker", "validation", "top"]
        columns += [] if first.states is None else ["states"]
        whole: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in columns
        }
        return replace(
            first,
            **whole,
            voice=torch.cat(
                [part.voice + shift for part, shift in zip(parts, voices, strict=False)]
            ),
        )

    def crop(self, rows: Tensor, first: Tensor, tokens: int) -> Crop:
        """Return crops of `tokens` tokens from token `first` [B] of `rows` [B]; both ends may
        extend beyond the row."""
        # positions [B, T] within the row
        steps = first[:, None] + torch.arange(tokens, device=rows.device)
        length, start = self.lengths[rows, None], self.starts[rows, None]
        inside = (steps >= 0) & (steps < length)
        at = start + steps.clamp_min(0).minimum(length - 1)
        ids = self.tokens[at] * inside
        frames = self.frames_per_token
        frame = (at[..., None] * frames + torch.arange(frames, device=rows.device)).flatten(1)
        by_frame = inside.repeat_interleave(frames, dim=1)
        return Crop(ids, inside.float(), self.log_f0[frame], self.voiced[frame] * by_frame, at)

    def wave(self, crop: Crop) -> Tensor:
        """Return the recording of a crop, float32 [B, T samples_per_token], zeros outside the
        row."""
        samples = self.samples_per_token
        inner = torch.arange(samples, device=self.waves.device)
        sample = (crop.positions[..., None] * samples + inner).flatten(1)
        return self.waves[sample].float() / 32767 * crop.mask.repeat_interleave(samples, dim=1)


def pack_training_data(
    prepared_dir: str | Path,
    out: str | Path,
    train_splits: Sequence[str] = ("train",),
    validation_splits: Sequence[str] = ("dev",),
    states: bool = False,
    device: str = "cpu",
    hours: float = 0,
) -> None:
    """Write a pack from a prepared corpus: its tokens, speeds and speaker embeddings, and the
    corpus' own audio.

    prepared_dir: folder written by `dcar prepare`; prepare it with several `speeds` if voices are
    few (rows played at another speed are voices of their own). states: also store the states that
    were quantised to the tokens, as a further target of the acoustic model; for them, the k-means
    tokenizer reads the corpus again on `device`. hours: maximum hours of each split, evenly spread
    over its rows; 0 = all. Pitch and the rest of the speaker features are computed when the pack is
    unpacked. Train a corpus without validation splits together with one that has them
    (`VocoderData.join`). Raises AudioError or DataError with the id of an unusable utterance,
    DataError if no training split was prepared, ConfigError if `states` is set and the tokenizer is
    not k-means.
    """
    utterances, info = source_utterances(prepared_dir), prepared_info(prepared_dir)
    codebook = codebook_of(info.tokenizer, prepared_dir)
    tokenizer: Any = None
    if states:
        tokenizer = load_tokenizer(info.tokenizer.spec, own_device(device))
    if states and not isinstance(tokenizer, KMeansTokenizer):
        raise ConfigError(
            f"{prepared_dir}: tokenizer {info.tokenizer.spec} has no states to store; omit "
            "states=true"
        )
    recordings: list[np.ndarray] = []
    rows: list[PackRow] = []
    sources: list[Utterance] = []
    # index of a recording, its length in seconds, and its original rate
    by_file: dict[str, tuple[int, float, int]] = {}
    rate_hz = info.tokenizer.rate_hz
    present = [split for split in (*train_splits, *validation_splits) if split in info.counts]
    if not set(present) & set(train_splits):
        raise DataError(
            f"{prepared_dir}: has no split {', '.join(train_splits)}; prepare it with "
            "splits=[train,…]"
        )
    for split in present:
        chosen = evenly(load_prepared(prepared_dir, split), hours)
        for row in Progress(chosen, desc=f"pack {split}", unit="row"):
            utterance_id, speed = recording_of(row)
            utterance = utterances[utterance_id]
            if utterance.id not in by_file:
                wave, rate = utterance.load()
                by_file[utterance.id] = len(recordings), len(wave) / rate, rate
                recordings.append(resample(wave, rate, SAMPLE_RATE))
            tokens = np.asarray(row["speech"], dtype=np.int64)
            recording, seconds, rate = by_file[utterance.id]
            if abs(seconds / speed - len(tokens) / rate_hz) > 3 / rate_hz:
                raise DataError(
                    f"{prepared_dir}: tokens and audio of utterance {row['id']} differ in length "
                    "by more than three tokens; prepare the corpus again"
                )
            embedding = np.asarray(row["voice"][:EMBEDDING_DIM], dtype=np.float32)
            sources.append(utterance)
            rows.append(
                PackRow(
                    recording,
                    speed,
                    tokens,
                    embedding,
                    row["speaker"],
                    split in validation_splits,
                    rate=rate,
                )
            )
    if tokenizer is not None:
        rows = list(_with_states(tokenizer, sources, rows))
    write_pack(out, recordings, rows, info.tokenizer.checksum, rate_hz, codebook)


def evenly(rows: Any, hours: float) -> Any:
    """Return about `hours` of a prepared split, evenly spread over its rows; all of it if hours
    is 0."""
    share = 3600 * hours / sum(rows["duration"])
    if not 0 < share < 1:
        return rows
    return rows.select((np.arange(round(share * len(rows))) / share).astype(int))


def _with_states(
    tokenizer: KMeansTokenizer, sources: Sequence[Utterance], rows: Sequence[PackRow]
) -> Iterator[PackRow]:
    """Yield the rows with their states, float16 [T, P] in the space of the centroids. Raises
    DataError if these give other tokens than the row has; one in a hundred may differ, because
    batches and devices round differently."""
    waves = (_played(utterance, row.speed) for utterance, row in zip(sources, rows, strict=True))
    computed = Progress(
        states_of(waves, tokenizer.encoder), desc="states", unit="row", total=len(rows)
    )
    for utterance, row, (_, _, states) in zip(sources, rows, computed, strict=True):
        coordinates = tokenizer.coordinates(states)
        codes = tokenizer.nearest(coordinates)
        if len(codes) != len(row.tokens) or (codes != row.tokens).sum() > 1 + len(codes) // 100:
            raise DataError(
                f"{utterance.source}: {utterance.id} now gives other tokens than it was "
                "prepared with; prepare the corpus again"
            )
        yield replace(row, states=coordinates.astype(np.float16))


def _played(utterance: Utterance, speed: float) -> tuple[np.ndarray, int]:
    """Return a recording at a speed as preparation gives it to the encoder, and its rate."""
    wave, rate = utterance.load()
    return resample(wave, rate * speed, ENCODER_SAMPLE_RATE), ENCODER_SAMPLE_RATE


@dataclass
class PackConfig:
    """Settings of `python -m dcar.vocoder.training.pack`: a prepared corpus for `dcar
    train-vocoder`."""

    prepared: str = setting(meaning="Folder written by `dcar prepare`.", place="folder")
    out: str = setting(meaning="Pack to write (.safetensors).", place="file")
    states: bool = setting(
        False,
        "Also store the states that were quantised to the tokens, as a further training target.",
    )
    device: str = setting(
        "auto",
        "Device of the tokenizer that computes states: cpu, cuda, or auto = a GPU if there is one.",
    )
    hours: float = setting(
        0, "Maximum hours of each split, evenly spread over its rows; 0 = all.", minimum=0
    )


CONFIG = PackConfig


def main(arguments: list[str] | None = None) -> None:
    config = load_config(CONFIG, arguments)
    with claimed(config.out):
        pack_training_data(
            config.prepared,
            config.out,
            states=config.states,
            device=config.device,
            hours=config.hours,
        )


if __name__ == "__main__":
    sys.exit(run_command("dcar.vocoder.training.pack", main))
