"""Reading and writing audio: float32 mono waveforms [samples] in −1…1, always passed with their
sample rate in Hz.

libsndfile reads wav, flac, ogg vorbis/opus, aiff, au, caf, w64; FFmpeg (PyAV) reads mp3, aac, m4a,
webm, wma, amr, and what has a header without a length, as files written to a pipe: a length that
is not known is found by decoding. Anything that would silently spoil training is an error: no
bytes, no samples, a recording that was cut off, NaN, infinity, digital silence. Several channels
and a lower sample rate are converted, with a note in the log: a warning the first time that a kind
of conversion occurs in a process, debug level afterwards, so that a corpus of stereo files does not
fill the log.
"""

import contextlib
import io
import logging
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import av
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
_NO_LENGTH = {
    "wav": re.compile(
        rb"RIFF.{4}WAVE.*?data\0{4}(?!\Z|[\w ]{4}...\0)|RF64.{4}WAVEds64.{12}\0{8}", re.DOTALL
    ),
    "flac": re.compile(rb"fLaC.{17}[\0\x10 0@P`p\x80\x90\xa0\xb0\xc0\xd0\xe0\xf0]\0{4}", re.DOTALL),
    "caf": re.compile(rb"caff.*?data\xff{8}", re.DOTALL),
}
"""Formats of FFmpeg, and headers of theirs that leave the length open. In a wav without samples
nothing follows them, or another chunk."""
_STREAMS = "mp3,aac,mov,matroska,asf,amr"
"""Formats of FFmpeg that libsndfile does not read, or not to the end."""
_MP3_TABLE = re.compile(
    rb"\xff[\xe2-\xff]..\0{9,34}(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f](....)", re.DOTALL
)
"""Frame before the first one with sound, in which encoders write the number of frames: its header,
zeros for the side information, a name, flags, the number."""
_PADDING = 0.1
"""Seconds by which the duration of m4a, webm and wma may exceed the samples: it counts frames."""
_CHANGES = "its sample rate or number of channels changes on the way"
_FIRST_PAGE = re.compile(rb"OggS\0\x02")
"""Start of an Ogg stream; a file may have several, one after another."""
_FLAC_START = re.compile(rb"fLaC[\0\x80]\0\0\x22")
"""Start of a FLAC stream; libsndfile reads the first of several. `audio_seconds` does not look for
further ones, so that filters by duration read headers alone."""
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


def note(kind: str, message: str) -> None:
    """Log a message: as a warning the first time in a process that it is of this kind, else at
    debug level."""
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
    with _reading(name):
        samples, rate, promised = _decode(source, name)
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


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise AudioError for any error of libsndfile or FFmpeg within the block."""
    try:
        yield
    except (
        sf.LibsndfileError,
        av.FFmpegError,
        RuntimeError,
        OSError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as error:
        reason = "unknown or damaged" if isinstance(error, av.FFmpegError) else error
        raise AudioError(
            f"{name}: not readable as audio ({reason}); convert it to wav, flac or ogg"
        ) from None


def _decode(source: str | Path | bytes, name: str) -> tuple[np.ndarray, int, float]:
    """Return all samples [samples, channels] float32, their rate, and how many the header
    promises."""
    with _sound_files(source, name) as files:
        if not files:
            return _decode_with_ffmpeg(source)
        if files[0].format == "FLAC" and len(links := _split(source, _FLAC_START)) > 1:
            decoded = [_decode(link, name) for link in links]
            if len({(rate, samples.shape[1]) for samples, rate, _ in decoded}) > 1:
                raise ValueError(_CHANGES)
            samples, rates, lengths = zip(*decoded, strict=True)
            return np.concatenate(samples), rates[0], sum(lengths)
        parts = [file.read(dtype="float32", always_2d=True) for file in files]
        promised = [_promised(file, len(part)) for file, part in zip(files, parts, strict=True)]
        return np.concatenate(parts), files[0].samplerate, sum(promised)


@contextlib.contextmanager
def _sound_files(source: str | Path | bytes, name: str) -> Iterator[list[sf.SoundFile]]:
    """Open a recording with libsndfile: one file, or one for each of several Ogg streams. Empty
    if libsndfile does not find its length, but FFmpeg does. Raises AudioError if the end of an Ogg
    stream is missing."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(
                sf.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source))
            )
        except sf.LibsndfileError:
            yield []
            return
        if file.format == "MP3" or (
            not 0 < file.frames < _ENDLESS and _format_without_length(source)
        ):
            yield []
            return
        links = _ogg_links(source) if file.format == "OGG" else []
        if not all(_ogg_ends(link) for link in links):
            raise AudioError(
                f"{name}: cut off: the last page of the Ogg file is missing or incomplete; copy it "
                "again, or convert it if it was recorded from a stream"
            )
        files = [file]
        if len(links) > 1:
            files = [stack.enter_context(sf.SoundFile(io.BytesIO(link))) for link in links]
        if len({(file.samplerate, file.channels) for file in files}) > 1:
            raise ValueError(_CHANGES)
        yield files


def _format_without_length(source: str | Path | bytes) -> str | None:
    """Return the name of a recording's format if its header leaves the length open."""
    data = _bytes_of(source)
    return next((name for name, header in _NO_LENGTH.items() if header.match(data)), None)


def _promised(file: sf.SoundFile, held: int) -> float:
    """Return the number of samples that the header of a recording promises, of which `held` were
    decoded."""
    promised = held if file.format == "OGG" else file.frames
    for written, there in _REPAIRED.findall(file.extra_info):
        if 0 < int(there) < int(written) < _UNKNOWN:
            promised = max(promised, held * int(written) / int(there))
    return promised


