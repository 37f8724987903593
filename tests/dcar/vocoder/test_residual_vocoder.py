"""The residual model against explicit loops, and the vocoder made of it."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels import Kernels
from tiny_data import random_voice
from tiny_residual import CODES, LAYERS, PHONEMES, VOICES, GeneratedCodec, recording, utterance
from torch import Tensor

from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.text.english.inventory import PHONEME_VERSION
from dcar.tokens.origin import TokenizerInfo
from dcar.vocoder.base import PromptAudio, check_speaks
from dcar.vocoder.load import load_vocoder, needs_prompt_audio, vocoder_identity
from dcar.vocoder.residual import ResidualConfig, ResidualModel, ResidualVocoder
from dcar.vocoder.voicing import synthesize, voice, voice_each

CONFIG = ResidualConfig(
    text_vocab_size=64, speech_vocab_size=CODES, codec_layers=LAYERS, hidden_size=16, num_layers=2,
    num_attention_heads=2, ffn_size=24, prompt_tokens=9, codec="generated", tokenizer="generated@abc",
    phonemes=PHONEME_VERSION,
)  # fmt: skip
FEATURES = np.stack([random_voice(i) for i in range(VOICES)])


@pytest.fixture(scope="module")
def model() -> ResidualModel:
    torch.manual_seed(0)
    made = ResidualModel(CONFIG).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # attention and biases that matter
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


# --- an independent reference: one utterance, position by position --------------------------------


def rotated(x: Tensor, position: float) -> Tensor:
    """The two halves of x [D] turned by position / 10000^(i / half)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * 10_000 ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attended(layer, x: list[Tensor], positions: list[float]) -> list[Tensor]:
    """A layer, every position attending to every other one."""
    heads, size = layer.num_heads, len(x[0]) // layer.num_heads
    qkv = [layer.qkv(layer.attention_norm(one)).view(3, heads, size) for one in x]
    out = []
    for i, here in enumerate(x):
        parts = []
        for h in range(heads):
            query = rotated(qkv[i][0, h], positions[i])
            keys = [rotated(other[1, h], p) for other, p in zip(qkv, positions, strict=True)]
            shares = torch.stack([query @ key / math.sqrt(size) for key in keys]).softmax(0)
            parts.append(sum(share * other[2, h] for share, other in zip(shares, qkv, strict=True)))
        after = here + layer.out(torch.cat(parts))
        gelu = torch.nn.functional.gelu(layer.up(layer.ffn_norm(after)), approximate="tanh")
        out.append(after + layer.down(gelu))
    return out


@torch.no_grad()
def slow_logits(
    model: ResidualModel, text: list[int], prompt: np.ndarray, codes: np.ndarray
) -> Tensor:
    """Logits [T, V] of the layer after those in codes [j - 1, T]; prompt [L, P]."""
    table = model.codes.weight.view(LAYERS, CODES, -1)
    stage = model.stages.weight[len(codes) - 1]
    x = [model.text_embedding.weight[i] + stage for i in text]
    positions = [float(i) for i in range(len(text))]
    scale = model.config.speech_position_scale
    for part, start in ((prompt, -prompt.shape[1]), (codes, 0)):
        for t in range(part.shape[1]):
            x.append(sum(table[j, part[j, t]] for j in range(len(part))) + stage)
            positions.append(scale * (start + t))
    for layer in model.layers:
        x = attended(layer, x, positions)
    return torch.stack([table[len(codes)] @ model.norm(one) for one in x[-codes.shape[1] :]])


def batch_of(
    rows: list[tuple[list[int], np.ndarray, np.ndarray]], layers: int
) -> tuple[Tensor, ...]:
    """Texts, prompts [L, P] and codes [L, T] as the arguments of `forward`, with random ids
    after every end."""

    def padded(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(part) for part in parts])
        ids = torch.randint(CODES, (len(parts), int(lengths.max()) + 2, *parts[0].shape[1:]))
        for row, part in zip(ids, parts, strict=True):
            row[: len(part)] = part
        return ids, lengths

    texts, prompts, codes = zip(*rows, strict=True)
    return (
        *padded([torch.tensor(text) for text in texts]),
        *padded([torch.from_numpy(prompt.T) for prompt in prompts]),
        *padded([torch.from_numpy(code[:layers].T) for code in codes]),
    )


def some_rows() -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        (text, utterance(rng, i % VOICES)[1][:, : 5 + i], codes)
        for i in range(3)
        for text, codes in [utterance(rng, i % VOICES)]
    ]


@pytest.mark.parametrize("layer", range(2, LAYERS + 1))
def test_logits_equal_those_of_a_loop_over_positions(model, layer):
    rows = some_rows()
    with torch.no_grad():
        logits = model(*batch_of(rows, layer - 1))
    for row, (text, prompt, codes) in zip(logits, rows, strict=True):
        expected = slow_logits(model, text, prompt, codes[: layer - 1])
        torch.testing.assert_close(row[: codes.shape[1]], expected, rtol=1e-4, atol=1e-4)


def test_layers_are_filled_one_after_the_other_each_from_those_before(model):
    rows = some_rows()[:2]
    *context, codes, lengths = batch_of(rows, 1)
    with Kernels() as counted:
        filled = model.fill(*context, codes[..., 0], lengths)
    assert not counted.reads
    assert filled.shape == (2, codes.shape[1], LAYERS) and filled.dtype == torch.int64
    for row, (text, prompt, layers) in zip(filled, rows, strict=True):
        expected = layers[:1]
        for _ in range(LAYERS - 1):
            best = slow_logits(model, text, prompt, expected).argmax(-1).numpy()
            expected = np.concatenate([expected, best[None]])
        assert row[: layers.shape[1]].T.tolist() == expected.tolist()


