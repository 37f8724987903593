"""Models around the decoder at the papers' sizes, with random weights.

No files are read: classes that load a published model are given one that was built here.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from dcar.audio import ENCODER_SAMPLE_RATE
from dcar.recognition.base import Recognizer
from dcar.recognition.load import load_recognizer
from dcar.recognition.nemo import NemoTransducerRecognizer, quiet_nemo
from dcar.tokens.hubert import HubertEncoder

Shape = dict[str, Any]
LARGE_HUBERT: Shape = {
    **dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    **dict(do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True),
}
TINY_HUBERT: Shape = {
    **LARGE_HUBERT,
    **dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
    **dict(conv_dim=[8] * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2),
}
FASTCONFORMER = """
sample_rate: 16000
shape: {layers: 17, width: 512, channels: 256, heads: 8, prediction: 640, symbols: 1024}
preprocessor: {_target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor, pad_to: 0,
  sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 80, n_fft: 512}
encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder, feat_in: 80, xscaling: false,
  n_layers: "${shape.layers}", d_model: "${shape.width}", n_heads: "${shape.heads}",
  subsampling: dw_striding, subsampling_factor: 8, conv_kernel_size: 9,
  subsampling_conv_channels: "${shape.channels}"}
model_defaults: {enc_hidden: "${shape.width}", pred_hidden: "${shape.prediction}",
  joint_hidden: "${shape.prediction}"}
decoder: {_target_: nemo.collections.asr.modules.RNNTDecoder, normalization_mode: null,
  random_state_sampling: false, blank_as_pad: true, vocab_size: "${shape.symbols}",
  prednet: {pred_hidden: "${shape.prediction}", pred_rnn_layers: 1, t_max: null, dropout: 0.0}}
joint: {_target_: nemo.collections.asr.modules.RNNTJoint, log_softmax: null, fused_batch_size: 1,
  preserve_memory: false, fuse_loss_wer: false, num_classes: "${shape.symbols}",
  jointnet: {joint_hidden: "${shape.prediction}", pred_hidden: "${shape.prediction}",
    encoder_hidden: "${shape.width}", activation: relu, dropout: 0.0}}
decoding: {strategy: greedy_batch, greedy: {max_symbols: 1, loop_labels: true}}
loss: {loss_name: pytorch}
"""
"""NeMo's stt_en_fastconformer_transducer_large; one symbol per frame is more than speech has."""
TINY_SHAPE = "{layers: 1, width: 16, channels: 8, heads: 2, prediction: 8, symbols: 4}"


def loading(kind: Any, model: Any) -> Any:
    """Make `kind.from_pretrained` return `model` within the block."""
    return patch.object(kind, "from_pretrained", return_value=model)


def hubert(device: str, tiny: bool) -> HubertEncoder:
    """Return HuBERT-Large with random weights, as an encoder of tokenizers."""
    with torch.device(device):
        config = transformers.HubertConfig(**(TINY_HUBERT if tiny else LARGE_HUBERT))
        model = transformers.HubertModel(config)
    extractor = transformers.Wav2Vec2FeatureExtractor(
        sampling_rate=ENCODER_SAMPLE_RATE, do_normalize=True
    )
    model_class, extractor_class = transformers.HubertModel, transformers.AutoFeatureExtractor
    with loading(model_class, model), loading(extractor_class, extractor):
        return HubertEncoder("random", device=device)


def hubert_ctc(device: str, tiny: bool) -> Recognizer:
    """Return HuBERT-Large with a CTC head, with random weights."""
    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        file.write_text(json.dumps({symbol: i for i, symbol in enumerate(symbols)}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(file))
    shape = TINY_HUBERT if tiny else LARGE_HUBERT
    config = transformers.HubertConfig(**shape, vocab_size=len(symbols))
    with torch.device(device):
        model = transformers.HubertForCTC(config)
    processor = transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), tokenizer)
    model_class, processor_class = transformers.AutoModelForCTC, transformers.Wav2Vec2Processor
    with loading(model_class, model), loading(processor_class, processor):
        return load_recognizer("ctc:random", device)


def whisper(device: str, tiny: bool) -> Recognizer:
    """Return Whisper in the shape of large-v3, with random weights."""
    width, layers, heads, mel, symbols = (16, 1, 2, 80, 64) if tiny else (1280, 32, 20, 128, 51866)
    pieces = ["a", "b", "Ġ", "<|endoftext|>", "<|startoftranscript|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    shape: Shape = {
        **dict(vocab_size=symbols, num_mel_bins=mel, d_model=width),
        **dict(encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * width),
        **dict(decoder_layers=layers, decoder_attention_heads=heads, decoder_ffn_dim=4 * width),
        **dict(pad_token_id=3, eos_token_id=3, bos_token_id=4, decoder_start_token_id=4),
        **dict(suppress_tokens=None, begin_suppress_tokens=None),
    }
    config = transformers.WhisperConfig(**shape)
    extractor = transformers.WhisperFeatureExtractor(feature_size=mel)
    model_class = transformers.WhisperForConditionalGeneration
    dtype = torch.float32 if tiny else torch.float16
    with torch.device(device):
        model = model_class._from_config(config, dtype=dtype)
    processor = transformers.WhisperProcessor(extractor, tokenizer)
    with loading(model_class, model), loading(transformers.WhisperProcessor, processor):
        return load_recognizer("whisper:random", device)


def fastconformer(device: str, tiny: bool) -> Recognizer:
    """Return NeMo's stt_en_fastconformer_transducer_large with random weights."""
    with quiet_nemo():
        from nemo.collections.asr.models import EncDecRNNTModel
        from omegaconf import OmegaConf

        config = OmegaConf.create(FASTCONFORMER)
        if tiny:
            config.shape = OmegaConf.create(TINY_SHAPE)
        config.labels = [chr(0x4E00 + i) for i in range(config.shape.symbols)]
        config.joint.vocabulary = config.labels
        model = EncDecRNNTModel(cfg=config)
    return NemoTransducerRecognizer(model, "random", device)