def _decode_with_ffmpeg(source: str | Path | bytes) -> tuple[np.ndarray, int, float]:
    """Return what `_decode` does. As players do, it passes over damaged frames of mp3 and aac,
    and over tags among them."""
    options = {
        "format_whitelist": _format_without_length(source) or _STREAMS,
        "ignore_length": "1",  # of wav
    }
    with (
        io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file,
        av.open(file, "r", options=options) as container,
    ):
        stream = container.streams.best("audio")
        if not isinstance(stream, av.AudioStream):
            raise ValueError("it has no sound")
        to_float = av.AudioResampler("flt")  # one plane: PyAV crashes at more than eight
        blocks: list[np.ndarray] = []
        rates: set[tuple[int, int]] = set()
        places = []
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.InvalidDataError:
                if container.format.name not in ("mp3", "aac"):
                    raise
                continue
            places += [packet.pos] * bool(packet.size)
            rates |= {(frame.sample_rate, frame.layout.nb_channels) for frame in frames}
            if len(rates) > 1:
                raise ValueError(_CHANGES)
            for frame in frames:
                for floats in to_float.resample(frame):
                    blocks.append(floats.to_ndarray().reshape(-1, frame.layout.nb_channels))
        if not rates:
            return np.zeros((0, 1), np.float32), stream.rate, 0.0
        [(rate, _)] = rates
        samples = np.concatenate(blocks)
        promised = 0.0
        if container.format.name == "mp3" and places:
            table = _MP3_TABLE.search(_bytes_of(source)[: places[0]])
            missing = int.from_bytes(table[1], "big") - len(places) if table else 0
            promised = len(samples) + missing * stream.codec_context.frame_size
        elif container.format.name not in ("mp3", "aac", "amr") and len(container.streams) == 1:
            promised = ((container.duration or 0) / av.time_base - _PADDING) * rate
    return samples, rate, promised


def _bytes_of(source: str | Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else Path(source).read_bytes()


def _ogg_links(source: str | Path | bytes) -> list[bytes]:
    """Return the streams of an Ogg file that follow one another, each a file of its own."""
    links = _split(source, _FIRST_PAGE)
    # streams side by side begin with the first pages of all of them
    return [b"".join(links)] if any(link.count(b"OggS\0") == 1 for link in links) else links


def _split(source: str | Path | bytes, start: re.Pattern[bytes]) -> list[bytes]:
    """Return the parts of a recording that begin like `start`."""
    data = _bytes_of(source)
    starts = [first.start() for first in start.finditer(data)]
    return [data[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]


def _ogg_ends(stream: bytes) -> bool:
    """Return whether the last page of an Ogg stream is whole and marked as the last one (RFC 3533,
    section 6)."""
    tail = stream[-_OGG_PAGE:]
    page = tail.rfind(b"OggS\0")
    if page < 0 or len(tail) < page + 27 or not tail[page + 5] & 4:
        return False
    body = page + 27 + tail[page + 26]
    return len(tail) >= body + sum(tail[page + 27 : body])


def audio_seconds(source: str | Path | bytes) -> float | None:
    """Return the duration in seconds of an audio file (path or bytes), from its header or, if
    that does not give it, by decoding; None if the file is not readable."""
    try:
        if not isinstance(source, bytes):
            _file_size(source, str(source))
        with _reading(""), _sound_files(source, "") as files:
            if files:
                return sum(file.frames for file in files) / files[0].samplerate
            samples, rate, _ = _decode_with_ffmpeg(source)
            return len(samples) / rate
    except AudioError:
        return None


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
    with _reading(name), _sound_files(str(path), name) as files:
        decoded = None
        if len(files) == 1:
            frames, rate, channels = files[0].frames, files[0].samplerate, files[0].channels
        else:
            decoded, rate, _ = _decode(path, name)
            frames, channels = decoded.shape
        first, count = round(start * rate), round(duration * rate)
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
        if decoded is None:
            files[0].seek(min(first, frames))
            samples = files[0].read(count, dtype="float32", always_2d=True)
        else:
            samples = decoded[first : first + count]
        samples = samples[:, channel : channel + 1]
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
        raise AudioError(
            f"{name}: the audio has no samples by its header; copy, record or convert it again"
        )
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
        note("channels", f"{name}: {samples.shape[1]} channels averaged to one")
    wave = np.ascontiguousarray(samples.mean(axis=1, dtype=np.float32))
    if float(np.abs(wave).max()) < SILENCE_PEAK:
        cancel = " after averaging its channels, which cancel" if loudest >= SILENCE_PEAK else ""
        raise AudioError(
            f"{name}: the audio is silent{cancel} (peak below {SILENCE_PEAK}); check the recording"
        )
    if sample_rate is not None and sample_rate != rate:
        if rate < sample_rate:
            note(
                f"rate {rate}",
                f"{name}: resampled from {rate} Hz to {sample_rate} Hz; the upper band stays empty",
            )
        wave, rate = resample(wave, rate, sample_rate), sample_rate
    return wave, rate


def resample(wave: np.ndarray, from_hz: float, to_hz: float) -> np.ndarray:
    """Return `wave` [samples] at `to_hz`, round(samples · to / from) samples, band-limited by
    soxr (high quality)."""
    wave = np.asarray(wave, dtype=np.float32)
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
        note("clipped", f"{path}: samples beyond ±1 clipped")
        wave = np.clip(wave, -1.0, 1.0)
    with audio_writer(path, sample_rate) as write:
        write(wave)
