"""Reading and writing audio: float32 mono waveforms [samples] in −1…1, always passed with their
sample rate in Hz.

Anything that libsndfile reads (wav, flac, ogg vorbis/opus, mp3) is read from a path or from encoded
bytes. Anything that would silently spoil training is an error: no bytes, no samples, a recording
that was cut off, NaN, infinity, digital silence. A length that the header does not give, as in
files written to a pipe, is found by decoding. Several channels and a lower sample rate are
converted, with a note in the log: a warning the first time that a kind of conversion occurs in a
process, debug level afterwards, so that a corpus of stereo files does not fill the log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile as sf
import soxr

from dcar.errors import AudioError
from dcar.storage import replacing

logger = logging.getLogger(__name__)

ENCODER_SAMPLE_RATE = 16_000
"""Sample rate in Hz of speech tokenizers, recognisers, speaker encoders and scorers."""
SILENCE_PEAK = 1e-4
"""A waveform whose largest magnitude is below this (−80 dBFS) counts as silent."""
LOUDEST = 100.0
"""Largest plausible magnitude: no recording is 40 dB above full scale, but float files may
contain any number."""
MIN_SAMPLE_RATE = 4_000
MAX_SAMPLE_RATE = 384_000
CUT_TOLERANCE = 0.02
"""Seconds by which a recording may be shorter than its header states; some programs write
headers that are slightly off."""
_BLOCK = 1 << 22
"""Samples decoded at once: a header may promise more than fits into memory."""
_UNKNOWN = 0x7FFF0000
"""Smallest of the sizes written by programs that do not know the length yet (streams)."""
_REPAIRED = re.compile(
    r"^ *(?:data|SSND|Data Size|Riff size|riff) *: (\d+) \(should be (\d+)\)", re.MULTILINE
)
"""Note in libsndfile's log if it reads fewer bytes than the header of a wav, aiff, au, caf, rf64
or w64 file promises."""
_ENDLESS = 1 << 48
"""Smallest number of samples that is not a length: libsndfile returns 2^63 if a FLAC header
leaves it open."""
_CHUNKED = {
    b"RIFF": (12, "<I", b"data"),
    b"RF64": (12, "<I", b"data"),
    b"FORM": (12, ">I", b"SSND"),
    b"caff": (8, ">q", b"data"),
}
"""First bytes of a format -> offset of its first chunk, encoding of chunk sizes, name of the
chunk with the samples."""
_OGG_PAGE = 27 + 255 + 255 * 255  # bytes of the longest page

_FORMATS = {
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".opus": ("OGG", "OPUS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
}
OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
_noted: set[str] = set()
_noted_lock = threading.Lock()


def _note(kind: str, message: str) -> None:
    with _noted_lock:
        first = kind not in _noted
        _noted.add(kind)
    logger.log(logging.WARNING if first else logging.DEBUG, "%s", message)


def _name(source: str | Path | bytes, where: str | None) -> str:
    if where is not None:
        return where
    return f"audio in memory ({len(source)} bytes)" if isinstance(source, bytes) else str(source)


def load_audio(
    source: str | Path | bytes, sample_rate: int | None = None, *, where: str | None = None
) -> tuple[np.ndarray, int]:
    """Return the waveform [samples] float32 mono and its sample rate in Hz, given a path or the
    bytes of an audio file.

    It is resampled to `sample_rate` if given; channels are averaged. `where` names the audio in
    messages (a manifest line, say). Raises AudioError: missing or unreadable file, 0 bytes, no
    samples, fewer samples than the header promises, NaN or infinity, samples far beyond full scale,
    silence.
    """
    name = _name(source, where)
    if (len(source) if isinstance(source, bytes) else _file_size(source, name)) == 0:
        raise AudioError(f"{name}: the audio file has 0 bytes; copy or record it again")
    with _opened(source, name) as file:
        samples, rate = _decode(file, source), file.samplerate
        promised = _promised_frames(file, len(samples), source)
    if promised is None:
        raise AudioError(
            f"{name}: cut off: the last page of the Ogg file is missing or incomplete; copy it "
            "again, or convert it if it was recorded from a stream"
        )
    if promised - len(samples) > CUT_TOLERANCE * rate:
        raise AudioError(
            f"{name}: cut off: its header promises {promised / rate:.2f} s, but the file contains "
            f"{len(samples) / rate:.2f} s; copy it again, or convert it if nothing is missing"
        )
    return _checked(samples, rate, sample_rate, name)


def _file_size(path: str | Path, name: str) -> int:
    """Return the size of an audio file in bytes. Raises AudioError if there is none, or it is
    not a regular file (a pipe would never end)."""
    try:
        state = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a path with NUL
        raise AudioError(f"{name}: this audio file does not exist; check the path") from None
    except OSError as error:
        raise AudioError(
            f"{name}: cannot be opened ({error.strerror}); check the path and its permissions"
        ) from None
    if stat.S_ISDIR(state.st_mode):
        raise AudioError(f"{name}: is a folder, not an audio file")
    if not stat.S_ISREG(state.st_mode):
        raise AudioError(
            f"{name}: is a pipe or a device, not an audio file; save the audio to a file first"
        )
    return state.st_size


class _Sequential(sf.SoundFile):
    """Audio file that is read from start to end. soundfile itself seeks after every read, which
    fails at the end of a FLAC file of unknown length."""

    def seekable(self) -> bool:
        return False


@contextlib.contextmanager
def _opened(source: str | Path | bytes, name: str) -> Iterator[sf.SoundFile]:
    """Open an audio file for reading. Raises AudioError for any error of libsndfile or soundfile
    within the block."""
    try:
        with _sound_file(source) as file:
            yield file
    except (
        sf.LibsndfileError,
        RuntimeError,
        OSError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as error:
        raise AudioError(
            f"{name}: not readable as audio ({error}); convert it to wav, flac or ogg"
        ) from None


def _sound_file(source: str | Path | bytes) -> sf.SoundFile:
    """Return a file, or a copy of it with the number of samples in the header if the header
    lacks it."""
    try:
        file = _Sequential(io.BytesIO(source) if isinstance(source, bytes) else str(source))
    except sf.LibsndfileError:  # which caf files of unknown length raise
        if (sized := _with_size(source)) is None:
            raise
        return _Sequential(io.BytesIO(sized))
    if file.frames == 0 and (sized := _with_size(source)) is not None:
        file.close()
        file = _Sequential(io.BytesIO(sized))
    return file


def _with_size(source: str | Path | bytes) -> bytes | None:
    """Return a wav, rf64, aiff, au or caf file whose header gives no length, with the size of
    the samples that follow. None for other files, and if nothing or only other chunks follow."""
    head = _bytes_of(source, 0, 4)
    if head != b".snd" and head not in _CHUNKED:
        return None
    data = _bytes_of(source, 0)
    if head == b".snd":
        return data[:8] + b"\xff" * 4 + data[12:]  # the value for an unknown length
    at, kind, samples = _CHUNKED[head]
    chunks = list(_chunks(data, at, kind))
    place = next((i for i, (name, _, _) in enumerate(chunks) if name == samples), None)
    if place is None:
        return None
    in_ds64 = head == b"RF64" and chunks[place][2] == 0xFFFFFFFF
    if chunks[place][2] > 8 and not in_ds64:  # 8 bytes of SSND stand before the samples
        return None
    rest = chunks[place + 1 :]
    if (
        rest
        and all(name.isalnum() for name, _, _ in rest)
        and len(data) - sum(rest[-1][1:]) in (0, 1)
    ):
        return None
    start, width = chunks[place][1], struct.calcsize(kind)
    held = len(data) - start
    if in_ds64:  # after the size of the file
        field, written = chunks[0][1] + 8, struct.pack("<Q", held)
    else:
        field, written = start - width, struct.pack(kind, min(held, 0xFFFFFFFE))
    return data[:field] + written + data[field + len(written) :]


def _chunks(data: bytes, at: int, kind: str) -> Iterator[tuple[bytes, int, int]]:
    """Iterate over name, start and size of the chunks of a file, starting at `at`."""
    head = 4 + struct.calcsize(kind)
    while at + head <= len(data):
        [size] = struct.unpack_from(kind, data, at + 4)
        yield data[at : at + 4], at + head, size
        at += head + max(size, 0) + (0 if kind == ">q" else size % 2)


def _decode(file: sf.SoundFile, source: str | Path | bytes) -> np.ndarray:
    """Decode all samples [samples, channels] float32, block by block."""
    samples = _read_all(file)
    if _is_estimate(file, source) and len(samples) >= file.frames:
        # libsndfile reads no further than its estimate of the length, which is wrong where the
        # bitrate changes
        with _Sequential(io.BytesIO(_with_mp3_table(_bytes_of(source, 0)))) as again:
            longer = _read_all(again)
        samples = longer if len(longer) > len(samples) else samples
    return samples


def _read_all(file: sf.SoundFile) -> np.ndarray:
    size = max(1, _BLOCK // file.channels)
    blocks = [file.read(size, dtype="float32", always_2d=True)]
    while len(blocks[-1]):
        blocks.append(file.read(size, dtype="float32", always_2d=True))
    return blocks[0] if len(blocks) <= 2 else np.concatenate(blocks)


def _is_estimate(file: sf.SoundFile, source: str | Path | bytes) -> bool:
    """Return True for an mp3 without the table that encoders write at the start: libsndfile
    estimates its length."""
    return file.format == "MP3" and not re.search(rb"Xing|Info|VBRI", _bytes_of(source, 0, 4096))


def _with_mp3_table(data: bytes) -> bytes:
    """Return an mp3 file with a table before its first frame that gives it a length beyond that
    of any file."""
    tags = 0
    if data[:3] == b"ID3":  # seven bits of every byte count
        tags = 10 + sum(byte << 7 * place for place, byte in enumerate(reversed(data[6:10])))
    # eleven bits set, layer III, and neither of the bitrates and sample rates that are reserved
    start = next(
        (
            i
            for i in range(tags, len(data) - 3)
            if data[i] == 0xFF
            and data[i + 1] & 0xE6 == 0xE2
            and data[i + 1] & 0x18 != 8
            and 0 < data[i + 2] >> 4 < 15
            and data[i + 2] & 12 != 12
        ),
        None,
    )
    if start is None:
        return data
    header = bytearray(data[start : start + 4])
    # MPEG-1, of twice the samples a frame
    first, mono = header[1] >> 3 & 3 == 3, header[3] >> 6 == 3
    rate = (44_100, 48_000, 32_000)[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[header[1] >> 3 & 3]
    header[1] |= 1  # no checksum
    header[2] = header[2] & 0x0C | 0xE0  # the highest bitrate, so that the table fits
    size = 144 * 320_000 // rate if first else 72 * 160_000 // rate
    before = (17 if mono else 32) if first else (9 if mono else 17)
    table = bytes(header) + bytes(before) + b"Xing" + struct.pack(">II", 1, 1 << 26)
    return data[:start] + table.ljust(size, b"\0") + data[start:]


def _promised_frames(file: sf.SoundFile, held: int, source: str | Path | bytes) -> float | None:
    """Return the number of samples that the header of a recording promises, of which `held` were
    decoded; None if its end is missing."""
    if file.format == "OGG":
        return held if _ogg_ends(source) else None
    # without the table that encoders write at the start, the length is only estimated
    if file.format == "MP3":
        return held if _is_estimate(file, source) else file.frames
    promised = float(file.frames if file.frames < _ENDLESS else held)
    for written, there in _REPAIRED.findall(file.extra_info):
        if int(there) < int(written) < _UNKNOWN and int(there) > 0:
            promised = max(promised, held * int(written) / int(there))
    return promised


def _ogg_ends(source: str | Path | bytes) -> bool:
    """Return whether the last page of an Ogg file is whole and marked as the last one (RFC 3533,
    section 6)."""
    tail = _bytes_of(source, -_OGG_PAGE, _OGG_PAGE)
    page = tail.rfind(b"OggS\0")
    if page < 0 or len(tail) < page + 27 or not tail[page + 5] & 4:
        return False
    body = page + 27 + tail[page + 26]
    return len(tail) >= body + sum(tail[page + 27 : body])


def _bytes_of(source: str | Path | bytes, start: int, count: int | None = None) -> bytes:
    """Return `count` bytes of a file from `start` on (from the end, if negative), all if `count`
    is None."""
    if isinstance(source, bytes):
        return source[start:][:count]
    with open(source, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size + start) if start < 0 else start)
        return file.read(count)


def audio_seconds(source: str | Path | bytes) -> float | None:
    """Return the duration in seconds of an audio file (path or bytes), from its header or, if
    that does not give it, by decoding; None if the file is not readable."""
    try:
        if not isinstance(source, bytes):
            _file_size(source, str(source))
        with _opened(source, "") as file:
            return (_known_frames(file, source) or len(_decode(file, source))) / file.samplerate
    except AudioError:
        return None


def _known_frames(file: sf.SoundFile, source: str | Path | bytes) -> int | None:
    """Return the number of samples of a file by its header, None if only decoding finds it."""
    return None if file.frames >= _ENDLESS or _is_estimate(file, source) else file.frames


def load_segment(
    path: str | Path,
    start: float,
    duration: float,
    channel: int = 0,
    sample_rate: int | None = None,
    *,
    where: str | None = None,
) -> tuple[np.ndarray, int]:
    """Return the waveform [samples] float32 of one stretch of a recording (seconds), of one
    channel, and its rate in Hz.

    Only the stretch is decoded if the format can seek (wav, flac, ogg). Raises AudioError as
    `load_audio` does, and if the stretch or the channel is not in the recording.
    """
    name = _name(str(path), where)
    _file_size(path, name)
    if not (math.isfinite(start) and math.isfinite(duration)):
        raise AudioError(
            f"{name}: impossible stretch from {start} of {duration} s; correct the manifest"
        )
    with _opened(str(path), name) as file:
        rate, first = file.samplerate, round(start * file.samplerate)
        count, channels = round(duration * rate), file.channels
        frames = _known_frames(file, path)
        decoded = _decode(file, path) if frames is None else np.zeros((0, channels), np.float32)
        frames = len(decoded) if frames is None else frames
        # manifests round times: a few milliseconds past the end are the end
        if start < 0 or duration <= 0 or first + count > frames + CUT_TOLERANCE * rate:
            raise AudioError(
                f"{name}: {start:g}…{start + duration:g} s is not in the recording of "
                f"{frames / rate:.2f} s; does the manifest belong to this file?"
            )
        if not 0 <= channel < channels:
            raise AudioError(
                f"{name}: no channel {channel} in a recording with {channels}; correct the manifest"
            )
        if len(decoded):
            samples = decoded[first : first + count, channel : channel + 1]
        else:
            file.seek(min(first, frames))
            samples = file.read(count, dtype="float32", always_2d=True)[:, channel : channel + 1]
        if min(first + count, frames) - first - len(samples) > CUT_TOLERANCE * rate:
            raise AudioError(
                f"{name}: cut off: {len(samples) / rate:.2f} s of a stretch of {duration:.2f} s "
                "are present; copy it again"
            )
    return _checked(samples, rate, sample_rate, name)


def _checked(
    samples: np.ndarray, rate: int, sample_rate: int | None, name: str
) -> tuple[np.ndarray, int]:
    """Return samples [samples, channels] as a mono waveform at the wanted rate. Raises
    AudioError if it is empty, not finite or silent."""
    if len(samples) == 0:
        raise AudioError(f"{name}: the audio has no samples; copy or record it again")
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise AudioError(
            f"{name}: sample rate {rate} Hz is outside {MIN_SAMPLE_RATE}…{MAX_SAMPLE_RATE} Hz; "
            "convert it"
        )
    bad = int((~np.isfinite(samples)).sum())
    if bad:
        raise AudioError(
            f"{name}: {bad} of {samples.size} samples are NaN or infinite; repair or remove the "
            "file"
        )
    loudest = float(np.abs(samples).max())
    if loudest > LOUDEST:
        raise AudioError(
            f"{name}: samples of up to {loudest:g}, but full scale is 1; the file is damaged, or "
            "contains unscaled integers: scale and save it again"
        )
    if samples.shape[1] > 1:
        _note("channels", f"{name}: {samples.shape[1]} channels averaged to one")
    wave = np.ascontiguousarray(samples.mean(axis=1, dtype=np.float32))
    if float(np.abs(wave).max()) < SILENCE_PEAK:
        cancel = " after averaging its channels, which cancel" if loudest >= SILENCE_PEAK else ""
        raise AudioError(
            f"{name}: the audio is silent{cancel} (peak below {SILENCE_PEAK}); check the recording"
        )
    if sample_rate is not None and sample_rate != rate:
        if rate < sample_rate:
            _note(
                f"rate {rate}",
                f"{name}: resampled from {rate} Hz to {sample_rate} Hz; the upper band stays empty",
            )
        wave, rate = resample(wave, rate, sample_rate), sample_rate
    return wave, rate


def resample(wave: np.ndarray, from_hz: float, to_hz: float) -> np.ndarray:
    """Return `wave` [samples] at `to_hz`, round(samples · to / from) samples, band-limited by
    soxr (high quality)."""
    if from_hz <= 0 or to_hz <= 0:
        raise AudioError(f"cannot resample from {from_hz} Hz to {to_hz} Hz: rates must be positive")
    wave = np.asarray(wave, dtype=np.float32)
    if wave.ndim != 1:
        raise AudioError(f"a mono waveform [samples] is needed, got shape {wave.shape}")
    if from_hz == to_hz:
        return wave
    out = soxr.resample(wave, from_hz, to_hz)
    if len(out) == 0:
        raise AudioError(
            f"{len(wave)} samples at {from_hz} Hz are too few to resample to {to_hz} Hz"
        )
    return np.asarray(out, dtype=np.float32)


def check_suffix(path: str | Path) -> None:
    """Raise AudioError unless `save_audio` can write files with this suffix."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise AudioError(
            f"{path}: unknown audio suffix {Path(path).suffix!r}; use one of {', '.join(_FORMATS)}"
        )


