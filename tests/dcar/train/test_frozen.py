"""Heads on a frozen trunk: what is trained and what is not, new heads, kept hidden states,
settings, resuming."""

from pathlib import Path

import pytest
import torch
from tiny_data import CODES
from tiny_training import log_of, tiny_config

from dcar.errors import ConfigError
from dcar.model.car import CARDecoder
from dcar.prepare.prepared import load_split, prepared_info
from dcar.train.batches import FrozenStates, SpeechDataset, collate
from dcar.train.car import data_identity, plan, run
from heads.shared import SharedHeads

SHARED = dict(heads="shared", num_prediction_heads=6)
FROZEN = dict(freeze_trunk=True, learning_rate=2e-2, max_steps=40, per_device_train_batch_size=6)


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    """A decoder with three independent heads that has learned the corpus."""
    out = tmp_path_factory.mktemp("base")
    run(tiny_config(data, out, max_steps=60, per_device_train_batch_size=8))
    return out


def trunk_of(decoder: CARDecoder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in decoder.state_dict().items()
        if not name.startswith("heads.") or name.startswith("heads.base.")
    }


@pytest.mark.parametrize("changes", [{}, dict(keep_states=True, head_positions=0.5)])
def test_only_the_new_heads_learn(base, data, tmp_path, changes):
    tuned = run(tiny_config(data, tmp_path, SHARED, init_from=str(base), **FROZEN, **changes))
    before, after = trunk_of(CARDecoder.from_pretrained(base)), trunk_of(tuned)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert isinstance(tuned.heads, SharedHeads) and tuned.heads.num_heads == 6
    losses = [line["loss"] for line in log_of(tmp_path, "loss")]
    assert losses[-1] < 0.6 * losses[0]
    last, ours = log_of(tmp_path, "eval_loss")[-1], log_of(base, "eval_loss")[-1]
    assert last["eval_head1_loss"] == pytest.approx(ours["eval_head1_loss"], abs=1e-4)
    assert last["eval_head6_accuracy"] > 3 / (CODES + 1)
    assert CARDecoder.from_pretrained(tmp_path).checksum() == tuned.checksum()


def test_a_run_that_was_cut_off_goes_on_to_the_same_weights(base, data, tmp_path):
    config = tiny_config(
        data,
        tmp_path / "out",
        SHARED,
        init_from=str(base),
        **{**FROZEN, "max_steps": 6, "keep_states": True, "save_steps": 3},
    )
    whole = run(config)
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "gone")  # the run was cut off before it
    assert run(config).checksum() == whole.checksum()


def made(data: Path, config) -> CARDecoder:
    return plan(config, data_identity(prepared_info(data)))[2]()


def test_heads_that_are_there_go_on_and_others_begin_from_the_base_head(base, data, tmp_path):
    start = CARDecoder.from_pretrained(base)
    same = made(data, tiny_config(data, tmp_path, init_from=str(base), **FROZEN))
    assert torch.equal(same.heads.projection, start.heads.projection)
    more = made(
        data,
        tiny_config(data, tmp_path, {"num_prediction_heads": 5}, init_from=str(base), **FROZEN),
    )
    assert torch.equal(more.heads.projection[3], start.heads.base.weight)
    other = made(data, tiny_config(data, tmp_path, SHARED, init_from=str(base), **FROZEN))
    assert torch.equal(other.heads.out.weight, start.heads.base.weight)
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n
        for n, _ in other.named_parameters()
        if n.startswith("heads.") and not n.startswith("heads.base.")
    }


def test_the_trunk_runs_without_dropout_and_the_hidden_states_get_it(base, data, tmp_path):
    decoder = made(data, tiny_config(data, tmp_path, SHARED, init_from=str(base), **FROZEN)).train()
    batch = collate(
        [SpeechDataset(load_split(data, "train"), decoder.config, 5, 0)[0, i] for i in range(4)]
    )
    states = [decoder.speech_hidden(batch) for _ in range(2)]
    assert torch.equal(*states) and not states[0].requires_grad and decoder.heads.training
    assert decoder(batch).loss != decoder(batch).loss
    decoder.eval()
    assert decoder(batch).loss == decoder({**batch, "states": states[0]}).loss


def test_kept_states_are_those_of_the_trunk(base, data, tmp_path):
    decoder = made(data, tiny_config(data, tmp_path, SHARED, init_from=str(base), **FROZEN)).train()
    plain = SpeechDataset(load_split(data, "train"), decoder.config, 5, 0)
    kept = FrozenStates(plain, decoder, 4)
    assert decoder.heads.training and len(kept) == len(plain)
    wanted = collate([plain[0, i] for i in (3, 7)])
    found = collate([kept[9, i] for i in (3, 7)])  # of the first epoch in every epoch
    hidden = decoder.eval().speech_hidden(wanted)
    for row, length in enumerate(wanted["speech_lengths"].tolist()):
        assert torch.allclose(found["states"][row, :length], hidden[row, :length], atol=5e-3)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_settings_that_contradict_each_other_are_refused(base, data, tmp_path):
    def config(model: dict | None = None, **changes):
        return tiny_config(
            data, tmp_path, model, **{"init_from": str(base), "freeze_trunk": True, **changes}
        )

    for message, ask in (
        ("freeze_trunk .*init_from.*num_prediction_heads", lambda: config(init_from="")),
        (
            "freeze_trunk .*init_from.*num_prediction_heads",
            lambda: config({"num_prediction_heads": 1}),
        ),
        ("keep_states", lambda: config(keep_states=True, freeze_trunk=False)),
        ("keep_states", lambda: config(keep_states=True, input_corruption=0.1)),
        ("num_layers .*2.*3", lambda: run(config({**SHARED, "num_layers": 3}))),
        # only with a frozen trunk
        (
            "num_prediction_heads .*3.*5",
            lambda: run(config({"num_prediction_heads": 5}, freeze_trunk=False)),
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()
