"""Vocoders by name: codecs on tiny random checkpoints, prompt vocoders against modules of the
projects' signatures."""

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_codecs import needs, save_codec, save_speechtokenizer, save_xcodec2
from tiny_data import tiny_vocoder
from tones import chirp

from dcar.errors import AssetError, CheckpointError, ConfigError, DataError
from dcar.prompts.together import made_by
from dcar.text.units import units_for
from dcar.tokens.load import load_tokenizer
from dcar.tokens.origin import TokenizerInfo
from dcar.vocoder.base import PromptAudio, check_speaks
from dcar.vocoder.load import load_vocoder, vocoder_identity

VOICES = np.zeros((2, 298), np.float32)


def test_our_own_by_folder(tmp_path):
    own = tiny_vocoder()
    own.save_pretrained(tmp_path)
    assert load_vocoder(str(tmp_path)).config == own.config
    assert load_vocoder("").sample_rate == 24_000  # the shipped one
    with pytest.raises(ConfigError, match="'griffin:lim'.*starter, xcodec2"):
        load_vocoder("griffin:lim")


def check_codec(spec: str, layers: str, rate: int, per_token: int) -> None:
    """Tokens of its own tokenizer go through; foreign ids and foreign tokenizers do not."""
    vocoder, tokenizer = load_vocoder(spec), load_tokenizer(spec + layers)
    about = made_by(tokenizer, units_for()).tokenizer
    check_speaks(vocoder, about)
    tokens = [tokenizer.encode([chirp(0.4, 1)], 24_000)[0].tolist(), []]
    wave, nothing = vocoder.synthesize(tokens, VOICES)
    assert vocoder.sample_rate == rate and len(nothing) == 0
    assert len(wave) == len(tokens[0]) * per_token
    assert wave.dtype == np.float32 and np.isfinite(wave).all() and np.abs(wave).max() <= 1
    np.testing.assert_array_equal(wave, vocoder.synthesize(tokens[::-1], VOICES)[1])
    other = vocoder.synthesize([[0] * len(tokens[0])], VOICES[:1])[0]
    assert np.abs(other - wave).max() > 0  # the tokens matter
    size = vocoder.vocab_size
    with pytest.raises(DataError, match=f"token {size} .*0..{size - 1}"):
        vocoder.synthesize([[0, size]], VOICES[:1])
    for other in ({"name": "whisper-base-kmeans"}, {"checksum": "another"}):
        with pytest.raises(
            CheckpointError, match=f"{tokenizer.name}@.*{next(iter(other.values()))}"
        ):
            check_speaks(vocoder, replace(about, **other))
    with pytest.raises(DataError, match="1 .*2 voices"):
        vocoder.synthesize([[0]], VOICES)


@pytest.mark.parametrize(
    ("kind", "rate", "per_token"),
    [
        ("xcodec2", 16_000, 320),
        ("speechtokenizer", 16_000, 320),
        ("encodec", 24_000, 240),
        ("mimi", 16_000, 1_280),
        ("dac", 24_000, 320),
    ],
)
def test_codecs(kind: str, rate: int, per_token: int, tmp_path, monkeypatch):
    if kind == "xcodec2":
        check_codec(f"xcodec2:{save_xcodec2(tmp_path)}", "", rate, per_token)
    elif kind == "speechtokenizer":
        needs(kind, monkeypatch)
        check_codec(f"{kind}:{save_speechtokenizer(tmp_path)}", "", rate, per_token)
    else:
        check_codec(f"codec:{save_codec(kind, tmp_path)}", "@4", rate, per_token)


# ------------------------------------------------------------------------ vocoders that hear a prom


def prompts() -> tuple[np.ndarray, PromptAudio]:
    features = np.random.default_rng(0).standard_normal((2, 298)).astype(np.float32)
    waves = [chirp(1.0, 3), chirp(1.0, 4)]
    return features, PromptAudio(
        (f, lambda w=w: (w, 24_000)) for f, w in zip(features, waves, strict=True)
    )


