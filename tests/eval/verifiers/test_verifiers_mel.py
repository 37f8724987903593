"""PCG by mel frames: its groups, and the statistics that it needs. Its rule is that of PCG
(test_verifiers_rules.py)."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_verifiers_groups import sets_of
from tiny_corpora import RATE, tone, toy_prepare, toy_settings, write_manifest
from tiny_data import ToyTokenizer
from tiny_decoders import tiny_decoder
from tiny_verifiers import tiny_statistics

from dcar.audio import load_audio, resample
from dcar.errors import ConfigError, DataError
from dcar.methods import Models, make_methods
from dcar.model.statistics import MEL_BANDS, VerifierStatistics
from dcar.prepare.prepared import load_prepared
from dcar.voices.features import LogMel
from eval.analysis.fit_verifiers import mean_mel
from eval.verifiers.pcg import MelGroupVerifier, TokenGroups, build_groups

UNSEEN = (4, 9)
CODES, EOS = 12, 12


def sounding(**changes) -> VerifierStatistics:
    """Statistics of twelve codes of which two never occurred."""
    counts = torch.full((CODES,), 5)
    counts[list(UNSEEN)] = 0
    generator = torch.Generator().manual_seed(0)  # few directions and a common level, as in speech
    means = (
        torch.randn(CODES, 3, generator=generator) @ torch.randn(3, MEL_BANDS, generator=generator)
        - 6
    )
    return tiny_statistics(mel_means=means * (counts > 0)[:, None], mel_counts=counts, **changes)


def expected_groups(found: VerifierStatistics, theta: float) -> list[list[int]]:
    """Distinct G(t) by loops in float64, in the order of their codes; the end of speech alone."""
    heard = [t for t in range(CODES) if t not in UNSEEN]
    frames = found.mel_means.double().numpy()
    centred = frames - frames[heard].mean(0)
    groups: list[list[int]] = []
    for t in range(CODES):
        ids = [t]
        if t in heard:
            ids = [
                s
                for s in heard
                if s == t
                or centred[t] @ centred[s]
                > theta * math.sqrt(centred[t] @ centred[t] * (centred[s] @ centred[s]))
            ]
        if ids not in groups:
            groups.append(ids)
    return [*groups, [EOS]]


def groups_of(theta: float) -> TokenGroups:
    return build_groups(sounding().centred_mel(), theta)


@pytest.mark.parametrize("theta", [-0.5, 0.0, 0.6, 0.99])
def test_groups_equal_brute_force_and_unheard_codes_are_alone(theta):
    found = sets_of(groups_of(theta))
    assert found == [tuple(ids) for ids in expected_groups(sounding(), theta)]
    assert all((code,) in found for code in UNSEEN)
    assert max(map(len, found)) > 1 or theta == 0.99


def test_groups_by_mel_are_not_those_by_embeddings():
    decoder = tiny_decoder()
    models = Models(
        decoder, statistics=sounding(decoder=decoder.checksum(), tokenizer=decoder.config.tokenizer)
    )
    by_sound, by_embedding = make_methods(["pcg-mel-0.5", "pcg-0.5"], models)
    assert type(by_sound.method) is MelGroupVerifier
    assert sets_of(by_sound.method.groups) != sets_of(by_embedding.method.groups)
    assert by_sound.identity["statistics"] and "statistics" not in by_embedding.identity


def test_missing_statistics_are_refused():
    decoder = tiny_decoder()
    with pytest.raises(ConfigError, match="'pcg-mel-0.5': .*`dcar fit-verifiers`"):
        make_methods(["pcg-mel-0.5"], Models(decoder))
    deaf = tiny_statistics(decoder=decoder.checksum(), tokenizer=decoder.config.tokenizer)
    with pytest.raises(ConfigError, match="`dcar fit-verifiers mel_utterances"):
        make_methods(["pcg-mel-0.5"], Models(decoder, statistics=deaf))


def test_frames_are_saved_with_the_other_statistics(tmp_path):
    found = sounding()
    found.save_pretrained(tmp_path)
    loaded = VerifierStatistics.from_pretrained(tmp_path)
    assert torch.equal(loaded.mel_means, found.mel_means) and torch.equal(
        loaded.mel_counts, found.mel_counts
    )
    assert loaded.centred_mel().isnan().any(1).nonzero()[:, 0].tolist() == list(UNSEEN)
    assert torch.allclose(loaded.centred_mel().nanmean(0), torch.zeros(MEL_BANDS), atol=1e-5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A manifest of tones, prepared at two speeds by a tokenizer that hears their pitch."""
    path = tmp_path_factory.mktemp("mel")
    waves = [
        np.concatenate([tone(0.4, 150 + 90 * i), 0.1 * tone(0.4, 900 - 120 * i)]) for i in range(5)
    ]
    manifest = write_manifest(path / "corpus", [{} for _ in waves], waves)
    toy_prepare(
        toy_settings(
            manifest,
            path / "prepared",
            corpus="jsonl",
            speeds=[1.0, 1.1],
            dev_fraction=0.0,
            test_fraction=0.0,
        )
    )
    return path


def test_mean_frames_equal_their_definition(corpus):
    """By loops over rows and tokens."""
    path = corpus
    means, counts = mean_mel(str(path / "prepared"), "train", ToyTokenizer.vocab_size, limit=100)
    mel, frames = LogMel(24_000, 1024, 480, MEL_BANDS), {}
    rows = load_prepared(path / "prepared", "train")
    assert {round(row["speed"], 2) for row in rows} == {1.0, 1.1}
    for row in rows:
        wave, rate = load_audio(path / "corpus" / f"{row['id'][1]}.wav")
        wave = resample(wave, rate * round(row["speed"], 2), 24_000)
        wave = np.pad(wave, (0, 480))[: 480 * len(row["speech"])]
        wave = np.pad(wave, (0, 480 * len(row["speech"]) - len(wave)))
        for token, frame in zip(row["speech"], mel(torch.from_numpy(wave)[None])[0].T, strict=True):
            frames.setdefault(token, []).append(frame)
    assert {t: int(n) for t, n in enumerate(counts) if n} == {t: len(f) for t, f in frames.items()}
    for token, found in frames.items():
        assert torch.allclose(means[token], torch.stack(found).mean(0), atol=1e-4)
    assert (means[counts == 0] == 0).all()


def test_fewer_recordings_and_none(corpus, monkeypatch):
    path = corpus
    data = str(path / "prepared")
    _, few = mean_mel(data, "train", ToyTokenizer.vocab_size, limit=2)
    rows = load_prepared(data, "train")
    assert int(few.sum()) == sum(len(rows[i]["speech"]) for i in (0, len(rows) // 2))
    monkeypatch.setattr("eval.analysis.fit_verifiers.source_utterances", lambda data: {})
    with pytest.raises(DataError, match="prepared: split train .*mel_utterances"):
        mean_mel(data, "train", ToyTokenizer.vocab_size, limit=2)
    others = {f"u{i}": SimpleNamespace(load=lambda: (tone(3.0), RATE)) for i in range(5)}
    monkeypatch.setattr("eval.analysis.fit_verifiers.source_utterances", lambda data: others)
    with pytest.raises(DataError, match="prepared: u0: "):
        mean_mel(data, "train", ToyTokenizer.vocab_size, limit=2)
