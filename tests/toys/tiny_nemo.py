"""Models of NeMo with a few thousand parameters: a FastConformer over characters, CTC or
transducer."""

from pathlib import Path
from typing import Any

import torch

from dcar.recognition.encoder import CHARACTERS
from dcar.recognition.nemo import quiet_nemo

MODULE = "nemo.collections.asr.modules."


def _common() -> dict[str, Any]:
    return {
        "sample_rate": 16_000,
        "labels": list(CHARACTERS),
        "preprocessor": {
            "_target_": MODULE + "AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16_000,
            "window_size": 0.025,
            "window_stride": 0.01,
            "features": 80,
            "pad_to": 0,
        },
        "encoder": {
            "_target_": MODULE + "ConformerEncoder",
            "feat_in": 80,
            "n_layers": 1,
            "d_model": 16,
            "subsampling": "dw_striding",
            "subsampling_factor": 4,
            "subsampling_conv_channels": 8,
            "n_heads": 2,
            "xscaling": False,
            "conv_kernel_size": 9,
            "dropout_emb": 0.0,
            "dropout_att": 0.1,
        },
        "spec_augment": {
            "_target_": MODULE + "SpectrogramAugmentation",
            "freq_masks": 2,
            "time_masks": 2,
            "freq_width": 20,
            "time_width": 0.05,
        },
    }


def save_ctc(path: Path) -> Path:
    """Save an `EncDecCTCModel` in NeMo's format."""
    with quiet_nemo():
        from nemo.collections.asr.models import EncDecCTCModel
        from omegaconf import OmegaConf

        decoder = {
            "_target_": MODULE + "ConvASRDecoder",
            "feat_in": 16,
            "num_classes": len(CHARACTERS),
            "vocabulary": list(CHARACTERS),
        }
        torch.manual_seed(0)
        EncDecCTCModel(
            OmegaConf.create(
                _common() | {"decoder": decoder, "decoding": {"strategy": "greedy_batch"}}
            )
        ).save_to(str(path))
    return path


def save_transducer(path: Path) -> Path:
    """Save an `EncDecRNNTModel` that transcribes noise as text, in NeMo's format."""
    with quiet_nemo():
        from nemo.collections.asr.models import EncDecRNNTModel
        from omegaconf import OmegaConf

        labels = list(CHARACTERS)
        tree = _common() | {
            "model_defaults": {"enc_hidden": 16, "pred_hidden": 8, "joint_hidden": 8},
            "decoder": {
                "_target_": MODULE + "RNNTDecoder",
                "normalization_mode": None,
                "random_state_sampling": False,
                "blank_as_pad": True,
                "prednet": {"pred_hidden": 8, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.0},
                "vocab_size": len(labels),
            },
            "joint": {
                "_target_": MODULE + "RNNTJoint",
                "log_softmax": None,
                "preserve_memory": False,
                "fuse_loss_wer": False,
                "fused_batch_size": 1,
                "jointnet": {
                    "joint_hidden": 8,
                    "activation": "relu",
                    "dropout": 0.0,
                    "encoder_hidden": 16,
                    "pred_hidden": 8,
                },
                "num_classes": len(labels),
                "vocabulary": labels,
            },
            "decoding": {
                "strategy": "greedy_batch",
                "greedy": {"max_symbols": 3, "loop_labels": True, "use_cuda_graph_decoder": False},
            },
            "loss": {"loss_name": "pytorch"},
        }
        torch.manual_seed(1)
        model = EncDecRNNTModel(cfg=OmegaConf.create(tree)).eval()
        with torch.no_grad():
            for name, parameter in model.joint.named_parameters():
                if name.endswith("weight"):
                    parameter.mul_(4)  # so that the transcript depends on the audio
            # fewer blanks and spaces, so that the transcript is not empty
            model.joint.joint_net[-1].bias[[-1, labels.index(" ")]] -= 4
        model.save_to(str(path))
    return path
