"""Speaker similarity and quality by name, on tiny models in the real formats."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_worker import records_of, spoken, tiny_tools
from tones import chirp

from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError, DataError
from dcar.vocoder.base import PromptAudio
from eval.scorers.load import (
    ERes2NetEncoder,
    PromptSimilarity,
    Scorer,
    WavLMEncoder,
    kaldi_fbank,
    load_scorers,
    load_similarity,
)
from eval.scorers.metrics import ListeningQuality, NoiseQuality

RATE, NOBODY = 16_000, np.zeros(0, np.float32)


def test_filter_bank_is_kaldi_s() -> None:
    """Against lhotse's implementation of the same, which needs no torchaudio."""
    kaldi = pytest.importorskip("lhotse.features.kaldi.layers")
    wave = chirp(0.7, 1, RATE)
    layer = kaldi.Wav2LogFilterBank(
        sampling_rate=RATE,
        num_filters=80,
        low_freq=20.0,
        high_freq=8000.0,
        dither=0.0,
        snip_edges=True,
        use_energy=False,
        norm_filters=False,
        torchaudio_compatible_mel_scale=True,
        energy_floor=1e-10,
    )
    reference = layer(torch.from_numpy(wave)[None])[0].numpy()
    ours = kaldi_fbank(wave)
    assert ours.shape == reference.shape == (68, 80)
    loud = reference > -10  # below, the two floors differ
    np.testing.assert_allclose(ours[loud], reference[loud], atol=2e-2)
    assert loud.mean() > 0.5


def save_wavlm(folder: Path, seed: int = 0) -> Path:
    from transformers import Wav2Vec2FeatureExtractor, WavLMConfig, WavLMForXVector

    torch.manual_seed(seed)
    config = WavLMConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8] * 7,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        tdnn_dim=[8, 8, 8, 8, 12],
        xvector_output_dim=10,
        num_labels=2,
    )
    WavLMForXVector(config).eval().save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return folder


def save_eres2net(path: Path, **metadata: str) -> Path:
    """The mean over time of the features, through one matrix: x [N, T, 80] -> embedding [N, 6],
    with the metadata that sherpa-onnx writes."""
    import onnx
    from onnx import TensorProto, helper

    matrix = np.random.default_rng(0).standard_normal((80, 6)).astype(np.float32)
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["power"]),
        helper.make_node("ReduceMean", ["power"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "w"], ["embedding"]),
    ]
    graph = helper.make_graph(
        nodes,
        "speaker",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "T", 80])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["N", 6])],
        [helper.make_tensor("w", TensorProto.FLOAT, matrix.shape, matrix.tobytes(), raw=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    facts = {
        "framework": "3d-speaker",
        "sample_rate": "16000",
        "normalize_samples": "1",
        "feature_normalize_type": "global-mean",
        "output_dim": "6",
    } | metadata
    for key, value in facts.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(model, str(path))
    return path


def test_wavlm(tmp_path: Path) -> None:
    from transformers import AutoFeatureExtractor, WavLMForXVector

    encoder = WavLMEncoder(save_wavlm(tmp_path / "sv"))
    wave = chirp(1.0, 1, RATE)
    embedding = encoder.embed(wave, RATE)
    assert embedding.shape == (10,) and np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
    model = WavLMForXVector.from_pretrained(tmp_path / "sv").eval()
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "sv")
    with torch.no_grad():
        reference = (
            model(**extractor(wave, sampling_rate=RATE, return_tensors="pt")).embeddings[0].numpy()
        )
    np.testing.assert_allclose(embedding, reference / np.linalg.norm(reference), atol=1e-5)
    with pytest.raises(AudioError, match="silent"):
        encoder.embed(np.zeros(RATE, np.float32), RATE)


def test_eres2net(tmp_path: Path) -> None:
    encoder = ERes2NetEncoder(save_eres2net(tmp_path / "m.onnx"))
    wave = chirp(1.0, 1, RATE)
    features = kaldi_fbank(wave)
    features -= features.mean(0)
    expected = (features**2).mean(0) @ np.random.default_rng(0).standard_normal((80, 6)).astype(
        np.float32
    )
    np.testing.assert_allclose(
        encoder.embed(wave, RATE), expected / np.linalg.norm(expected), atol=1e-4
    )
    with pytest.raises(CheckpointError, match=r"slow.onnx: .*'8000'.*'16000'"):
        ERes2NetEncoder(save_eres2net(tmp_path / "slow.onnx", sample_rate="8000"))
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="junk.onnx: .*ONNX"):
        ERes2NetEncoder(tmp_path / "junk.onnx")
    with pytest.raises(AssetError, match="sherpa-onnx releases"):
        ERes2NetEncoder(tmp_path / "absent.onnx")


