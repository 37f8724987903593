"""A step of stage one: its kernels and reads by the host, batches by tokens, and compiled as
well as eager."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from kernels import Kernels
from tiny_data import CODES, write_prepared
from tiny_decoders import tiny_decoder
from tiny_training import tiny_config, trainer_of

from dcar.errors import ConfigError
from dcar.model.car import CARConfig, CARDecoder
from dcar.prepare.prepared import load_split
from dcar.sources.shipped import shipped
from dcar.train.batches import SpeechDataset, TokenBatchSampler, collate
from dcar.train.car import run


@pytest.mark.parametrize(
    ("heads", "share", "most"),
    [("independent", 1.0, 300), ("independent", 0.3, 310), ("shared", 0.3, 330)],
)
def test_a_step_has_few_kernels_and_no_reads_by_the_host(heads, share, most):
    """Twelve layers and seven heads; heads one after another had 550 kernels forward and 712
    backward. The optimiser's are counted in tests/dcar/test_optim.py."""
    torch.manual_seed(0)
    model = CARDecoder(
        CARConfig(
            text_vocab_size=64,
            speech_vocab_size=256,
            hidden_size=32,
            num_layers=12,
            heads=heads,
            num_attention_heads=2,
            ffn_size=64,
            num_prediction_heads=7,
        )
    ).train()
    example = dict(text=[1] * 20, speech=[3] * 60, prompt_length=10)
    batch = collate([example] * 4)
    for _ in range(2):  # what later steps reuse is made in the first
        parts = [Kernels() for _ in range(2)]
        with parts[0]:
            loss = model(batch, head_positions=share).loss
        with parts[1]:
            loss.backward()
        model.zero_grad()
    for part, bound in zip(parts, (most, 450), strict=True):
        assert not part.reads and part.kernels <= bound, (part.kernels, part.ops)


def test_inputs_are_corrupted_in_training_alone_and_the_start_symbol_stays(data, tmp_path):
    config = tiny_config(data, tmp_path, input_corruption=0.5, head_positions=0.3)
    trainer = trainer_of(
        config, tiny_decoder(bos=True, text_vocab_size=64, speech_vocab_size=CODES)
    )
    batch = next(iter(trainer.get_train_dataloader()))
    speech = batch["speech_ids"]
    codes = speech < CODES
    noisy = torch.stack([trainer._corrupt(speech) for _ in range(20)])
    assert (noisy[:, ~codes] == speech[~codes]).all() and (noisy[:, codes] < CODES).all()
    changed = (noisy != speech)[:, codes].double().mean()
    assert float(changed) == pytest.approx(0.5 * (1 - 1 / CODES), abs=0.05)
    model = trainer.model.eval()
    with torch.no_grad():
        assert float(trainer.compute_loss(model, batch)) == float(model(batch).loss)


# --- batches by tokens ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    """Speech tokens of the shipped training split."""
    return load_split(str(shipped("prepared")), "train").columns["speech_tokens"]


@pytest.mark.parametrize(("tokens", "processes"), [(3200, 1), (3200, 2), (3200, 4), (16000, 1)])
def test_token_budgets_waste_little_and_give_all_processes_the_same_work(
    lengths, tokens, processes
):
    samplers = [TokenBatchSampler(lengths, tokens, 0, rank, processes) for rank in range(processes)]
    steps = list(zip(*samplers, strict=True))
    assert len(steps) == len(samplers[0])
    real = padded = waited = 0
    for step in steps:
        assert len({len(batch) for batch in step}) == 1
        work = [len(batch) * max(lengths[i] for _, i in batch) for batch in step]
        waited += sum(max(work) - one for one in work)
        for batch in step:
            size = [lengths[i] for _, i in batch]
            assert len(size) * max(size) <= tokens
            real, padded = real + sum(size), padded + len(size) * max(size)
    padding = 1 - real / padded
    assert padding <= 0.05 and waited <= 0.01 * padded
    seen = collections.Counter(i for step in steps for batch in step for _, i in batch)
    assert (
        len(seen) == len(lengths)
        and seen.total() - len(lengths) < tokens // lengths.min() * processes
    )
    again = TokenBatchSampler(lengths, tokens, 0, 0, processes)
    assert list(again) == [step[0] for step in steps]
    again.set_epoch(1)
    other = list(again)
    assert len(other) == len(steps) and {i for batch in other[:3] for _, i in batch} != {
        i for step in steps[:3] for _, i in step[0]
    }


