"""Batches with rows of another corpus."""

import dataclasses
import json

import pytest
from tiny_data import counting, write_prepared
from tiny_training import tiny_config

from dcar.errors import ConfigError, DataError
from dcar.train.batches import ReplayBatchSampler
from dcar.train.car import run


def test_a_share_of_every_batch_is_replayed_and_no_own_row_is_lost():
    lengths = [10 + i for i in range(10)] + [10 + i % 20 for i in range(40)]
    sampler = ReplayBatchSampler(lengths, 10, 4, 0.5, seed=0)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 5
    own = [i for batch in batches for _, i in batch if i < 10]
    replayed = [[i for _, i in batch if i >= 10] for batch in batches]
    assert sorted(own) == list(range(10)) and all(len(r) == 2 == len(set(r)) for r in replayed)
    # of similar length, for padding is computed too
    for batch, others in zip(batches, replayed, strict=True):
        assert all(abs(lengths[i] - lengths[batch[0][1]]) <= 8 for i in others)
    assert batches == list(ReplayBatchSampler(lengths, 10, 4, 0.5, seed=0))
    sampler.set_epoch(1)
    assert list(sampler) != batches


def test_replay_trains_on_rows_of_both_and_refuses_another_tokenizer(data, tmp_path, caplog):
    other, foreign = (
        write_prepared(tmp_path / checksum, train=9, speech=counting, checksum=checksum)
        for checksum in ("abc", "another")
    )
    plain = run(tiny_config(data, tmp_path / "plain", max_steps=3))
    config = tiny_config(data, tmp_path / "out", max_steps=3, replay=str(other))
    info = json.loads((other / "prepared.json").read_text())
    (other / "prepared.json").write_text(json.dumps(info | {"corpus": {"kind": "folder"}}))
    assert run(config).checksum() != plain.checksum()
    assert "2 speakers have the same name in several corpora" in caplog.text
    with pytest.raises(DataError, match="replay .*another: .*abc"):
        run(dataclasses.replace(config, out=str(tmp_path / "x"), replay=str(foreign)))
    with pytest.raises(ConfigError, match="per_device_train_batch_size .*2"):
        dataclasses.replace(config, per_device_train_batch_size=1)
