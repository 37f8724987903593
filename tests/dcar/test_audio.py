"""dcar.audio: real files in real formats, and every kind of broken one."""

import io
import logging
import os
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, settings
from hypothesis import strategies as st

from dcar import audio
from dcar.audio import audio_seconds, load_audio, load_segment, resample, save_audio
from dcar.errors import AudioError

RATE = 16_000


def tone(seconds: float = 0.5, rate: int = RATE, hz: float = 440.0) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def encoded(wave: np.ndarray, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    buffer = io.BytesIO()
    sf.write(buffer, wave, RATE, format=kind, subtype=subtype)
    return buffer.getvalue()


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32)


def written_by_ffmpeg(
    wave: np.ndarray, container: str, codec: str, rate: int = RATE, pipe: bool = False
) -> bytes:
    buffer = io.BytesIO()
    target = type("Pipe", (), {"write": lambda _, data: buffer.write(data)})() if pipe else buffer
    samples = np.round(wave * 32_767).astype(np.int16)[None]
    frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
    frame.sample_rate = rate
    with av.open(target, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        stream.bit_rate = 64_000
        file.mux([*stream.encode(frame), *stream.encode(None)])
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch) -> None:
    monkeypatch.setattr(audio, "_noted", set())


@pytest.mark.parametrize(
    ("suffix", "close"), [("wav", 1e-4), ("flac", 1e-4), ("ogg", 0.1), ("opus", 0.1), ("mp3", 1)]
)
def test_save_and_load_round_trip(tmp_path, suffix, close):
    wave = tone()
    save_audio(tmp_path / f"a.{suffix}", wave, RATE)
    back, rate = load_audio(tmp_path / f"a.{suffix}")
    assert (rate, back.dtype, back.ndim) == (RATE, np.float32, 1)
    assert abs(len(back) - len(wave)) <= 1152  # mp3 pads to frames
    if suffix != "mp3":
        assert np.abs(back - wave)[2000:-2000].max() < close
    assert [p.name for p in tmp_path.iterdir()] == [f"a.{suffix}"]  # no temporary file is left


def test_stereo_is_averaged_with_one_warning(tmp_path, caplog):
    left, right = tone(hz=300), tone(hz=500)
    for name in ("a.wav", "b.wav"):
        sf.write(tmp_path / name, np.stack([left, right], 1), RATE, subtype="FLOAT")
    with caplog.at_level(logging.DEBUG, "dcar.audio"):
        wave, _ = load_audio(tmp_path / "a.wav")
        load_audio(tmp_path / "b.wav")
    np.testing.assert_allclose(wave, (left + right) / 2, atol=1e-6)
    assert [r.levelname for r in caplog.records] == ["WARNING", "DEBUG"]
    assert "a.wav: 2 channels" in caplog.text


def test_8_khz_is_resampled_with_a_note(tmp_path, caplog):
    save_audio(tmp_path / "a.wav", tone(rate=8_000), 8_000)
    wave, rate = load_audio(tmp_path / "a.wav", RATE)
    assert rate == RATE
    assert len(wave) == RATE // 2
    assert np.argmax(np.abs(np.fft.rfft(wave))) == 220  # still 440 Hz: bins are 2 Hz wide
    assert "8000 Hz to 16000 Hz" in caplog.text