def test_token_budgets_of_few_utterances_and_of_too_long_ones():
    batches = [list(TokenBatchSampler([9, 3, 5], 10, 0, rank, 2)) for rank in (0, 1)]
    assert {i for of in batches for batch in of for _, i in batch} == {0, 1, 2}
    assert len(batches[0]) == len(batches[1]) == len(TokenBatchSampler([9, 3, 5], 10, 0, 0, 2))
    with pytest.raises(ConfigError, match="per_device_train_batch_tokens=8 .* 9 "):
        TokenBatchSampler([9, 3, 5], 8, 0)


@pytest.mark.parametrize("bos", [True, False])
def test_token_budgets_contain_the_prompts(data, tmp_path, bos):
    config = tiny_config(
        data, tmp_path, dict(bos=bos), prompt_tokens=9, per_device_train_batch_tokens=90
    )
    trainer = trainer_of(config, tiny_decoder(bos=bos))
    shapes = [batch["speech_ids"].shape for batch in trainer.get_train_dataloader()]
    assert max(rows * longest for rows, longest in shapes) <= 90
    assert sum(rows for rows, _ in shapes) >= len(trainer.train_dataset)


def test_a_run_with_a_token_budget_resumes_bit_for_bit(data, tmp_path):
    config = tiny_config(
        data,
        tmp_path / "out",
        per_device_train_batch_tokens=100,
        max_steps=6,
        save_steps=3,
        head_positions=0.5,
    )
    whole = run(config)
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "gone")
    assert run(config).checksum() == whole.checksum()
    with pytest.raises(
        ConfigError, match="replay .*per_device_train_batch_size .*per_device_train_batch_tokens"
    ):
        dataclasses.replace(config, replay="starter")


# --- compiled -------------------------------------------------------------------------------------


def losses_and_gradients(
    model: CARDecoder, batches: list[dict]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for batch in batches:
        loss = model(batch).loss
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
    return found


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_a_compiled_step_is_one_graph_for_all_shapes_and_equals_the_eager_one(
    kind, backend, tmp_path
):
    model = tiny_decoder(kind=kind, dropout=0.0).train()
    folder = write_prepared(tmp_path / "data", train=16)
    examples = SpeechDataset(
        load_split(str(folder), "train"),
        dataclasses.replace(model.config, text_vocab_size=64),
        5,
        0,
    )
    batches = [
        collate([{**examples[0, i], "text": [i + 1] * (4 + i)} for i in rows])
        for rows in ([0, 1, 2, 3], [4, 5, 6], range(6, 14))
    ]
    eager = losses_and_gradients(model, batches)
    torch._dynamo.reset()
    model.compile(dynamic=True, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = losses_and_gradients(model, batches)
    for (loss, gradient), (other, theirs) in zip(compiled, eager, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-5, atol=0)
        assert (gradient - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_every_trained_parameter_of_a_decoder_with_one_head_gets_a_gradient(kind, data, tmp_path):
    """DDP looks for no unused parameters, and would wait for those of additional heads that
    there are none of."""
    model = tiny_decoder(1, kind=kind, text_vocab_size=64, speech_vocab_size=16)
    trainer = trainer_of(tiny_config(data, tmp_path), model)
    assert trainer.args.ddp_find_unused_parameters is False
    trainer.compute_loss(model.train(), next(iter(trainer.get_train_dataloader()))).backward()
    assert all(
        (p.grad is not None) == p.requires_grad == (p.numel() > 0) for p in model.parameters()
    )
