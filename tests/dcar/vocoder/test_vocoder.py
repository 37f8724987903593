"""The vocoder on tiny sizes: signal features, exact lengths and padding, strict files, training,
resume, packs."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_corpora import toy_prepare, toy_settings, write_manifest
from tiny_data import ToyTokenizer
from tiny_training import log_of
from tiny_vocoder import RATE, TINY, embedding, harmonic, toy_config, toy_data, voice
from torch.nn.utils.rnn import pad_sequence

from dcar.audio import resample, save_audio
from dcar.errors import AudioError, CheckpointError, ConfigError, DataError
from dcar.prepare.prepared import load_prepared
from dcar.tokens.kmeans import KMeansTokenizer
from dcar.tokens.whisper import WhisperEncoder
from dcar.vocoder.acoustic import VocoderConfig
from dcar.vocoder.captured import CapturedSynthesis
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.renderer import Pitch, Renderer, mel_transform
from dcar.vocoder.training import pack
from dcar.vocoder.training.pack import PackRow, VocoderData, pack_training_data, write_pack
from dcar.vocoder.training.train import TrainVocoderConfig, run
from dcar.vocoder.training.trainer import Trainer, acoustic_loss
from dcar.voices.features import SPEAKER_DIM, same_istft, same_stft, speaker_features, track_f0

EXACTLY = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def data(tmp_path) -> VocoderData:
    """The toy pack, where `toy_config` looks for it."""
    return toy_data(tmp_path)


def trainer_of(config: TrainVocoderConfig, data: VocoderData) -> Trainer:
    return Trainer(config, data, torch.device("cpu"))


# ------------------------------------------------------ signal features


@pytest.mark.parametrize("f0", [70.0, 110.0, 237.0, 420.0])
def test_pitch_track_of_a_buzz_is_within_one_percent(f0):
    log_f0, voiced = track_f0(torch.from_numpy(harmonic(f0, 1.0)))
    assert log_f0.shape == voiced.shape == (100,)
    inner = slice(5, -5)
    assert voiced[inner].all()
    assert (log_f0[inner].exp() / f0 - 1).abs().max() < 0.01


def test_pitch_of_what_is_not_voiced():
    """Noise and silence have none; through a gap it is interpolated."""
    noise = torch.from_numpy(
        np.random.default_rng(0).normal(scale=0.1, size=RATE).astype(np.float32)
    )
    for wave in (noise, torch.zeros(RATE), torch.zeros(0)):
        log_f0, voiced = track_f0(wave)
        assert torch.isfinite(log_f0).all() and voiced.float().sum() <= 5
    wave = harmonic(np.repeat([100.0, 100.0, 200.0], RATE // 2), 1.5)
    wave[RATE // 2 : RATE] = 0
    log_f0, voiced = track_f0(torch.from_numpy(wave))
    assert not voiced[60:90].any()
    assert (log_f0[55:95].diff() > 0).all() and 120 < log_f0[75].exp() < 170


def test_stft_and_its_inverse_agree_inside_and_frame_counts_are_exact():
    config = VocoderConfig()
    window = TokenVocoder(dataclasses.replace(config, **TINY)).renderer.window
    wave = torch.randn(2, 480 * 10)
    spectra = same_stft(wave, window, config.hop)
    assert spectra.shape == (2, config.n_fft // 2 + 1, 20)
    again = same_istft(spectra, window, config.hop)
    assert again.shape == wave.shape
    assert torch.allclose(again[:, 480:-480], wave[:, 480:-480], atol=1e-5)


def test_speaker_features_tell_pitch_and_ignore_level():
    wave = harmonic(150.0, 1.5)
    features = speaker_features(wave, RATE, embedding(0))
    assert features.shape == (SPEAKER_DIM,) and features.dtype == np.float32
    assert abs(math.exp(features[256]) - 150) < 3 and features[257] < 0.05
    assert np.allclose(features[:256], embedding(0))
    assert np.allclose(speaker_features(0.3 * wave, RATE, embedding(0)), features, atol=0.02)


def test_what_a_low_rate_does_not_hold_is_not_taken_for_silence():
    """A voice with energy up to 12 kHz, as a prompt of 24 kHz and of 16 kHz."""
    noise = 0.02 * np.random.default_rng(0).standard_normal(2 * RATE)
    wave = (harmonic(140.0, 2.0) + noise).astype(np.float32)
    whole = speaker_features(wave, RATE, embedding(0))
    low = speaker_features(resample(wave, RATE, 16_000), 16_000, embedding(0))
    # log magnitudes; silence would be 5 and more below
    assert np.abs(whole[258:] - low[258:]).max() < 0.6
    assert np.abs(whole[258:285] - low[258:285]).max() < 0.1
    assert np.ptp(low[-6:]) == 0  # the bands above 8 kHz


def test_a_silent_prompt_is_an_audio_error():
    with pytest.raises(AudioError):
        speaker_features(0 * harmonic(150.0, 1.0), RATE, embedding(0))


# ------------------------------------------------------ model


@pytest.mark.parametrize("calibration", [(), tuple(range(16))])
@torch.inference_mode()
def test_a_batch_with_padding_equals_single_utterances(calibration):
    """As they are padded on a GPU, with silence behind the end."""
    model = TokenVocoder(VocoderConfig(**TINY, calibration_tokens=calibration)).eval()
    lists = [torch.randint(0, 16, (n,)) for n in (30, 9, 1, 17)]
    voices = torch.stack([voice(i, 100 + 20 * i) for i in range(4)])
    together = model(pad_sequence(lists, batch_first=True), torch.tensor([30, 9, 1, 17]), voices)
    assert together.shape == (4, 30 * 480) and together[0].std() > 1e-4
    for wave, ids, one in zip(together, lists, voices, strict=True):
        alone = model(ids[None], torch.tensor([len(ids)]), one[None])[0]
        np.testing.assert_allclose(wave[: len(alone)], alone, atol=2e-5)
        assert not wave[(len(ids) + 1) * 480 :].any()  # one window of the last frame may ring on


@pytest.mark.parametrize("calibration", [(), tuple(range(16))])
def test_a_gpu_speaks_a_batch_at_once(calibration, monkeypatch):
    """On its stand-in. Held to one by one in float32; a CPU may speak in bfloat16."""
    model = TokenVocoder(VocoderConfig(**TINY, calibration_tokens=calibration)).eval()
    lists = [torch.randint(0, 16, (n,)).tolist() for n in (30, 9, 0, 1, 17)]
    voices = torch.stack([voice(i, 100 + 20 * i) for i in range(5)]).numpy()
    monkeypatch.setattr("dcar.vocoder.streaming.product_type", lambda: torch.float32)
    there = copy.deepcopy(model)  # which has measured no voice yet
    expected = model.synthesize(lists, voices)
    with fake_gpu.fake_gpu(monkeypatch) as device:
        there.to(device)
        with pytest.raises(DataError, match="outside 0..15"):
            there.synthesize([[3, 16]], voices[:1])
        waves = there.synthesize(lists, voices)
    for wave, alone in zip(waves, expected, strict=True):
        assert wave.shape == alone.shape
        np.testing.assert_allclose(wave, alone, atol=2e-5)


def test_blocks_are_captured_once_and_speak_as_the_network_itself(device):
    """Bit for bit on a GPU as by itself; the samples of an utterance do not depend on the block,
    nor on what was in it before."""
    network = TokenVocoder(VocoderConfig(**TINY)).eval().to(device)
    graphs, plain = CapturedSynthesis(network), CapturedSynthesis(network, graphs=False)
    captured = {}
    for turn, sizes in enumerate([(30, 9, 17), (12,), (11,), (25, 30, 2), (31, 1, 8, 20), (12,)]):
        lists = [torch.randint(0, 16, (n,)) for n in sizes]
        voices = torch.stack([voice(i + turn, 100 + 20 * i) for i in range(len(sizes))])
        gains = torch.randn(len(sizes), network.config.mel_bands).to(device)
        tokens, numbers = pad_sequence(lists, batch_first=True), torch.zeros(len(sizes), 4).long()
        numbers[:, 0] = lengths = torch.tensor(sizes)
        given = tokens, numbers, voices, gains
        with torch.inference_mode():
            waves = graphs(network, *given)[0].numpy()
            np.testing.assert_array_equal(waves, plain(network, *given)[0].numpy())
            exact = network.speak(*(part.to(device) for part in (tokens, lengths, voices, gains)))
            exact = exact.clamp(-1, 1).cpu().numpy()
        for wave, other, n in zip(waves, exact, sizes, strict=True):
            assert np.abs(other[: n * 480]).max() > 1e-4
            np.testing.assert_allclose(wave[: n * 480], other[: n * 480], atol=2e-5)
        now = dict(graphs.graphs._graphs)
        assert all(now[key] is graph for key, graph in captured.items())
        captured = now
    assert len(captured) == 2
    with torch.no_grad():
        network.renderer.head.bias.add_(0.1)
    with torch.inference_mode():
        assert not torch.equal(graphs(network, *given)[0], torch.from_numpy(waves))


@pytest.mark.parametrize("bands", [40, 100, 24])
def test_the_equaliser_gives_calibration_speech_the_envelope_of_the_prompt(bands):
    tokens, speaker = torch.randint(0, 16, (1, 60)), torch.stack([voice(0, 100.0), voice(1, 220.0)])
    plain, equal = (
        TokenVocoder(
            VocoderConfig(**{**TINY, "mel_bands": bands}, calibration_tokens=calibration)
        ).eval()
        for calibration in ((), tuple(tokens[0].tolist()))
    )
    equal.load_state_dict(plain.state_dict())
    missed = []
    for model in (plain, equal):
        log_mel, pitch = model.predict(tokens.expand(2, -1), torch.ones(2, 60), speaker)
        assert 0 < pitch.voiced.mean()
        missed.append(
            (model.equalizer.envelope(log_mel, pitch.voiced) - speaker[:, 258:]).abs().mean(1)
        )
    assert (missed[1] < (0.5 if bands == 24 else 0.35) * missed[0]).all(), missed
    gains = equal.equalizer(equal.acoustic, speaker)
    assert gains.shape == (2, bands) and not plain.equalizer(plain.acoustic, speaker).any()
    assert (gains[0] - gains[1]).abs().max() > 0.1


def test_an_equaliser_does_not_know_who_came_with_it_and_measures_anew_after_training(monkeypatch):
    """Bit for bit: it is remembered, so what differs in the last bit would depend on what was
    spoken before."""
    sizes = {**TINY, "acoustic_size": 96, "acoustic_ffn_size": 160}
    calibration = tuple(range(16)) * 6
    model = TokenVocoder(VocoderConfig(**sizes, calibration_tokens=calibration)).eval()
    voices = torch.stack([voice(i, 100.0 + 9 * i) for i in range(8)])
    alone = []
    for row in voices:
        model.equalizer.forget()
        alone.append(model.equalizer(model.acoustic, row[None])[0])
    for count in (2, 5, 8):
        model.equalizer.forget()
        gains = model.equalizer(model.acoustic, voices[:count])
        assert torch.equal(gains, torch.stack(alone[:count])), count
    monkeypatch.setattr("dcar.vocoder.equalizer.MOST_VOICES", 1)  # more than it remembers
    assert torch.equal(model.equalizer(model.acoustic, voices), torch.stack(alone))
    with torch.no_grad():
        model.train().acoustic.output.weight.mul_(2)
    model.synthesize([[1, 2]], voices[:1])
    assert not torch.equal(model.equalizer(model.acoustic, voices[:1])[0], alone[0])


def test_empty_utterances_give_empty_waves():
    model = TokenVocoder(VocoderConfig(**TINY))
    waves = model.synthesize([[], [1, 2]], torch.stack([voice(), voice()]))
    assert [len(w) for w in waves] == [0, 960] and waves[1].dtype == np.float32
    assert [len(w) for w in model.synthesize([[]], voice()[None])] == [0]
    assert model.training  # synthesize leaves the mode as it was


def test_what_cannot_be_spoken_is_a_data_error():
    """Whole or streamed: on a CPU the same."""
    model, one = TokenVocoder(VocoderConfig(**TINY)), voice()[None]
    for ids in ([3, 16], [-1]):
        with pytest.raises(DataError, match=f"token {ids[-1]} .*0..15"):
            model.synthesize([ids], one)
    for speaker in (one[:, :256], one.repeat(2, 1), one * float("nan")):
        with pytest.raises(DataError, match="speaker features"):
            model.synthesize([[1]], speaker)


def test_generated_pitch_follows_the_pitch_that_is_asked_for():
    """Even an untrained head keeps the excitation's F0: pitch cannot be lost in the network."""
    model = TokenVocoder(VocoderConfig(**TINY)).eval()
    pitch = Pitch(torch.full((1, 100), math.log(210.0)), torch.ones(1, 100))
    wave = model.renderer(torch.full((1, 100, 40), -3.0), pitch, torch.ones(1, 100))[0].detach()
    log_f0, voiced = track_f0(wave)
    assert voiced[10:-10].float().mean() > 0.9
    assert abs(float(log_f0[voiced].median().exp()) / 210 - 1) < 0.02