def test_every_broken_file_is_named_with_its_fault(tmp_path):
    (tmp_path / "folder.wav").mkdir()
    (tmp_path / "zero.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("this is not audio, but it has a wav suffix " * 20)
    (tmp_path / "cut.wav").write_bytes(encoded(tone())[:20])
    for name, wave in (
        ("empty", np.zeros(0, np.float32)),
        ("nan", np.r_[tone()[:-10], [np.nan] * 10]),
        ("inf", np.r_[tone()[:-1], np.inf]),
        ("silent", np.zeros(8000)),
        ("quiet", tone() * 1e-4),
        ("cancel", np.stack([tone(), -tone()], 1)),
        ("huge", tone() * 3e38),
        ("integers", tone() * 32_767),
    ):
        sf.write(tmp_path / f"{name}.wav", wave, RATE, subtype="FLOAT")
    sf.write(tmp_path / "low.wav", tone(rate=2_000), 2_000)
    for name, message in (
        ("missing", "does not exist"),
        ("folder", "a folder"),
        ("zero", "0 bytes"),
        ("text", "readable"),
        ("cut", "readable|no samples"),
        ("empty", "no samples"),
        ("nan", "10 of 8000 .*NaN"),
        ("inf", " 1 of 8000 .*infinite"),
        ("silent", "silent"),
        ("quiet", "silent"),
        ("cancel", "channels"),
        ("low", "2000 Hz"),
        ("huge", "full scale"),
        ("integers", "full scale"),
    ):
        with pytest.raises(AudioError, match=message) as error:
            load_audio(tmp_path / f"{name}.wav")
        assert str(tmp_path / f"{name}.wav") in str(error.value)


PAIRS = [(16_000, 24_000), (24_000, 16_000), (22_050, 16_000), (14_400.0, 16_000)]


@given(st.integers(200, 3000), st.sampled_from(PAIRS))
@settings(max_examples=40, deadline=None)
def test_resample_length_and_finiteness(n, pair):
    out = resample(np.random.default_rng(n).uniform(-0.5, 0.5, n).astype(np.float32), *pair)
    assert abs(len(out) - n * pair[1] / pair[0]) <= 1
    assert np.isfinite(out).all() and out.dtype == np.float32


def test_save_rejects_and_leaves_nothing(tmp_path):
    for name, wave, rate, message in (
        ("a.xyz", tone(), RATE, "'.xyz'"),
        ("a.wav", np.full(10, np.nan), RATE, "NaN"),
        ("a.wav", np.zeros((2, 10)), RATE, "mono"),
        ("a.wav", np.zeros(0), RATE, "mono"),
        ("a.opus", tone(rate=22_050), 22_050, "Opus only supports .* sample rate"),
    ):
        with pytest.raises(AudioError, match=message):
            save_audio(tmp_path / name, wave, rate)
    assert not list(tmp_path.iterdir())


def test_full_disk_keeps_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    save_audio(path, tone(), RATE)
    before = path.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(AudioError, match="a.wav: .*Errno 28"):
        save_audio(path, tone(hz=100), RATE)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.wav"]


def test_loud_samples_are_clipped(tmp_path, caplog):
    save_audio(tmp_path / "a.wav", tone() * 5, RATE)
    assert np.abs(load_audio(tmp_path / "a.wav")[0]).max() <= 1.0
    assert "clipped" in caplog.text


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "PCM_24"),
        ("WAV", "FLOAT"),
        ("RF64", "PCM_16"),
        ("W64", "PCM_16"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("CAF", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
    ],
)
def test_a_recording_that_was_cut_off_is_no_shorter_one(kind: str, subtype: str, tmp_path):
    whole = encoded(noise(2.0), kind, subtype)
    assert len(load_audio(whole)[0]) == pytest.approx(2 * RATE, abs=10)
    for share in (0.2, 0.5, 0.9, 0.95):
        cut = whole[: int(len(whole) * share)]
        (tmp_path / "cut").write_bytes(cut)
        for source in (cut, tmp_path / "cut"):
            with pytest.raises(AudioError, match="cut off|readable"):
                load_audio(source)


