"""Training of the joint score of chunks: it learns, resumes, and refuses what does not belong
together."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_data import counting, write_prepared
from tiny_training import SMALL, arguments, check_resumption, log_of, tiny_config

from dcar.cli import main
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.car import CARDecoder
from dcar.train.car import run as train_decoder
from dcar.train.chunk_scorer import TrainChunkScorerConfig, run
from heads.chunk_scorer import ChunkScorer


@pytest.fixture(scope="module")
def decoder(data, tmp_path_factory) -> Path:
    """A decoder whose heads know little, in a corpus where a token follows from the one before."""
    out = tmp_path_factory.mktemp("decoder")
    train_decoder(tiny_config(data, out, max_steps=4))
    return out


def settings(data, decoder, out, **changes) -> dict:
    return (
        dict(
            data=str(data),
            decoder=str(decoder),
            out=str(out),
            prompt_tokens=5,
            positions=0.5,
            width=16,
        )
        | SMALL
        | dict(learning_rate=2e-2)
        | changes
    )


def config_of(*args, **changes) -> TrainChunkScorerConfig:
    return TrainChunkScorerConfig(**settings(*args, **changes))


def test_the_command_learns_and_leaves_everything_behind(data, decoder, tmp_path):
    out = tmp_path / "out"
    options = settings(data, decoder, out, max_steps=80, eval_steps=40, save_steps=40)
    main(["train-chunk-scorer", *arguments(options)])
    trained, base = ChunkScorer.from_pretrained(out), CARDecoder.from_pretrained(decoder)
    assert (
        trained.config.base_checksum == base.checksum() and trained.config.tokenizer == "tiny@abc"
    )
    assert (trained.config.num_heads, trained.config.vocab_size) == (3, base.config.output_size)
    evaluations = log_of(out, "eval_loss")
    assert [line["step"] for line in evaluations] == [40, 80, 80]
    assert evaluations[-1] == evaluations[-2] | {
        k: evaluations[-1][k] for k in evaluations[-1] if "time" in k
    }
    assert evaluations[-1]["eval_accuracy_whole"] > 0.9 and evaluations[-1]["eval_loss"] < 0.5
    source = json.loads((out / "provenance.json").read_text())
    assert source["checksum"] == trained.checksum() and source["steps"] == 80
    assert (
        "Chunk scorer" in (out / "README.md").read_text()
        and "width: 16" in (out / "config.yaml").read_text()
    )


def test_resumed_training_equals_one_that_never_stopped(data, decoder, tmp_path):
    check_resumption(run, partial(config_of, data, decoder), tmp_path)


def test_begins_from_the_chunk_scorer_of_another_decoder(data, decoder, tmp_path):
    first = run(config_of(data, decoder, tmp_path / "first"))
    tuned = tmp_path / "tuned"
    train_decoder(tiny_config(data, tuned, init_from=str(decoder), max_steps=1))
    again = run(
        config_of(
            data,
            tuned,
            tmp_path / "again",
            init_from=str(tmp_path / "first"),
            max_steps=1,
            learning_rate=1e-9,
        )
    )
    assert (
        again.config.base_checksum
        == CARDecoder.from_pretrained(tuned).checksum()
        != first.config.base_checksum
    )
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(again.parameters(), first.parameters(), strict=True)
    )
    with pytest.raises(CheckpointError, match="first: .*num_heads=3"):
        run(config_of(data, decoder, tmp_path / "x", init_from=str(tmp_path / "first"), width=8))


def test_what_does_not_belong_together_is_refused(data, decoder, tmp_path):
    out = tmp_path / "out"
    run(config_of(data, decoder, out, max_steps=2, save_steps=1))
    with pytest.raises(
        CheckpointError, match="checkpoint-2: .*width .*16.* 8.*resume_from_checkpoint=never"
    ):
        run(config_of(data, decoder, out, width=8))
    one = tmp_path / "one"
    train_decoder(tiny_config(data, one, model={"num_prediction_heads": 1}, max_steps=1))
    with pytest.raises(ConfigError, match="decoder .*/one "):
        run(config_of(data, one, tmp_path / "x"))
    other = write_prepared(tmp_path / "data", train=12, checksum="xyz", speech=counting)
    with pytest.raises((CheckpointError, DataError), match="xyz"):
        run(config_of(other, decoder, tmp_path / "x"))
    with pytest.raises(ConfigError, match="positions"):
        config_of(data, decoder, out, positions=0.0)
