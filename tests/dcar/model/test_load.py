"""What "starter" stands for wherever a decoder or a policy is asked for."""

import pytest

from dcar.errors import CheckpointError, ConfigError
from dcar.methods import load_models, make_methods
from dcar.model.companions import load_policy, text_units
from dcar.model.load import load_decoder, load_decoder_config
from dcar.sources.shipped import shipped
from dcar.text.units import units_for
from heads.policy import ChunkPolicy


def test_starter_is_what_ships():
    decoder, far = load_decoder("starter"), load_decoder("starter", starter="far")
    assert decoder.checksum() == load_decoder(shipped("decoder")).checksum()
    assert far.checksum() == load_decoder(shipped("far")).checksum()
    assert (decoder.config.num_prediction_heads, far.config.num_prediction_heads) == (16, 1)
    assert load_decoder_config("starter") == decoder.config
    assert load_decoder_config("starter", "far") == far.config
    assert text_units("starter") is units_for()
    hot, cold = load_policy("starter-t1.0"), load_policy("starter-t0.4")
    assert (
        hot.checksum()
        == ChunkPolicy.from_pretrained(shipped("policy-t1.0")).checksum()
        != cold.checksum()
    )
    assert cold.checksum() == ChunkPolicy.from_pretrained(shipped("policy-t0.4")).checksum()
    with pytest.raises(ConfigError, match="starter-t1.0 or starter-t0.4"):
        load_policy("starter")
    # of policies alone; elsewhere it is a folder
    with pytest.raises(CheckpointError, match="starter-t0.4"):
        load_decoder("starter-t0.4")


def test_a_language_model_as_it_was_published_is_no_decoder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(CheckpointError, match="dcar convert-backbone"):
        load_decoder(tmp_path)


def test_a_comparison_of_the_starter_models():
    models = load_models("starter", "starter", ["starter-t1.0"])
    far, dcar = make_methods(["far", "dcar"], models)
    assert (
        far.decoder.config.num_prediction_heads == 1
        and dcar.decoder.config.num_prediction_heads == 16
    )
    several = ["starter-t1.0", f"mine={shipped('policy-t0.4')}"]
    assert list(load_models("starter", "", several).policies) == ["starter-t1.0", "mine"]


def test_further_decoders_have_names_that_a_method_can_contain():
    both = ["recordings=starter-undistilled", "a=starter"]
    assert list(load_models("starter", "", [], decoders=both).decoders) == ["recordings", "a"]
    for wrong in (["starter"], ["a=starter", "a=starter"]):
        with pytest.raises(ConfigError, match="name=folder, with names that differ"):
            load_models("starter", "", [], decoders=wrong)
    with pytest.raises(ConfigError, match="car-1:a@t1 would read as .*decoder-a@t1=FOLDER"):
        load_models("starter", "", [], decoders=["a@t1=starter"])