def test_headers_that_are_a_little_off_or_do_not_know_are_read(tmp_path):
    whole = encoded(tone(1.0))
    place = whole.index(b"data") + 4
    size = int.from_bytes(whole[place : place + 4], "little")
    # the size of the file; ffmpeg and sox writing to a pipe
    for claimed in (size + 36, 0xFFFFFFFF, 0x7FFFF000):
        written = whole[:place] + claimed.to_bytes(4, "little") + whole[place + 4 :]
        assert len(load_audio(written)[0]) == RATE
    with pytest.raises(AudioError, match=r"1.50 s.* 1.00 s"):
        load_audio(whole[:place] + (size * 3 // 2).to_bytes(4, "little") + whole[place + 4 :])


# format: where its header has a length, the tag before it or its place, and what stands for unknown
UNKNOWN = {
    "FLAC": [(21, b"\xf0\0\0\0\0")],
    "WAV": [(b"data", b"\0" * 4)],
    "WAVEX": [(b"data", b"\xff" * 4)],
    "AU": [(8, b"\xff" * 4)],
    "AIFF": [(b"SSND", b"\0" * 4)],
    "CAF": [(b"data", b"\xff" * 8)],
    "RF64": [(b"ds64\x1c\0\0\0", b"\0" * 24)],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_length_that_the_header_does_not_give_is_found_by_decoding(kind: str, tmp_path):
    """As programs write it that do not know it yet, and cannot go back in a pipe."""
    file, written = tmp_path / "a", bytearray(encoded(tone(1.0), kind))
    for place, unknown in UNKNOWN[kind]:
        at = written.index(place) + len(place) if isinstance(place, bytes) else place
        written[at : at + len(unknown)] = unknown
    file.write_bytes(written)
    for source in (file, bytes(written)):
        assert audio_seconds(source) == 1
        np.testing.assert_allclose(load_audio(source)[0], tone(1.0), atol=1e-4)
    np.testing.assert_allclose(load_segment(file, 0.25, 0.5)[0], tone(1.0)[4000:12_000], atol=1e-4)
    with pytest.raises(AudioError, match=r"0.75…1.25 s .* 1.00 s"):
        load_segment(file, 0.75, 0.5)


@pytest.mark.parametrize("after", [b"", b"LIST\x04\0\0\0INFO"])
def test_a_wav_without_samples_is_empty_whatever_other_chunks_follow(after: bytes):
    empty = encoded(np.zeros(0, np.float32)) + after
    assert audio_seconds(empty) == 0
    with pytest.raises(AudioError, match="no samples"):
        load_audio(empty)


def test_a_flac_without_a_length_that_was_cut_off_is_no_shorter_one():
    written = written_by_ffmpeg(noise(1.0), "flac", "flac", pipe=True)
    for share in (0.5, 0.9):
        with pytest.raises(AudioError, match="readable"):
            load_audio(written[: int(len(written) * share)])


def test_a_caf_of_twelve_channels_without_a_length():
    written = bytearray(encoded(np.repeat(tone(1.0)[:, None], 12, 1), "CAF"))
    at = written.index(b"data") + 4
    written[at : at + 8] = b"\xff" * 8
    np.testing.assert_allclose(load_audio(bytes(written))[0], tone(1.0), atol=1e-4)


def test_an_au_or_aiff_whose_header_says_zero_is_refused():
    """libsndfile and FFmpeg believe it."""
    au, aiff = bytearray(encoded(tone(), "AU")), bytearray(encoded(tone(), "AIFF"))
    au[8:12] = bytes(4)
    frames, size = aiff.index(b"COMM") + 10, aiff.index(b"SSND") + 4
    aiff[frames : frames + 4], aiff[size : size + 4] = bytes(4), b"\0\0\0\x08"
    for source in (au, aiff):
        with pytest.raises(AudioError, match="no samples"):
            load_audio(bytes(source))


def mp3_without_table(wave: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with sf.SoundFile(
        buffer, "w", RATE, 1, "MPEG_LAYER_III", format="MP3", bitrate_mode="VARIABLE"
    ) as file:
        file.write(wave)
    whole = buffer.getvalue()
    return whole[whole.index(whole[:2], 4) :]  # the table is a frame of its own


def id3(content: bytes, size: int) -> bytes:
    length = bytes(size >> 7 * place & 127 for place in (3, 2, 1, 0))
    return b"ID3\x04\0\0" + length + content.ljust(size, b"\0")


@pytest.mark.parametrize(
    "tag",
    [
        b"",
        id3(b"\xff\xfb\x90\0" * 32, 128),
        id3(b"COMM\0\0\0\x20\0\0\0eng\0More Info at example.org, Xing, VBRI", 300),
        id3(b"APIC" + b"\xff\xd8\xff\xe0\0\x10JFIF Info", 70_000),
    ],
)
def test_an_mp3_without_a_table_is_read_to_its_end(tag: bytes):
    """Loud first, then silent: an estimate by the bitrate of the first frame is too short. A word
    in a tag is no table."""
    wave = np.r_[noise(1.0), np.zeros(6 * RATE)]
    source = tag + mp3_without_table(wave)
    assert len(load_audio(source)[0]) == pytest.approx(len(wave), abs=2000)
    assert audio_seconds(source) == pytest.approx(7, abs=0.13)


@pytest.mark.parametrize("size", [300, 5000, 70_000])
def test_the_table_behind_a_long_tag_still_counts(size: int):
    """Its delay is left out, and it knows that the end is missing."""
    plain = encoded(noise(2.0), "MP3", "MPEG_LAYER_III")
    source = id3(b"", size) + plain
    np.testing.assert_array_equal(load_audio(source)[0], load_audio(plain)[0])
    assert audio_seconds(source) == 2
    with pytest.raises(AudioError, match="cut off"):
        load_audio(source[: size + len(plain) // 2])


def test_mp3_sounds_as_soundfile_decodes_it():
    whole = encoded(noise(2.0), "MP3", "MPEG_LAYER_III")
    np.testing.assert_allclose(
        load_audio(whole)[0], sf.read(io.BytesIO(whole), dtype="float32")[0], atol=1e-5
    )


@pytest.mark.parametrize("first_tag", [b"", id3(b"More Info", 100)])
def test_joined_mp3_are_read_to_the_last_end(first_tag: bytes, tmp_path):
    """Encoders add up to 2,300 samples to each; the order shows in the loudness."""
    one, two = tone(2.0), 0.1 * tone(1.0)
    joined = b"".join(
        first_tag + encoded(wave, "MP3", "MPEG_LAYER_III") + b"TAG".ljust(128, b"\0")
        for wave in (one, two)
    )
    (tmp_path / "a.mp3").write_bytes(joined)
    wave, _ = load_audio(tmp_path / "a.mp3")
    assert len(wave) == pytest.approx(3 * RATE, abs=2300)
    assert audio_seconds(tmp_path / "a.mp3") == len(wave) / RATE
    assert np.abs(wave[-RATE // 2 : -RATE // 4]).max() == pytest.approx(0.04, abs=0.01)
    end, _ = load_segment(tmp_path / "a.mp3", 2.4, 0.4)
    np.testing.assert_array_equal(end, wave[int(2.4 * RATE) : int(2.8 * RATE)])


@pytest.mark.parametrize("subtypes", [["VORBIS"] * 2, ["OPUS"] * 3, ["VORBIS", "OPUS"]])
def test_joined_ogg_are_read_to_the_last_end(subtypes: list[str], tmp_path):
    parts = [encoded(tone(1.0, hz=200 * (i + 1)), "OGG", s) for i, s in enumerate(subtypes)]
    (tmp_path / "a.ogg").write_bytes(b"".join(parts))
    alone = np.concatenate([sf.read(io.BytesIO(part), dtype="float32")[0] for part in parts])
    for source in (tmp_path / "a.ogg", b"".join(parts)):
        np.testing.assert_array_equal(load_audio(source)[0], alone)
        assert audio_seconds(source) == len(subtypes)
    np.testing.assert_array_equal(
        load_segment(tmp_path / "a.ogg", 0.5, 1.0)[0], alone[RATE // 2 : RATE * 3 // 2]
    )
    for cut in (parts[0][: len(parts[0]) // 2] + parts[1], parts[0] + parts[1][:-20]):
        with pytest.raises(AudioError, match="cut off|readable"):
            load_audio(cut)


def test_joined_flac_are_read_to_the_last_end(tmp_path):
    parts = [encoded(tone(1.0, hz=200 * (i + 1)), "FLAC", "PCM_16") for i in range(3)]
    alone = np.concatenate([sf.read(io.BytesIO(part), dtype="float32")[0] for part in parts])
    (tmp_path / "a.flac").write_bytes(b"".join(parts))
    for source in (tmp_path / "a.flac", b"".join(parts)):
        np.testing.assert_array_equal(load_audio(source)[0], alone)
    with pytest.raises(AudioError, match="cut off|readable"):
        load_audio(b"".join(parts)[: -len(parts[2]) // 2])


def test_joined_recordings_of_different_rates_are_refused():
    for kind, subtype in (("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("FLAC", "PCM_16")):
        other = io.BytesIO()
        sf.write(other, tone(rate=44_100), 44_100, format=kind, subtype=subtype)
        with pytest.raises(AudioError, match="rate or number of channels changes"):
            load_audio(encoded(tone(), kind, subtype) + other.getvalue())


@pytest.mark.parametrize(
    ("container", "codec", "rate", "pipe"),
    [
        ("ipod", "aac", 44_100, False),
        ("mp4", "alac", RATE, False),
        ("adts", "aac", RATE, False),
        ("webm", "libopus", 48_000, False),
        ("webm", "libopus", 48_000, True),
        ("asf", "wmav2", RATE, False),
    ],
)
def test_m4a_aac_webm_and_wma(container: str, codec: str, rate: int, pipe: bool, tmp_path):
    """Coded frames of up to 2,048 samples fill up the end."""
    file = tmp_path / "a"
    file.write_bytes(written_by_ffmpeg(tone(2.0, rate), container, codec, rate, pipe))
    wave, its_rate = load_audio(file)
    assert its_rate == rate
    assert len(wave) == pytest.approx(2 * rate, abs=2048)
    assert audio_seconds(file) == len(wave) / rate
    assert np.argmax(np.abs(np.fft.rfft(wave[:rate]))) == 440
    assert len(load_segment(file, 0.5, 1.0)[0]) == rate


@pytest.mark.parametrize(("container", "codec"), [("ipod", "aac"), ("webm", "libopus")])
def test_m4a_and_webm_that_were_cut_off(container: str, codec: str):
    whole = written_by_ffmpeg(tone(3.0, 48_000), container, codec, 48_000)
    for share in (0.2, 0.5, 0.9):
        with pytest.raises(AudioError, match="cut off|readable"):
            load_audio(whole[: int(len(whole) * share)])


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:9,\n{}\n", "ffconcat version 1.0\nfile {}\n"])
def test_a_list_of_files_opens_none(text: str, tmp_path):
    save_audio(tmp_path / "a.wav", tone(), RATE)
    (tmp_path / "list.mp3").write_text(text.format(tmp_path / "a.wav"))
    with pytest.raises(AudioError, match="readable"):
        load_audio(tmp_path / "list.mp3")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "pipe", "pipe"),
        (Path("/dev/zero"), "pipe"),
        (tmp_path / ("x" * 10_000), "xxx"),
        (tmp_path / "a\0b", "does not exist"),
        (tmp_path / "pipe" / "a.wav", "does not exist"),
        (tmp_path / "\ud800", "does not exist"),
    ]:
        with pytest.raises(AudioError, match=message):
            load_audio(path)
        with pytest.raises(AudioError, match=message):
            load_segment(path, 0, 1)
        assert audio_seconds(path) is None
