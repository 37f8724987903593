"""A run with which nothing is transcribed needs no recogniser, nor the packages that one would
be loaded with."""

import numpy as np
import pytest
from compare_worker import ToneVocoder, tiny_items
from tiny_data import CODES, write_prepared
from tiny_decoders import tiny_decoder

from dcar.config import load_config
from dcar.errors import AssetError, CheckpointError, ConfigError
from dcar.recognition.load import load_token_recognizer
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from dcar.sources.shipped import shipped
from dcar.text.english.inventory import PHONEME_VERSION
from rl import trainer as module
from rl.config import DCPOConfig
from rl.rewards import BUILT_IN
from rl.trainer import DCPOTrainer
from rl.transcription import UnusedRecognizer


def config_of(folder, *more: str) -> DCPOConfig:
    own = [
        f"out={folder}",
        *(
            "use_cpu=true reward_funcs=[range_penalty] chunk_range=[2,3] policy_width=16 "
            "policy_heads=2 metric_for_best_model=eval_reward"
        ).split(),
    ]
    return load_config(DCPOConfig, [*own, *more])


def made(config: DCPOConfig):
    items = tiny_items(2 * config.prompts_per_step)
    return DCPOTrainer(
        args=config,
        decoder=tiny_decoder(7),
        vocoder=ToneVocoder(),
        train_dataset=items,
        eval_dataset=items,
    )


def test_what_is_not_heard_is_not_loaded(tmp_path, monkeypatch):
    def missing(name: str, device: str):
        raise AssetError(f"the recogniser {name} needs NeMo")

    monkeypatch.setattr(module, "load_recognizer", missing)
    trainer = made(config_of(tmp_path))
    assert trainer.recognizer.name == "starter"
    assert "reward" in "".join(trainer.evaluate())
    with pytest.raises(ConfigError, match="starter .*recognizer="):
        UnusedRecognizer("starter").transcribe([np.zeros(9, np.float32)], 16_000)
    for more in ("reward_funcs=[cer]", "metric_for_best_model=eval_wer"):
        with pytest.raises(AssetError, match="starter .*NeMo"):
            made(config_of(tmp_path, more))


def test_likelihood_of_tokens_is_by_a_recogniser_of_the_same_tokens(tmp_path):
    def reward(*more: str):
        return BUILT_IN["token_likelihood"](config_of(tmp_path, *more), UnusedRecognizer("a"))

    made = reward(f"data={shipped('prepared')}", "credit=decision")
    assert made.locates and not made.needs_audio and made.scale == 0.2
    assert made.recognizer.checksum() == load_token_recognizer("starter").checksum()
    other = write_prepared(tmp_path / "other")
    with pytest.raises(CheckpointError, match="other: .*tiny@abc.*dcar train-recognizer"):
        reward(f"data={other}")
    TokenRecognizer(
        TokenRecognizerConfig(CODES, 61, 8, (1,), "tiny@abc", PHONEME_VERSION)
    ).save_pretrained(tmp_path / "own")
    assert not reward(f"data={other}", f"token_recognizer={tmp_path / 'own'}").locates
    with pytest.raises(ConfigError, match="token_likelihood .*data="):
        reward()