# --- the vocoder ----------------------------------------------------------------------------------


def prompts() -> PromptAudio:
    return PromptAudio((features, lambda i=i: recording(i)) for i, features in enumerate(FEATURES))


@pytest.fixture
def vocoder(model) -> ResidualVocoder:
    return ResidualVocoder(model, GeneratedCodec(), prompts())


TOKENS = [[1, 2, 3, 4, 5], [], [7, 0, 7], [6] * 12]
TEXTS = ["a red house", "nothing", "yes", "one two three"]


def test_a_batch_equals_one_by_one_and_everything_matters(vocoder):
    speakers = FEATURES[[0, 1, 2, 0]]
    waves = vocoder.synthesize(TOKENS, speakers, TEXTS)
    assert [len(wave) for wave in waves] == [LAYERS * len(tokens) for tokens in TOKENS]
    for i, wave in enumerate(waves):
        alone = vocoder.synthesize(TOKENS[i : i + 1], speakers[i : i + 1], TEXTS[i : i + 1])[0]
        np.testing.assert_array_equal(wave, alone)
        assert wave.dtype == np.float32
        assert (100 * wave[::LAYERS]).round().astype(int).tolist() == TOKENS[i]
    other_voice = vocoder.synthesize(TOKENS, FEATURES[[1, 1, 2, 0]], TEXTS)
    other_text = vocoder.synthesize(TOKENS, speakers, ["many blue cars", *TEXTS[1:]])
    for others in (other_voice, other_text):
        assert not np.array_equal(waves[0], others[0])
        np.testing.assert_array_equal(waves[3], others[3])


def test_the_recording_of_a_voice_is_read_and_encoded_once(model):
    read = []
    audio = PromptAudio([(FEATURES[0], lambda: read.append(0) or recording(0))])
    vocoder = ResidualVocoder(model, GeneratedCodec(), audio)
    for _ in range(3):
        vocoder.synthesize([[1, 2]] * 2, FEATURES[[0, 0]], ["yes", "no"])
    assert read == [0]
    assert vocoder.prompt(FEATURES[0].tobytes()).shape == (CONFIG.prompt_tokens, LAYERS)


def test_only_a_vocoder_that_reads_texts_receives_them(vocoder):
    class Deaf:
        def synthesize(self, token_lists, speaker):
            return [np.full(len(tokens), 0.5, np.float32) for tokens in token_lists]

    assert len(synthesize(Deaf(), [[1, 2]], FEATURES[:1], ["yes"])[0]) == 2
    speakers = list(FEATURES[[0, 1, 2, 0]])
    expected = vocoder.synthesize(TOKENS, np.stack(speakers), TEXTS)
    for found in (
        voice(vocoder, TOKENS, speakers, TEXTS, 2),
        voice_each(vocoder, TOKENS, speakers, TEXTS),
    ):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_does_not_belong_together_is_refused(model, vocoder):
    made = TokenizerInfo("generated", "abc", CODES, 50.0)
    check_speaks(vocoder, made)
    with pytest.raises(CheckpointError, match="@abc, not of encodec-rvq1@def"):
        check_speaks(vocoder, replace(made, name="encodec-rvq1", checksum="def"))
    with pytest.raises(CheckpointError, match="tokens a second"):
        check_speaks(vocoder, replace(made, rate_hz=25.0))
    with pytest.raises(DataError, match=f"0..{CODES - 1}"):
        vocoder.synthesize([[0, CODES]], FEATURES[:1], ["yes"])
    with pytest.raises(DataError, match="prompts: .*load_vocoder"):
        vocoder.synthesize([[0]], FEATURES[:1] + 1, ["yes"])
    other, fewer = GeneratedCodec(), GeneratedCodec()
    other.checksum, fewer.layers = "def", LAYERS - 1
    for codec, said in ((other, "def"), (fewer, f"{LAYERS - 1} layers")):
        with pytest.raises(CheckpointError, match=said):
            ResidualVocoder(model, codec, prompts())
    older = ResidualModel(dataclasses.replace(CONFIG, phonemes="p0"))
    with pytest.raises(CheckpointError, match="p0.*dcar train-residual"):
        ResidualVocoder(older, GeneratedCodec(), prompts())
    with pytest.raises(ConfigError, match="hidden_size"):
        ResidualModel(dataclasses.replace(CONFIG, num_attention_heads=3))


def test_a_folder_names_its_codec(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(
        "dcar.vocoder.load.load_tokenizer", lambda *which: asked.append(which) or GeneratedCodec()
    )
    spec = f"residual:{tmp_path}"
    assert needs_prompt_audio(spec)
    with pytest.raises(ConfigError, match="takes the voice from a recording"):
        load_vocoder(spec)
    loaded = load_vocoder(spec, prompts=prompts())
    assert (
        asked == [("generated", "cpu")]
        and vocoder_identity(loaded, spec) == f"{model.checksum()} abc"
    )
    expected = ResidualVocoder(model, GeneratedCodec(), prompts()).synthesize(
        TOKENS, FEATURES[[0] * 4], TEXTS
    )
    for a, b in zip(expected, loaded.synthesize(TOKENS, FEATURES[[0] * 4], TEXTS), strict=True):
        np.testing.assert_array_equal(a, b)
    assert CONFIG.text_vocab_size > PHONEMES
