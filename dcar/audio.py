"""Audio in and out: float32 mono waveforms [samples] in −1…1, always passed with their sample rate in Hz.

Anything libsndfile reads (wav, flac, ogg vorbis/opus, mp3) comes in from a path or from encoded bytes. What would
spoil training in silence is an error here: no bytes, no samples, NaN, infinity, digital silence. What can be repaired
(several channels, a lower sample rate) is repaired, with a note in the log: a warning the first time a kind of repair
happens in a process, debug level afterwards, so that a corpus of stereo files does not fill the log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import soundfile as sf
import soxr

from dcar.errors import AudioError

logger = logging.getLogger(__name__)

ENCODER_SAMPLE_RATE = 16_000
"""Hz that speech tokenizers, recognisers, speaker encoders and scorers hear."""
SILENCE_PEAK = 1e-4
"""A waveform whose largest magnitude is below this (−80 dBFS) counts as silent."""
MIN_SAMPLE_RATE = 4_000
MAX_SAMPLE_RATE = 384_000

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
    """Waveform [samples] float32 mono and its sample rate in Hz, from a path or from the bytes of an audio file.

    Resampled to `sample_rate` if given; channels are averaged. `where` names the audio in messages (a manifest line,
    say). Raises AudioError: missing or unreadable file, 0 bytes, no samples, NaN or infinity, silence.
    """
    name = _name(source, where)
    if isinstance(source, bytes):
        size: int = len(source)
        file: io.BytesIO | str = io.BytesIO(source)
    else:
        path = Path(source)
        if not path.exists():
            raise AudioError(f"{name}: there is no such audio file; check the path")
        if path.is_dir():
            raise AudioError(f"{name}: is a folder, not an audio file")
        size, file = path.stat().st_size, str(path)
    if size == 0:
        raise AudioError(f"{name}: the audio file has 0 bytes; copy or record it again")
    try:
        samples, rate = sf.read(file, dtype="float32", always_2d=True)  # [samples, channels]
    except (sf.LibsndfileError, RuntimeError, OSError, ValueError) as error:
        raise AudioError(f"{name}: not readable as audio ({error}); convert it to wav, flac or ogg") from None
    return _checked(samples, rate, sample_rate, name)


def audio_seconds(source: str | Path | bytes) -> float | None:
    """Duration in seconds from the header of an audio file (path or bytes), None where there is no readable header."""
    try:
        info = sf.info(io.BytesIO(source) if isinstance(source, bytes) else str(source))
    except (sf.LibsndfileError, RuntimeError, OSError, ValueError):
        return None
    return info.frames / info.samplerate if info.samplerate else None


def load_segment(
    path: str | Path, start: float, duration: float, channel: int = 0, sample_rate: int | None = None, *,
    where: str | None = None,
) -> tuple[np.ndarray, int]:  # fmt: skip
    """Waveform [samples] float32 of one stretch of a recording (seconds), of one channel, and its rate in Hz.

    Only the stretch is decoded where the format can seek (wav, flac, ogg). Raises AudioError as `load_audio`, and where
    the stretch or the channel is not in the recording.
    """
    name = _name(str(path), where)
    if not Path(path).is_file():
        raise AudioError(f"{name}: there is no such audio file; check the path")
    try:
        with sf.SoundFile(str(path)) as file:
            rate, first = file.samplerate, round(start * file.samplerate)
            count, channels = round(duration * rate), file.channels
            # manifests round times: a few milliseconds past the end are the end
            if start < 0 or duration <= 0 or first + count > file.frames + 0.02 * rate:
                raise AudioError(
                    f"{name}: {start:g}…{start + duration:g} s is not in the recording of {file.frames / rate:.2f} s; "
                    "does the manifest belong to this file?"
                )
            if not 0 <= channel < channels:
                raise AudioError(f"{name}: channel {channel} of a recording with {channels}; correct the manifest")
            file.seek(min(first, file.frames))
            samples = file.read(count, dtype="float32", always_2d=True)[:, channel : channel + 1]
    except (sf.LibsndfileError, RuntimeError, OSError, ValueError) as error:
        raise AudioError(f"{name}: not readable as audio ({error}); convert it to wav, flac or ogg") from None
    return _checked(samples, rate, sample_rate, name)


def _checked(samples: np.ndarray, rate: int, sample_rate: int | None, name: str) -> tuple[np.ndarray, int]:
    """[samples, channels] → mono waveform, refused if it is empty, not finite or silent, at the wanted rate."""
    if len(samples) == 0:
        raise AudioError(f"{name}: the audio holds no samples; copy or record it again")
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise AudioError(f"{name}: sample rate {rate} Hz is outside {MIN_SAMPLE_RATE}…{MAX_SAMPLE_RATE} Hz; convert it")
    bad = int((~np.isfinite(samples)).sum())
    if bad:
        raise AudioError(f"{name}: {bad} of {samples.size} samples are NaN or infinite; repair or remove the file")
    if samples.shape[1] > 1:
        _note("channels", f"{name}: {samples.shape[1]} channels averaged to one")
    wave = np.ascontiguousarray(samples.mean(axis=1, dtype=np.float32))
    if float(np.abs(wave).max()) < SILENCE_PEAK:
        cancel = " after averaging its channels, which cancel" if float(np.abs(samples).max()) >= SILENCE_PEAK else ""
        raise AudioError(f"{name}: the audio is silent{cancel} (peak below {SILENCE_PEAK}); check the recording")
    if sample_rate is not None and sample_rate != rate:
        if rate < sample_rate:
            _note(f"rate {rate}", f"{name}: resampled from {rate} Hz to {sample_rate} Hz; the upper band stays empty")
        wave, rate = resample(wave, rate, sample_rate), sample_rate
    return wave, rate


def resample(wave: np.ndarray, from_hz: float, to_hz: float) -> np.ndarray:
    """`wave` [samples] at `to_hz`, round(samples · to / from) samples, band-limited by soxr (high quality)."""
    if from_hz <= 0 or to_hz <= 0:
        raise AudioError(f"cannot resample from {from_hz} Hz to {to_hz} Hz: rates must be positive")
    wave = np.asarray(wave, dtype=np.float32)
    if wave.ndim != 1:
        raise AudioError(f"a mono waveform [samples] is needed, got shape {wave.shape}")
    if from_hz == to_hz:
        return wave
    out = soxr.resample(wave, from_hz, to_hz)
    if len(out) == 0:
        raise AudioError(f"{len(wave)} samples at {from_hz} Hz are too few to resample to {to_hz} Hz")
    return np.asarray(out, dtype=np.float32)


def audio_bytes(wave: np.ndarray, sample_rate: int, suffix: str = ".wav", *, where: str = "audio in memory") -> bytes:
    """`wave` [samples] as the bytes of a wav, flac (16 bit), ogg, opus or mp3 file, by `suffix`.

    Samples beyond ±1 are clipped with a note. Raises AudioError, which begins with `where`, for a wrong shape, NaN or
    infinity, an unknown suffix, or a rate that the format cannot store.
    """
    if suffix.lower() not in _FORMATS:
        raise AudioError(f"{where}: unknown audio suffix {suffix!r}; use one of {', '.join(_FORMATS)}")
    kind, subtype = _FORMATS[suffix.lower()]
    wave = np.asarray(wave, dtype=np.float32)
    if wave.ndim != 1 or wave.size == 0:
        raise AudioError(f"{where}: a mono waveform [samples] with samples is needed, got shape {wave.shape}")
    if not np.isfinite(wave).all():
        raise AudioError(f"{where}: the waveform holds NaN or infinite samples; nothing was written")
    if subtype == "OPUS" and sample_rate not in OPUS_RATES:
        raise AudioError(f"{where}: Opus cannot store {sample_rate} Hz, only {OPUS_RATES}; resample first or use .flac")
    if float(np.abs(wave).max()) > 1.0:
        _note("clipped", f"{where}: samples beyond ±1 clipped")
        wave = np.clip(wave, -1.0, 1.0)
    buffer = io.BytesIO()
    try:
        sf.write(buffer, wave, sample_rate, format=kind, subtype=subtype)
    except (RuntimeError, ValueError) as error:
        raise AudioError(f"{where}: cannot be encoded ({error}); choose another format or sample rate") from error
    return buffer.getvalue()


def save_audio(path: str | Path, wave: np.ndarray, sample_rate: int) -> None:
    """Write `wave` [samples] as wav, flac (16 bit), ogg, opus or mp3, by the suffix of `path`; see `audio_bytes`.

    The file appears complete or not at all; AudioError also where it cannot be written (full disk).
    """
    path = Path(path)
    encoded = audio_bytes(wave, sample_rate, path.suffix, where=str(path))
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(handle, "wb") as file:
            file.write(encoded)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise AudioError(f"{path}: could not be written ({error}); free some space or choose another folder") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    """The process's umask; Linux tells it without setting it, which other threads would notice."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