def test_predicted_pitch_follows_the_prompt():
    model = TokenVocoder(VocoderConfig(**TINY)).eval()
    tokens, mask = torch.zeros(2, 10, dtype=torch.int64), torch.ones(2, 10)
    low, high = model.predict(tokens, mask, torch.stack([voice(0, 90.0), voice(0, 300.0)]))[
        1
    ].log_f0
    assert (low < math.log(120)).all() and (high > math.log(220)).all()


# ------------------------------------------------------ files


def test_saved_vocoder_is_small_loads_and_sounds_the_same(tmp_path):
    model = TokenVocoder(VocoderConfig(**TINY, calibration_tokens=(3, 1), tokenizer_checksum="abc"))
    model.save_pretrained(tmp_path / "v")
    again = TokenVocoder.from_pretrained(tmp_path / "v")
    assert (
        again.config == model.config
        and not again.training
        and again.renderer.head.weight.dtype == torch.float32
    )
    ids, speaker = [list(range(16))], voice()[None]
    np.testing.assert_allclose(
        again.synthesize(ids, speaker)[0], model.synthesize(ids, speaker)[0], atol=5e-3
    )


def test_default_size_is_within_the_budget_of_the_shipped_file():
    count = sum(p.numel() for p in TokenVocoder(VocoderConfig()).parameters())
    assert 2 * count < 14.6e6  # bytes in fp16; the file may have 15 MB