def test_similarity_with_the_prompt_s_recording(tmp_path: Path) -> None:
    voices = np.eye(2, 298, dtype=np.float32)
    waves = [chirp(1.0, 3, RATE), chirp(1.0, 4, RATE)]
    prompts = PromptAudio((v, lambda w=w: (w, RATE)) for v, w in zip(voices, waves, strict=True))
    similarity = load_similarity(f"eres2net:{save_eres2net(tmp_path / 'm.onnx')}", prompts)
    assert isinstance(similarity, PromptSimilarity) and similarity.name.startswith("eres2net:m@")
    assert similarity(waves[0], RATE, voices[0]) == pytest.approx(1, abs=1e-5)
    other = similarity(waves[1], RATE, voices[0])
    assert other is not None and other < 0.9999
    assert similarity(np.zeros(RATE, np.float32), RATE, voices[0]) is None
    with pytest.raises(ConfigError, match="wavlm:x: "):
        load_similarity("wavlm:x")
    with pytest.raises(ConfigError, match="'ecapa'.* resemblyzer, wavlm"):
        load_similarity("ecapa", prompts)


def save_utmos(folder: Path) -> str:
    """A package of SpeechMOS' names and signatures, and weights for it: 10 · mean level + 2.
    Returns its setting."""
    package = folder / "clone" / "speechmos" / "utmos22" / "strong"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parent.parent):
        (place / "__init__.py").write_text("")
    (package / "model.py").write_text(
        "import torch\nclass UTMOS22Strong(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.out = "
        "torch.nn.Linear(1, 1)\n"
        "    def forward(self, wave, sr):\n        assert sr == 16000 and wave.ndim == 2\n"
        "        return self.out(wave.abs().mean(1, keepdim=True))[:, 0]\n"
    )
    torch.save(
        {"out.weight": torch.full((1, 1), 10.0), "out.bias": torch.full((1,), 2.0)}, folder / "w.pt"
    )
    return f"utmos:{folder / 'clone'}#{folder / 'w.pt'}"


def test_utmos_from_a_clone(tmp_path: Path) -> None:
    """The clone's package has the name of another installed one; neither may be seen in the
    place of the other."""
    folder = tmp_path / "no#1"  # a # in a path belongs to it
    folder.mkdir()
    setting = save_utmos(folder)
    before = list(sys.path)
    (scorer,) = load_scorers([setting]).values()
    assert sys.path == before and not any(n.startswith("speechmos.utmos22") for n in sys.modules)
    wave = chirp(0.5, 1, RATE)
    assert scorer(wave, RATE, NOBODY) == pytest.approx(
        10 * float(np.abs(wave).mean()) + 2, abs=1e-4
    )
    torch.save({"out.weight": torch.zeros(2, 2)}, folder / "w.pt")
    for bad, error, said in (
        (setting, CheckpointError, "w.pt: .*UTMOS22"),
        (f"utmos:{tmp_path}#{folder / 'w.pt'}", AssetError, "git clone "),
        ("utmos:onlyaclone", ConfigError, "utmos:CLONE#WEIGHTS.pt"),
    ):
        with pytest.raises(error, match=said):
            load_scorers([bad])