@contextlib.contextmanager
def audio_writer(path: str | Path, sample_rate: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Open an audio file to which samples [n] in −1…1 are appended; it is never in memory as a
    whole, and appears complete or not at all.

    Raises AudioError if it cannot be written, `path` has an unknown suffix, or its format cannot
    store the rate.
    """
    check_suffix(path)
    kind, subtype = _FORMATS[Path(path).suffix.lower()]
    if subtype == "OPUS" and sample_rate not in OPUS_RATES:
        raise AudioError(
            f"{path}: Opus cannot store {sample_rate} Hz, only {OPUS_RATES}; resample first or "
            "use .flac"
        )
    try:
        with (
            replacing(path) as part,
            sf.SoundFile(str(part), "w", sample_rate, 1, subtype, format=kind) as file,
        ):
            yield file.write
    except (OSError, sf.LibsndfileError, ValueError) as error:
        raise AudioError(
            f"{path}: could not be written ({error}); free some space, or choose another folder, "
            "format or sample rate"
        ) from error


def save_audio(path: str | Path, wave: np.ndarray, sample_rate: int) -> None:
    """Write `wave` [samples] as wav, flac (16 bit), ogg, opus or mp3, by the suffix of `path`.

    Samples beyond ±1 are clipped with a note. The file appears complete or not at all. Raises
    AudioError as `audio_writer` does, and for a wrong shape, NaN or infinity.
    """
    wave = np.asarray(wave, dtype=np.float32)
    if wave.ndim != 1 or wave.size == 0:
        raise AudioError(
            f"{path}: a mono waveform [samples] with samples is needed, got shape {wave.shape}"
        )
    if not np.isfinite(wave).all():
        raise AudioError(
            f"{path}: the waveform contains NaN or infinite samples; nothing was written"
        )
    if float(np.abs(wave).max()) > 1.0:
        _note("clipped", f"{path}: samples beyond ±1 clipped")
        wave = np.clip(wave, -1.0, 1.0)
    with audio_writer(path, sample_rate) as write:
        write(wave)
