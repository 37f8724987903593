"""What belongs together is checked in one place, whichever command puts it together."""

import json
from dataclasses import replace

import pytest
from tiny_data import tiny_tokenizer, tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder

from dcar.errors import CheckpointError, DataError
from dcar.prepare.prepared import prepared_info
from dcar.prompts.load import load_prompts, split_for, vocoder_for
from dcar.prompts.together import check_together, made_by
from dcar.text.english.inventory import PHONEME_VERSION
from dcar.text.units import units_for
from eval.analysis import fit_verifiers
from eval.compare import profile
from eval.compare.config import CompareConfig
from eval.compare.tools import load_tools
from rl.config import DCPOConfig
from rl.trainer import DCPOTrainer

OWN = dict(text_vocab_size=64, tokenizer="tiny@abc", phonemes=PHONEME_VERSION)


@pytest.fixture
def data(tmp_path):
    return str(write_prepared(tmp_path / "data", train=4, dev=2))


def test_parts_of_one_origin_pass(data):
    decoder = tiny_decoder(**OWN)
    check_together(decoder, prepared_info(data), data, tiny_vocoder())
    # says nothing of itself
    check_together(tiny_decoder(text_vocab_size=64), prepared_info(data), data)
    assert len(split_for(decoder, data, "dev")) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tokenizer="tiny@def"), "tiny@abc.* tiny@def"),
        (dict(speech_vocab_size=13), "12 .* 13"),
        (dict(phonemes="text-tokenizer:qwen"), f"{PHONEME_VERSION}.*text-tokenizer:qwen"),
    ],
)
def test_ids_of_another_origin_are_refused_by_every_command(data, tmp_path, change, message):
    decoder = tiny_decoder(**{**OWN, **change})
    decoder.save_pretrained(tmp_path / "car")
    folder = str(tmp_path / "car")
    commands = [
        lambda: load_tools(CompareConfig(data=data, split="dev", decoder=folder), "cpu"),
        lambda: load_prompts(data, "dev", decoder, 5, 0),
        lambda: DCPOTrainer(
            args=DCPOConfig(str(tmp_path / "dcpo"), use_cpu=True, decoder=folder, data=data)
        ),
        lambda: profile.run(profile.ProfileConfig(decoder=folder, data=data)),
        lambda: fit_verifiers.run(fit_verifiers.FitConfig(decoder=folder, data=data)),
    ]
    for command in commands:
        with pytest.raises(DataError, match=message):
            command()


def test_a_vocoder_of_another_origin_is_refused(data, tmp_path):
    decoder = tiny_decoder(**OWN)
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    assert vocoder_for(decoder, data, [], str(tmp_path / "vocoder")).vocab_size == 12
    card = tmp_path / "vocoder" / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "tokenizer_checksum": "another"}))
    with pytest.raises(CheckpointError, match="vocoder .*another.*abc"):
        vocoder_for(decoder, data, [], str(tmp_path / "vocoder"))


def test_ids_that_were_made_here(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    decoder = tiny_decoder(**{**OWN, "tokenizer": f"another name@{tokenizer.checksum}"})
    check_together(decoder, made_by(tokenizer, units_for()), "here")
    with pytest.raises(DataError, match="here: .*text-tokenizer:qwen"):
        check_together(
            decoder,
            replace(made_by(tokenizer, units_for()), phonemes="text-tokenizer:qwen"),
            "here",
        )