def test_scorers_of_a_comparison(tmp_path: Path) -> None:
    """Tiny models in the real formats, by their settings, through a comparison: each scores what
    the vocoder said."""
    settings = [
        save_utmos(tmp_path),
        f"wavlm:{save_wavlm(tmp_path / 'sv')}",
        f"eres2net:{save_eres2net(tmp_path / 'm.onnx')}",
    ]
    tools = tiny_tools(count=5)
    prompts = PromptAudio.of_items(tools.items, lambda uid: (chirp(0.7, len(uid), RATE), RATE))
    tools.scorers = load_scorers(settings, prompts)
    assert [(s.name.partition("@")[0], s.kind) for s in tools.scorers.values()] == [
        ("utmos22-strong", "quality"),
        ("wavlm:sv", "similarity"),
        ("eres2net:m", "similarity"),
    ]
    utmos = next(iter(tools.scorers))
    result = spoken(tmp_path / "out", tools, methods=["car-1"], references=True)
    item = tools.items[0]
    wave = tools.vocoder.synthesize([item.reference_tokens], [0])[0]
    first = next(
        r
        for r in records_of(tmp_path / "out")
        if r.id == item.utterance_id and r.method == "recording"
    )
    for name, scorer in tools.scorers.items():
        assert first.scores[name] == pytest.approx(scorer(wave, 24_000, item.speaker_embedding))
    row = next(row for row in result.first.rows if row.method == "recording")
    score = row.scores[utmos]
    low, high = score.mean.ends
    assert score.utterances == 5 and 2 < low <= score.mean.value <= high
    given = [r.scores[utmos] for r in records_of(tmp_path / "out") if r.method == "recording"]
    assert score.mean.standard_error == pytest.approx(np.std(given) / len(given) ** 0.5, rel=0.1)


def test_speaker_encoders_of_one_folder_name_have_their_own_scores(tmp_path: Path) -> None:
    """Three comparisons into one folder: other weights under the name of the first are asked anew,
    and the first ones' values are found again."""
    tools = tiny_tools(count=2)
    prompts = PromptAudio.of_items(tools.items, lambda uid: (chirp(0.7, len(uid), RATE), RATE))
    folders = [save_wavlm(tmp_path / run / "sv", seed) for seed, run in enumerate(("a", "b"))]
    values = []
    for folder in (*folders, folders[0]):
        spec = f"wavlm:{folder}"
        tools.scorers = load_scorers([spec], prompts)
        spoken(tmp_path / "out", tools, methods=["car-1"], references=True)
        [record] = [
            r
            for r in records_of(tmp_path / "out")
            if (r.id, r.method) == (tools.items[0].utterance_id, "recording")
        ]
        assert record.scores.keys() == tools.scorers.keys()
        values += record.scores.items()
    assert values[0] == values[2]
    assert all(one != other for one, other in zip(*values[:2], strict=True))


def test_scorers_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="scorers: .*'dnsmos'"):
        load_scorers(["dnsmos", "dnsmos"])
    with pytest.raises(ConfigError, match="'mosnet'.* dnsmos"):
        load_scorers(["mosnet"])
    broken = Scorer("broken", "quality", "broken", lambda wave, rate: float("nan"))
    with pytest.raises(DataError, match="broken: .*nan .*1.00 s"):
        broken(np.zeros(RATE, np.float32), RATE, NOBODY)
    assert broken(np.zeros(0, np.float32), RATE, NOBODY) is None


def test_predicted_quality_equals_the_package() -> None:
    dnsmos = pytest.importorskip("speechmos.dnsmos")
    wave = (0.1 * np.random.default_rng(0).standard_normal(40_000)).astype(np.float32)
    there = dnsmos.run(wave, RATE)
    assert NoiseQuality()(wave, RATE) == pytest.approx(float(there["ovrl_mos"]), abs=1e-3)
    assert ListeningQuality()(wave, RATE) == pytest.approx(float(there["p808_mos"]), abs=1e-3)
    long = np.tile(wave, 5)  # several windows
    assert ListeningQuality()(long, RATE) == pytest.approx(
        float(dnsmos.run(long, RATE)["p808_mos"]), abs=1e-3
    )
