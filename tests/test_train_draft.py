"""Draft models: which layers they inherit, what is trained, resuming, and whose they are."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny_decoder
from tiny_data import CODES, counting, write_prepared

from dcar.cli import main
from dcar.draft import DraftDecoder, build_draft
from dcar.errors import CheckpointError, ConfigError
from dcar.model import CARConfig, CARDecoder
from dcar.text import PHONEME_VERSION
from dcar.train_draft import TrainDraftConfig, run
from heads.draft import inherited_layers


@pytest.mark.parametrize("depth, expected", [
    (24, ((0, 1), (18, 19, 20, 21, 22, 23))), (12, ((0,), (9, 10, 11))), (8, ((0,), (6, 7))), (2, ((0,), (1,))),
])
def test_shares_of_the_paper(depth, expected):
    assert inherited_layers(depth) == expected


def test_layers_that_are_not_there_are_refused():
    assert inherited_layers(6, bottom=2, top=3) == ((0, 1), (3, 4, 5))
    for depth, bottom, top in ((1, 0, 0), (4, 3, 2), (4, -1, 2)):
        with pytest.raises(ConfigError, match="cannot be taken"):
            inherited_layers(depth, bottom, top)


def test_whole_depth_is_the_target_itself(decoder, prompts):
    draft = build_draft(decoder).eval()
    ids = torch.tensor([[1, 2, 13, 4, 5]])
    arguments = (torch.tensor([[1, 2, 3]]), torch.tensor([3]), ids, torch.tensor([5]), torch.tensor([3]))
    with torch.no_grad():
        a, b = decoder.speech_hidden(*arguments), draft.speech_hidden(*arguments)
        assert torch.equal(a, b) and torch.equal(decoder.heads.single(a, 1), draft.heads.single(b, 1))


def test_middle_layers_are_left_out():
    target = tiny_decoder(num_layers=8)
    draft = build_draft(target)
    assert draft.config.inherited_layers == (0, 6, 7) and draft.config.bottom_layers == 1
    for own, index in enumerate((0, 6, 7)):
        for name, value in draft.layers[own].state_dict().items():
            assert torch.equal(value, target.layers[index].state_dict()[name])
    assert draft.config.num_prediction_heads == 1 and draft.config.output_size == target.config.output_size


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("data") / "prepared", train=18, dev=9, speech=counting)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    model = CARDecoder(CARConfig(
        text_vocab_size=64, speech_vocab_size=CODES, hidden_size=32, num_layers=4, num_attention_heads=2, ffn_size=64,
        num_prediction_heads=3, head_blocks=1, bos=True, speech_position_scale=0.3, tokenizer="tiny@abc",
        phonemes=PHONEME_VERSION))
    path = tmp_path_factory.mktemp("target") / "car"
    model.save_pretrained(path)
    return path


def settings(data, target, out, **changes) -> dict:
    return dict(target=str(target), data=str(data), out_dir=str(out), prompt_tokens=5, batch_size=6, max_steps=12,
                warmup_steps=2, learning_rate=1e-2, log_steps=2, eval_steps=6, save_steps=6) | changes


def test_bottom_and_head_learn_and_the_rest_stays(data, target, tmp_path):
    options = [f"{k}={v}" for k, v in settings(data, target, tmp_path / "draft", max_steps=40, eval_steps=20).items()]
    main(["train-draft", *options])
    draft, base = DraftDecoder.from_pretrained(tmp_path / "draft"), CARDecoder.from_pretrained(target)
    draft.check_target(base)
    start = build_draft(base)
    trained = {name for name, p in start.named_parameters() if p.requires_grad and p.numel()}  # no additional heads
    assert trained == {n for n, _ in start.named_parameters() if n.startswith(("layers.0.", "heads.base"))}
    frozen = {name: value for name, value in start.state_dict().items() if name not in trained}
    after = draft.state_dict()
    assert all(torch.equal(after[name], value) for name, value in frozen.items()) and frozen
    assert all(not torch.equal(after[name], start.state_dict()[name]) for name in trained)
    lines = [json.loads(x) for x in (tmp_path / "draft" / "log.jsonl").read_text().splitlines()]
    losses = [x["loss"] for x in lines if "loss" in x]
    assert losses[-1] < 0.4 * losses[0]
    assert [x["step"] for x in lines if "eval_head1_loss" in x] == [20, 40, 40]  # the last one on what was saved
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text())["checksum"] == draft.checksum()
    assert "target:" in (tmp_path / "draft" / "config.yaml").read_text()


def test_resumed_training_equals_one_that_never_stopped(data, target, tmp_path):
    whole = run(TrainDraftConfig(**settings(data, target, tmp_path / "whole")))
    out = tmp_path / "halves"
    run(TrainDraftConfig(**settings(data, target, out)))
    for name in ("model.safetensors", "log.jsonl"):
        (out / name).unlink()
    for file in (out / "checkpoint-12").iterdir():
        file.unlink()
    (out / "checkpoint-12").rmdir()
    again = run(TrainDraftConfig(**settings(data, target, out)))
    assert again.checksum() == whole.checksum()


def test_what_does_not_belong_together_is_refused(data, target, tmp_path):
    run(TrainDraftConfig(**settings(data, target, tmp_path / "draft", max_steps=1)))
    draft = DraftDecoder.from_pretrained(tmp_path / "draft")
    other = CARDecoder.from_pretrained(target)
    with torch.no_grad():
        other.norm.weight[0] += 1
    with pytest.raises(CheckpointError, match="dcar train-draft"):
        draft.check_target(other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="another draft: target_checksum"):
        run(TrainDraftConfig(**settings(data, tmp_path / "other", tmp_path / "draft", max_steps=6, save_steps=1)) if
            (tmp_path / "draft" / "checkpoint-1").is_dir() else pytest.fail("no checkpoint was saved"))
    foreign = write_prepared(tmp_path / "foreign", checksum="xyz", speech=counting)
    with pytest.raises(CheckpointError, match="target's tokenizer"):
        run(TrainDraftConfig(**settings(foreign, target, tmp_path / "x")))
    with pytest.raises(ConfigError, match="cannot be taken"):
        run(TrainDraftConfig(**settings(data, target, tmp_path / "x", bottom_layers=3, top_layers=2)))
    with pytest.raises(ConfigError, match="count layers"):
        TrainDraftConfig(bottom_layers=-1)
