"""Vocoders behind one interface, chosen by a setting: our own, codecs that speak their own tokens, other projects'.

| setting | speaks | needs |
| --- | --- | --- |
| `starter` or a folder | tokens of the tokenizer it was trained on (`dcar.vocoder.model.TokenVocoder`) | – |
| `xcodec2:FOLDER` | X-codec2 codes | transformers |
| `speechtokenizer:FOLDER` | first layer of SpeechTokenizer | package speechtokenizer |
| `vec2wav2:FOLDER#CODEBOOK.npy#WAVLM` | k-means units, in the voice of a prompt | vec2wav 2.0 on PYTHONPATH |
| `cosyvoice:FOLDER` | S³ tokens, in the voice of a prompt | CosyVoice on PYTHONPATH |

All offer what a comparison asks of a vocoder: `sample_rate`, `token_rate`, `check_tokenizer(identity)` and
`synthesize(token_lists, speaker)`. The last two take the voice from a recording, not from features: they look it up by
the features that they are given (`PromptAudio`).
"""

from __future__ import annotations

from typing import Any

from dcar.errors import ConfigError
from dcar.sources.shipped import resolve
from dcar.vocoder import codec, prompted
from dcar.vocoder.base import PromptAudio
from dcar.vocoder.model import TokenVocoder
from heads.checkpoint import tensors_checksum


def hears_prompts(spec: str) -> bool:
    """Whether the vocoder of a setting takes the voice from recordings (`prompts` of `load_vocoder`)."""
    return str(spec).partition(":")[0] in ("vec2wav2", "cosyvoice")


def load_vocoder(spec: str = "", device: str = "cpu", prompts: PromptAudio | None = None) -> Any:
    """The vocoder of a setting (see the module's table; empty is `starter`), on `device`, ready to synthesise.

    prompts: recordings of the voices, for `vec2wav2` and `cosyvoice`. Raises AssetError, CheckpointError, ConfigError.
    """
    kind, _, rest = str(spec).partition(":")
    if not rest:
        return TokenVocoder.from_pretrained(resolve(spec or "starter", "vocoder"), device)
    if hears_prompts(spec):
        if prompts is None:
            raise ConfigError(f"{spec}: this vocoder takes the voice from a recording; give the prompts' audio")
        if kind == "vec2wav2":
            return prompted.Vec2Wav2Vocoder.from_spec(rest, device, prompts)
        return prompted.CosyVoiceVocoder(rest, prompts)
    if kind in ("xcodec2", "speechtokenizer"):
        return {"xcodec2": codec.XCodec2Vocoder, "speechtokenizer": codec.SpeechTokenizerVocoder}[kind](rest, device)
    raise ConfigError(f"vocoder {spec!r}: choose a folder, starter, xcodec2:, speechtokenizer:, vec2wav2: or "
                      "cosyvoice:")  # fmt: skip


def vocoder_identity(vocoder: Any, spec: str) -> str:
    """What sound depends on: the weights of our own vocoder, of others their setting and their own checksum."""
    if isinstance(vocoder, TokenVocoder):
        return tensors_checksum(vocoder.state_dict())
    return f"{spec} {getattr(vocoder, 'tokenizer_checksum', '')}".strip()