def test_from_pretrained_is_strict(tmp_path):
    TokenVocoder(VocoderConfig(**TINY)).save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"acoustic_size": 40},
        {"renderer_dilations": [1]},
        {"colour": "red"},
        {"model_type": "other"},
        {"format_version": 0},
        {"window": 700},
        {"n_fft": ...},
    ):
        config = {k: v for k, v in {**good, **change}.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            TokenVocoder.from_pretrained(tmp_path)


# ------------------------------------------------------ data


@pytest.mark.parametrize("rate", [50, 25])
def test_pack_round_trip(tmp_path, rate):
    data = toy_data(tmp_path, speeds=(1.0, 1.2), token_rate=rate)
    # tokens of the first row: 1.2 s
    size, frames, spoken = RATE // rate, 100 // rate, rate * 12 // 10
    assert (data.token_rate, data.samples_per_token, data.frames_per_token) == (rate, size, frames)
    assert data.lengths.tolist() == [spoken, rate] * 6 and data.tokenizer_checksum == "toy-checksum"
    tokens = int(data.lengths.sum())
    assert len(data.waves) == size * tokens and len(data.log_f0) == frames * tokens
    assert data.validation.nonzero()[:, 0].tolist() == [10]
    assert len(set(data.voice.tolist())) == 4  # a voice at another speed is another voice
    played = data.waves[: spoken * size].numpy() / 32767
    features = speaker_features(played.astype(np.float32), RATE, embedding(0))
    # embeddings are stored as fp16
    np.testing.assert_allclose(data.speaker[0].numpy(), features, atol=2e-3)
    crop = data.crop(torch.tensor([0, 2]), torch.tensor([-3, spoken - 5]), 10)
    assert crop.mask.tolist() == [[0] * 3 + [1] * 7, [1] * 5 + [0] * 5]
    assert torch.equal(crop.frame_mask, crop.mask.repeat_interleave(frames, 1))
    end = int(data.starts[2]) + spoken
    assert torch.equal(crop.tokens[1, :5], data.tokens[end - 5 : end])
    assert torch.equal(crop.log_f0[1, : 5 * frames], data.log_f0[frames * (end - 5) : frames * end])
    wave = data.wave(crop)
    assert wave.shape == (2, 10 * size) and not wave[0, : 3 * size].any()
    expected = data.waves[(end - 5) * size : end * size].float() / 32767
    assert torch.equal(wave[1, : 5 * size], expected)


def test_packs_are_joined_with_voices_of_their_own(tmp_path):
    a, b = toy_data(tmp_path, states=True), toy_data(tmp_path, speeds=(1.0, 0.9), states=True)
    joined = VocoderData.join([a, b])
    assert len(joined.lengths) == len(a.lengths) + len(b.lengths)
    assert joined.voice.unique().tolist() == list(range(2 + 4))
    for part, first in ((a, 0), (b, len(a.lengths))):
        rows = torch.arange(len(part.lengths))
        here = part.crop(rows, torch.zeros_like(rows), 20)
        there = joined.crop(rows + first, torch.zeros_like(rows), 20)
        assert torch.equal(here.tokens, there.tokens) and torch.equal(here.log_f0, there.log_f0)
        assert torch.equal(part.wave(here), joined.wave(there))
        assert torch.equal(part.states[here.positions], joined.states[there.positions])
    with pytest.raises(DataError, match="states=true"):
        VocoderData.join([a, dataclasses.replace(b, states=None)])
    with pytest.raises(DataError, match="tokenizers"):
        VocoderData.join([a, dataclasses.replace(b, tokenizer_checksum="another")])


def test_embeddings_start_from_the_codebook_and_learn_the_states_behind_the_tokens(tmp_path):
    data = toy_data(tmp_path, states=True)
    config = toy_config(tmp_path, max_steps=60, renderer_every=1000, learning_rate=4e-3)
    # row by row in the order of the tokens
    near = torch.cdist(data.states.float(), data.codebook).argmin(1)
    assert (near == data.tokens).float().mean() > 0.95
    trainer = trainer_of(config, data)
    embedding = trainer.generator.acoustic.embedding.weight
    assert abs(float(embedding.detach().std()) - 0.5) < 1e-4
    distances = [torch.pdist(table.detach()) for table in (embedding, data.codebook)]
    assert torch.corrcoef(torch.stack(distances))[0, 1] > 0.8
    errors = [float(trainer.step()["states"]) for _ in range(60)]
    assert errors[0] > 0.9 and np.mean(errors[-10:]) < 0.7  # 1 = knowing nothing
    with pytest.raises(ConfigError, match="pack.safetensors: .*16 .*vocab_size .*17"):
        trainer_of(dataclasses.replace(config, model={**TINY, "vocab_size": 17}), data)


def prepared(tmp_path, count: int, tokenizer, spec: str = "toy:") -> Path:
    """A prepared corpus of buzzes, the last of them for validation, and slower copies of the
    others."""
    waves = [harmonic(120.0 + 10 * i, 1.0 + 0.1 * i, seed=i) for i in range(count)]
    rows = [{"speaker": f"s{i % 2}", "split": "train"} for i in range(count)]
    rows[-1]["split"] = "dev"
    manifest = write_manifest(tmp_path, rows, waves, RATE)
    settings = dict(corpus="jsonl", speeds=(1.0, 0.9), splits=("train", "dev"), tokenizer=spec)
    toy_prepare(toy_settings(manifest, tmp_path / "p", **settings), tokenizer)
    return tmp_path / "p"


def test_a_prepared_corpus_becomes_a_pack(tmp_path):
    corpus = prepared(tmp_path, 4, ToyTokenizer())
    pack_training_data(corpus, tmp_path / "pack.safetensors")
    data = VocoderData.load(tmp_path / "pack.safetensors", "cpu")
    assert len(data.lengths) == 7 and int(data.validation.sum()) == 1
    [original] = [i for i in range(7) if int(data.lengths[i]) == 50]
    [slow] = [i for i in range(7) if int(data.lengths[i]) == 56]
    means = data.speaker[[original, slow], 256].exp()
    assert abs(float(means[1] / means[0]) - 0.9) < 0.01
    # What the vocoder is told of a voice when it speaks is what it was told in training.
    told = [row["voice"] for split in ("train", "dev") for row in load_prepared(corpus, split)]
    assert np.abs(np.asarray(told) - data.speaker.numpy()).max() < 0.1


def test_a_pack_of_some_hours_holds_an_even_share_of_each_split(tmp_path):
    corpus = prepared(tmp_path, 9, ToyTokenizer())
    seconds = [row["duration"] for row in load_prepared(corpus, "train")]
    for share, count in ((0.5, len(seconds) // 2), (2.0, len(seconds))):
        path = tmp_path / f"{share}.safetensors"
        pack.main([f"prepared={corpus}", f"out={path}", f"hours={share * sum(seconds) / 3600}"])
        with safe_open(path, "pt") as file:
            recordings, held_out = file.get_tensor("recording"), file.get_tensor("validation")
        assert int(held_out.sum()) == 1  # shorter than the hours
        assert len(recordings) - 1 == count
        assert recordings[~held_out].diff().max() <= 2


class LevelEncoder(WhisperEncoder):
    """States are the levels of four quarters of a token's 20 ms, in 512 dimensions of which only
    these count."""

    def __call__(self, wave, sample_rate):
        tokens = math.ceil(len(wave) * 50 / sample_rate)
        pieces = np.pad(wave, (0, tokens * 320 - len(wave))).reshape(tokens, 4, 80)
        return np.pad(np.sqrt((pieces**2).mean(2)), ((0, 0), (0, 508))).astype(np.float32)


def listener(seed: int) -> KMeansTokenizer:
    centroids = 0.09 + 0.02 * np.random.default_rng(seed).standard_normal((16, 4))
    mean, scale = np.zeros(512), np.ones(512)
    return KMeansTokenizer(LevelEncoder(), centroids, mean, scale, projection=np.eye(512, 4))


def test_a_pack_with_states_holds_what_the_tokens_were_and_refuses_others(tmp_path, monkeypatch):
    """The tokenizer hears every signal at its own speed again, and must say what it said."""
    ours = listener(0)
    ours.save_pretrained(tmp_path / "tokenizer")
    corpus = prepared(tmp_path, 2, ours, str(tmp_path / "tokenizer"))
    monkeypatch.setattr(pack, "load_tokenizer", lambda spec, device: ours)
    pack_training_data(corpus, tmp_path / "pack.safetensors", states=True)
    data = VocoderData.load(tmp_path / "pack.safetensors", "cpu")
    assert len(data.lengths) == 3 and data.states.shape == (int(data.lengths.sum()), 4)
    assert torch.equal(data.codebook, torch.from_numpy(ours.centroids))
    # float16 near a border
    assert (ours.nearest(data.states.float().numpy()) == data.tokens.numpy()).mean() > 0.98
    assert len(set(data.tokens.tolist())) > 3
    pack_training_data(corpus, tmp_path / "train.safetensors", validation_splits=("test",))
    assert not VocoderData.load(tmp_path / "train.safetensors", "cpu").validation.any()
    with pytest.raises(DataError, match="split other"):
        pack_training_data(corpus, tmp_path / "none.safetensors", train_splits=("other",))

    def refused(tokenizer, error, message):
        monkeypatch.setattr(pack, "load_tokenizer", lambda spec, device: tokenizer)
        with pytest.raises(error, match=message):
            pack_training_data(corpus, tmp_path / "other.safetensors", states=True)

    refused(listener(1), DataError, "other tokens")
    refused(ToyTokenizer(), ConfigError, "states")
    save_audio(tmp_path / "0.wav", 0.3 * harmonic(120.0, 1.0), RATE)  # of the same length
    refused(ours, DataError, "m.jsonl:1: u0 ")


# ------------------------------------------------------ training


def test_training_brings_every_loss_down_and_exports(data, tmp_path):
    """Overfits six buzzing recordings. Seen: log-mel 4.4 → 2.0, pitch .65 → .19, voicing .78 →
    .35."""
    config = toy_config(tmp_path, max_steps=90, learning_rate=4e-3, ema_decay=0.9)
    untrained = trainer_of(config, data).validate()
    export = run(config)
    records = log_of(tmp_path / "run")
    train = [r for r in records if r["event"] == "train"]
    for name in ("log_mel", "pitch", "voicing"):
        first, last = ([r[name] for r in part] for part in (train[:5], train[-15:-5]))
        assert np.mean(last) < 0.7 * np.mean(first), name
    validation = [r for r in records if r["event"] == "validation"][-1]
    assert validation["step"] == 90
    assert all(validation[name] < 0.8 * untrained[name] for name in ("mel_copy", "mel"))
    vocoder = TokenVocoder.from_pretrained(export)
    assert vocoder.config.tokenizer_checksum == "toy-checksum"
    # the sixth row is not trained on
    assert vocoder.config.calibration_tokens == tuple(data.tokens[: 5 * 60].tolist())


def test_what_recordings_of_a_low_rate_lack_is_not_learned_as_silence(tmp_path):
    """A voice at 24 kHz and as its recording at 8 kHz: the vocoder is told the same of both, as
    it is of a prompt of that rate, and bands above 4 kHz have no part in the loss."""
    whole = harmonic(150.0, 1.2) + 0.01 * np.random.default_rng(0).standard_normal(
        int(1.2 * RATE)
    ).astype(np.float32)
    low = resample(resample(whole, RATE, 8_000), 8_000, RATE)
    rows = [
        PackRow(0, 1.0, np.full(60, 3), embedding(0), "whole", False),
        PackRow(1, 1.0, np.full(60, 3), embedding(0), "low", False, rate=8_000),
    ]
    write_pack(tmp_path / "pack.safetensors", [whole, low], rows, "")
    data = VocoderData.load(tmp_path / "pack.safetensors", "cpu")
    assert data.top.tolist() == [12_000, 4_000]
    prompt = speaker_features(resample(whole, RATE, 8_000), 8_000, embedding(0))
    assert np.abs(data.speaker[1].numpy() - prompt)[258:].max() < 0.1  # 258 on: the envelope
    assert VocoderData.join([data, data]).top.tolist() == [12_000, 4_000] * 2

    trainer = trainer_of(toy_config(tmp_path), data)
    assert trainer.known[0].all() and 15 < trainer.known[1].sum() < 30
    crop = data.crop(torch.tensor([0, 1]), torch.zeros(2, dtype=torch.long), 60)
    target = trainer.mel(data.wave(crop)).transpose(1, 2)
    said = trainer.generator.acoustic(crop.tokens, crop.mask, data.speaker[:2])
    for row, counts in ((0, True), (1, False)):  # five nats more above 4 kHz
        louder = said._replace(log_mel=target + 5.0 * (1 - trainer.known[1]))
        heard = trainer.known[[row, row], None]
        assert (
            acoustic_loss(louder, target, crop, data.speaker[:2], heard)[1]["log_mel"] > 0
        ) == counts


def test_training_goes_on_from_an_exported_vocoder(data, tmp_path):
    first = run(toy_config(tmp_path, max_steps=2))
    config = toy_config(tmp_path, init_from=str(first))
    trainer = trainer_of(config, data)
    for network in (trainer.generator, trainer.average):
        torch.testing.assert_close(
            network.state_dict(), TokenVocoder.from_pretrained(first).state_dict(), **EXACTLY
        )
    sizes = trainer_of(dataclasses.replace(config, model={}), data).generator.config
    # what the start is like need not be said again
    assert sizes == TokenVocoder.from_pretrained(first).config
    other = dataclasses.replace(data, tokenizer_checksum="another")
    kept = trainer_of(dataclasses.replace(config, model={}), other).generator.config
    assert kept.tokenizer_checksum == "another" and kept.acoustic_size == sizes.acoustic_size
    with pytest.raises(ConfigError, match="start from .*export: "):
        trainer_of(dataclasses.replace(config, model={**TINY, "acoustic_size": 40}), data)


def test_a_renderer_serves_another_tokenizer_and_can_stay_as_it_is(data, tmp_path):
    first = run(toy_config(tmp_path, max_steps=2))
    config = toy_config(
        tmp_path, renderer_from=str(first), renderer_every=0, model={**TINY, "vocab_size": 20}
    )
    trainer = trainer_of(config, data)
    logs = [trainer.step() for _ in range(2)]
    assert all("mel" not in log and "log_mel" in log for log in logs)
    wanted = TokenVocoder.from_pretrained(first).renderer.state_dict()
    torch.testing.assert_close(trainer.average.renderer.state_dict(), wanted, **EXACTLY)
    assert trainer.generator.acoustic.embedding.num_embeddings == 20


def test_tokens_of_25_hz(tmp_path):
    """The pack's rate decides the vocoder's; whatever disagrees is refused."""
    data = toy_data(tmp_path, speeds=(1.0, 1.2), token_rate=25)
    settings = dict(max_steps=60, learning_rate=4e-3, ema_decay=0.9, renderer_every=3)
    config = toy_config(tmp_path, segment_tokens=10, acoustic_tokens=20, **settings)
    vocoder = TokenVocoder.from_pretrained(run(config))
    records = log_of(tmp_path / "run")
    train = [r["log_mel"] for r in records if r["event"] == "train"]
    assert np.mean(train[-10:]) < 0.85 * np.mean(train[:5])  # seen: 0.75
    assert records[0]["hours"] == pytest.approx(float(data.lengths.sum()) / 25 / 3600)
    assert vocoder.token_rate == 25
    assert len(vocoder.synthesize([[1, 2, 3]], voice()[None])[0]) == 3 * 960
    TokenVocoder(VocoderConfig(**TINY)).save_pretrained(tmp_path / "fast")
    for message, changes in (
        ("pack.safetensors: 25 .*4 .*50 .*2", {"model": {**TINY, "token_rate": 50}}),
        ("pack.safetensors: 25 .*4 .*25 .*8", {"model": {**TINY, "hop": 120, "window": 720}}),
        ("init_from .*50 .*25", {"init_from": str(tmp_path / "fast")}),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_of(toy_config(tmp_path, **changes), data)


def test_what_is_no_pack_is_refused(tmp_path):
    wave, path = harmonic(150.0, 1.0), tmp_path / "pack.safetensors"

    def row(code: int, held_out: bool = False) -> list[PackRow]:
        return [PackRow(0, 1.0, np.full(50, code), embedding(0), "v", held_out)]

    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="pack.safetensors: .*dcar.vocoder.training.pack"):
        VocoderData.load(path, "cpu")
    for target, waves, rows, rate, message in (
        (tmp_path / "y", [], [], 50, "/y: "),
        *((path, [wave], row(3), rate, "100, 50, 25") for rate in (12.5, 75, 0)),
    ):
        with pytest.raises(DataError, match=message):
            write_pack(target, waves, rows, "", rate)
    write_pack(path, [wave], row(0, held_out=True), "")
    with pytest.raises(ConfigError, match="validation"):  # no row to train on
        trainer_of(toy_config(tmp_path), VocoderData.load(path, "cpu"))
    # X-codec2 has 65536 codes: more than 16 bits with a sign
    write_pack(path, [wave], row(65_535), "")
    assert VocoderData.load(path, "cpu").tokens.tolist() == [65_535] * 50
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata={**header, "token_rate": "25"})
    with pytest.raises(DataError, match="pack.safetensors: 24000 .*48000"):
        VocoderData.load(path, "cpu")


def test_voices_with_little_speech_are_drawn_more_often(tmp_path):
    recordings = [harmonic(150.0, 1.2, seed=i) for i in range(5)]
    rows = [
        PackRow(i, 1.0, np.zeros(60, np.int64), embedding(i == 4), "ab"[i == 4], False)
        for i in range(5)
    ]
    write_pack(tmp_path / "pack.safetensors", recordings, rows, "")
    data = VocoderData.load(tmp_path / "pack.safetensors", "cpu")
    for balance, share in ((0.0, 0.2), (1.0, 0.5)):
        trainer = trainer_of(toy_config(tmp_path, voice_balance=balance), data)
        weights = trainer.row_weights / trainer.row_weights.sum()
        assert abs(float(weights[4]) - share) < 1e-6


def test_an_untrained_renderer_already_has_the_envelope():
    """The mel spectrum sets the level of every band before anything is learned: within a few
    decibels."""
    config = VocoderConfig(**TINY)
    renderer, mel = Renderer(config).eval(), mel_transform(config)
    bands = torch.linspace(-3.0, -7.0, 40) + torch.sin(torch.arange(40) / 3.0)
    wave = renderer(
        bands.expand(1, 100, 40),
        Pitch(torch.full((1, 100), 5.0), torch.ones(1, 100)),
        torch.ones(1, 100),
    )
    heard = mel(wave.detach())[0, :, 10:-10].mean(1)
    assert (heard - bands).abs().mean() < 0.5 and (heard - bands)[2:-2].abs().max() < 1.2


@pytest.mark.parametrize("states", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, states):
    config, data = toy_config(tmp_path, max_steps=8), toy_data(tmp_path, states=states)
    whole, part, resumed = (trainer_of(config, data) for _ in range(3))
    for trainer, count in ((whole, 8), (part, 5)):
        for _ in range(count):
            trainer.step()
    torch.save(part.state(), tmp_path / "state.pt")
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        resumed.step()
    for ours, other in ((whole.generator, resumed.generator), (whole.average, resumed.average)):
        torch.testing.assert_close(ours.state_dict(), other.state_dict(), **EXACTLY)


def test_a_finished_run_is_not_trained_again_and_another_shape_is_refused(data, tmp_path):
    config = toy_config(tmp_path, max_steps=2)
    before = run(config).joinpath("model.safetensors").read_bytes()
    assert run(config).joinpath("model.safetensors").read_bytes() == before
    for changes, why in (
        (dict(max_steps=3, model={**TINY, "acoustic_size": 40}), "'acoustic_size': 40"),
        (dict(max_steps=1), "max_steps to 2"),
        (dict(max_steps=3, seed=9), "seed=0"),
        (dict(learning_rate=1e-2), "learning_rate=0.001"),
        (dict(learning_rate=1e-2, max_minutes=1e-9), "learning_rate=0.001"),
    ):
        with pytest.raises(CheckpointError, match=why):
            run(dataclasses.replace(config, **changes))
    run(dataclasses.replace(config, max_steps=3, learning_rate=1e-2, weight_decay=0.5))
    changed = {"max_steps": [2, 3], "learning_rate": [1e-3, 1e-2], "weight_decay": [0.01, 0.5]}
    starts = [line for line in log_of(tmp_path / "run") if line["event"] == "start"]
    assert [line.get("changed", {}) for line in starts] == [{}, {}, changed]
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    [group] = state["generator_optimizer"]["param_groups"][:1]
    assert group["weight_decay"] == 0.5 and group["lr"] > 1e-5