def test_prompts_are_found_by_their_features():
    features, audio = prompts()
    np.testing.assert_array_equal(audio(features[1])[0], chirp(1.0, 4))
    np.testing.assert_array_equal(audio(features[0].astype(np.float64))[0], chirp(1.0, 3))
    with pytest.raises(DataError, match="load_vocoder"):
        audio(features[0] + 1)
    with pytest.raises(ConfigError, match="cosyvoice:x: "):
        load_vocoder("cosyvoice:x")


class CosyVoice2:
    """Signatures of cosyvoice.cli: frontend_vc(source_wav, prompt_wav, resample_rate),
    tts(**inputs, stream, speed)."""

    sample_rate = 24_000

    def __init__(self, model_dir: str):
        self.frontend, self.model = self, self
        self.flow = types.SimpleNamespace(input_frame_rate=25, vocab_size=6561)

    def frontend_vc(self, source_wav: str, prompt_wav: str, resample_rate: int) -> dict[str, Any]:
        import soundfile as sf

        wave, rate = sf.read(prompt_wav)
        assert resample_rate == 24_000 and rate == 24_000
        return {
            "source_speech_token": torch.zeros(1, 3),
            "source_speech_token_len": None,
            "flow_prompt_speech_token": torch.zeros(1, 25),
            "prompt_speech_feat": torch.zeros(1, 50, 80),
            "flow_embedding": torch.full((1, 192), float(np.abs(wave[:5000]).mean())),
        }

    def tts(
        self,
        source_speech_token,
        source_speech_token_len,
        flow_prompt_speech_token,
        prompt_speech_feat,
        flow_embedding,
        stream,
        speed,
    ):
        assert source_speech_token.dtype == torch.int32 and not stream and speed == 1.0
        assert int(source_speech_token_len) == source_speech_token.shape[1]
        wave = source_speech_token.float().repeat_interleave(960, 1) / 6561 * flow_embedding[:, :1]
        yield {"tts_speech": wave[:, :1000]}
        yield {"tts_speech": wave[:, 1000:]}


def test_cosyvoice(tmp_path, monkeypatch):
    features, audio = prompts()
    with pytest.raises(AssetError, match="https://github.com/FunAudioLLM/CosyVoice"):
        load_vocoder(f"cosyvoice:{tmp_path}", prompts=audio)
    package, cli, project = (
        types.ModuleType(n) for n in ("cosyvoice", "cosyvoice.cli", "cosyvoice.cli.cosyvoice")
    )
    package.cli, cli.cosyvoice, project.CosyVoice2 = cli, project, CosyVoice2  # type: ignore[attr-defined]
    for module in (package, cli, project):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "cosyvoice2.yaml").write_text("")
    with pytest.raises(AssetError, match=r"flow.pt: .*modelscope download"):
        load_vocoder(f"cosyvoice:{tmp_path}", prompts=audio)
    for name in ("flow.pt", "hift.pt"):
        torch.save({"w": torch.zeros(1)}, tmp_path / name)
    vocoder = load_vocoder(f"cosyvoice:{tmp_path}", prompts=audio)
    about = TokenizerInfo("s3_v2_25hz", "abc", 6561, 25.0)
    check_speaks(vocoder, about)
    assert (vocoder.token_rate, vocoder.vocab_size) == (25, 6561)
    one, two = vocoder.synthesize([[6560, 3], [6560, 3]], features)
    assert len(one) == 2 * 960 and np.abs(one[:960]).min() > 0 and np.abs(one - two).max() > 1e-6
    with pytest.raises(CheckpointError, match="s3@, not of hubert-kmeans@abc"):
        check_speaks(vocoder, replace(about, name="hubert-kmeans"))
    torch.save({"w": torch.ones(1)}, tmp_path / "flow.pt")  # other weights in the same folder
    spec = f"cosyvoice:{tmp_path}"
    other = load_vocoder(spec, prompts=audio)
    assert vocoder_identity(other, spec) != vocoder_identity(vocoder, spec)
    torch.save({"w": Path("/")}, tmp_path / "hift.pt")
    with pytest.raises(CheckpointError, match="hift.pt: "):
        load_vocoder(f"cosyvoice:{tmp_path}", prompts=audio)
