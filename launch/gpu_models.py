"""Models around the decoder at the papers' sizes, with random weights.

No files are read: classes that load a published model are given one that was built here
(`in_place_of`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.recognition.nemo import NemoTransducerRecognizer, quiet_nemo
from dcar.tokens.hubert import HubertEncoder

Shape = dict[str, Any]
WHISPER: Shape = dict(
    vocab_size=51866,
    num_mel_bins=128,
    d_model=1280,
    encoder_layers=32,
    decoder_layers=32,
    encoder_attention_heads=20,
    decoder_attention_heads=20,
    encoder_ffn_dim=5120,
    decoder_ffn_dim=5120,
)
HUBERT: Shape = dict(
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    do_stable_layer_norm=True,
    feat_extract_norm="layer",
    conv_bias=True,
)
TINY_WHISPER: Shape = dict(
    vocab_size=64,
    num_mel_bins=80,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
)
TINY_HUBERT: Shape = HUBERT | dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    conv_dim=[8] * 7,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
)
FASTCONFORMER: Shape = dict(
    layers=17, width=512, channels=256, heads=8, prediction=640, symbols=1024
)
TINY_FASTCONFORMER: Shape = dict(layers=1, width=16, channels=8, heads=2, prediction=8, symbols=4)


@contextmanager
def in_place_of(made: Mapping[type, Any]) -> Iterator[None]:
    """Make `from_pretrained` of each class return the given object within the block."""
    with ExitStack() as stack:
        for kind, thing in made.items():
            stack.enter_context(
                patch.object(kind, "from_pretrained", lambda *a, made=thing, **k: made)
            )
        yield


def hubert(device: str, tiny: bool) -> HubertEncoder:
    """Return HuBERT-Large with random weights, as an encoder of tokenizers."""
    from transformers import AutoFeatureExtractor, HubertConfig, HubertModel
    from transformers import Wav2Vec2FeatureExtractor as Extractor

    with torch.device(device):
        model = HubertModel(HubertConfig(**(TINY_HUBERT if tiny else HUBERT)))
    extractor = Extractor(sampling_rate=ENCODER_SAMPLE_RATE, do_normalize=True)
    with in_place_of({HubertModel: model, AutoFeatureExtractor: extractor}):
        return HubertEncoder("random", device=device)


def whisper(device: str, tiny: bool) -> Recognizer:
    """Return Whisper in the shape of large-v3, with random weights."""
    import transformers

    pieces = ["a", "b", "Ġ", "<|endoftext|>", "<|startoftranscript|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    shape = TINY_WHISPER if tiny else WHISPER
    config = transformers.WhisperConfig(
        **shape,
        pad_token_id=3,
        bos_token_id=4,
        eos_token_id=3,
        decoder_start_token_id=4,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=shape["num_mel_bins"])
    dtype = torch.float32 if tiny else torch.float16
    with torch.device(device):
        model = transformers.WhisperForConditionalGeneration._from_config(config, dtype=dtype)
    processor = transformers.WhisperProcessor(extractor, tokenizer)
    made = {
        transformers.WhisperForConditionalGeneration: model,
        transformers.WhisperProcessor: processor,
    }
    with in_place_of(made):
        return load_recognizer("whisper:random", device)


def hubert_ctc(device: str, tiny: bool) -> Recognizer:
    """Return HuBERT-Large with a CTC head, with random weights."""
    import transformers

    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        file.write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(file))
    shape = TINY_HUBERT if tiny else HUBERT
    with torch.device(device):
        model = transformers.HubertForCTC(
            transformers.HubertConfig(**shape, vocab_size=len(symbols))
        )
    processor = transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), tokenizer)
    with in_place_of(
        {transformers.AutoModelForCTC: model, transformers.Wav2Vec2Processor: processor}
    ):
        return load_recognizer("ctc:random", device)


def fastconformer(device: str, tiny: bool) -> Recognizer:
    """Return NeMo's stt_en_fastconformer_transducer_large with random weights.

    It writes one symbol per frame, which is more than speech has.
    """
    shape = TINY_FASTCONFORMER if tiny else FASTCONFORMER
    modules = "nemo.collections.asr.modules."
    labels = [chr(0x4E00 + i) for i in range(shape["symbols"])]
    width, prediction = shape["width"], shape["prediction"]
    tree: Shape = {
        "sample_rate": ENCODER_SAMPLE_RATE,
        "labels": labels,
        "preprocessor": {
            "_target_": modules + "AudioToMelSpectrogramPreprocessor",
            "sample_rate": ENCODER_SAMPLE_RATE,
            "window_size": 0.025,
            "window_stride": 0.01,
            "features": 80,
            "n_fft": 512,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": modules + "ConformerEncoder",
            "feat_in": 80,
            "n_layers": shape["layers"],
            "d_model": width,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": shape["channels"],
            "n_heads": shape["heads"],
            "xscaling": False,
            "conv_kernel_size": 9,
        },
        "model_defaults": {
            "enc_hidden": width,
            "pred_hidden": prediction,
            "joint_hidden": prediction,
        },
        "decoder": {
            "_target_": modules + "RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "vocab_size": len(labels),
            "prednet": {
                "pred_hidden": prediction,
                "pred_rnn_layers": 1,
                "t_max": None,
                "dropout": 0.0,
            },
        },
        "joint": {
            "_target_": modules + "RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": False,
            "fused_batch_size": 1,
            "num_classes": len(labels),
            "vocabulary": labels,
            "jointnet": {
                "joint_hidden": prediction,
                "activation": "relu",
                "dropout": 0.0,
                "encoder_hidden": width,
                "pred_hidden": prediction,
            },
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 1, "loop_labels": True}},
        "loss": {"loss_name": "pytorch"},
    }
    with quiet_nemo():
        from nemo.collections.asr.models import EncDecRNNTModel
        from omegaconf import OmegaConf

        model = EncDecRNNTModel(cfg=OmegaConf.create(tree))
    return NemoTransducerRecognizer(model, "random", device)
