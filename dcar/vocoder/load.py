"""Vocoders behind one interface, chosen by a setting: our own, codecs that decode their own tokens,
those of other projects.

| setting | reads | needs |
| --- | --- | --- |
| `starter` or a folder | tokens of the tokenizer it was trained on (`TokenVocoder`) | – |
| `xcodec2:FOLDER` | X-codec2 codes | transformers |
| `speechtokenizer:FOLDER` | first layer of SpeechTokenizer | package speechtokenizer |
| `codec:FOLDER_OR_NAME` | first layer of EnCodec, Mimi or DAC | transformers |
| `cosyvoice:FOLDER` | S³ tokens, in the voice of a prompt | CosyVoice on PYTHONPATH |
| `residual:FOLDER` | first layer of a codec, in the voice of a prompt | `dcar train-residual` |

All have the attributes and methods that a comparison needs: `sample_rate`, `token_rate`,
`tokenizer` and `synthesize(token_lists, speaker)`. The last two take the voice from
a recording, which they find by the features (`PromptAudio`). The last one also reads the texts
(`dcar.vocoder.voicing.synthesize`).
"""

from __future__ import annotations

from typing import Any

from dcar.errors import ConfigError
from dcar.sources.shipped import resolve
from dcar.tokens.load import load_tokenizer
from dcar.vocoder.base import PromptAudio
from dcar.vocoder.codec import CodecVocoder, CosyVoiceVocoder
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.residual import ResidualModel, ResidualVocoder


def needs_prompt_audio(spec: str) -> bool:
    """Return whether the vocoder of a setting takes the voice from recordings (`prompts` of
    `load_vocoder`)."""
    return str(spec).partition(":")[0] in ("cosyvoice", "residual")


def load_vocoder(spec: str = "", device: str = "cpu", prompts: PromptAudio | None = None) -> Any:
    """Return the vocoder of a setting (see the module's table; empty is `starter`), on `device`,
    ready to synthesise.

    prompts: recordings of the voices, for `cosyvoice` and `residual`. Raises AssetError,
    CheckpointError, ConfigError.
    """
    kind, _, rest = str(spec).partition(":")
    if not rest:
        return TokenVocoder.from_pretrained(resolve(spec or "starter", "vocoder"), device)
    if needs_prompt_audio(spec):
        if prompts is None:
            raise ConfigError(
                f"vocoder {spec}: takes the voice from a recording; pass `prompts`, the audio of "
                "the prompts, to load_vocoder"
            )
        if kind == "cosyvoice":
            return CosyVoiceVocoder(rest, prompts)
        model = ResidualModel.from_pretrained(rest, device)
        return ResidualVocoder(model, load_tokenizer(model.config.codec, device), prompts)
    if kind in ("xcodec2", "speechtokenizer", "codec"):
        codec: Any = load_tokenizer(spec, device)
        return CodecVocoder(codec)
    raise ConfigError(
        f"vocoder {spec!r}: choose a folder, starter, xcodec2:, speechtokenizer:, codec:, "
        "cosyvoice: or residual:"
    )


def vocoder_identity(vocoder: Any, spec: str) -> str:
    """Return what determines the sound of a vocoder: for our own, the checksum of the weights;
    for others, their setting and their own checksum, or that of their codec."""
    if isinstance(vocoder, TokenVocoder):
        return vocoder.checksum()
    if isinstance(vocoder, ResidualVocoder):
        return vocoder.checksum
    checksum = getattr(vocoder, "checksum", vocoder.tokenizer.rpartition("@")[2])
    return f"{spec} {checksum}".strip()
