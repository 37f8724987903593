"""The CAR decoder and its heads: targets, losses, shapes, checkpoints."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_backbones import batch, tiny_backbone
from tiny_decoders import draw_blocks, tiny_decoder

from dcar.errors import CheckpointError, ConfigError
from dcar.model import car
from dcar.model.car import CARDecoder, disjoint_shares, head_targets
from dcar.model.load import load_decoder
from heads.multi_token import MultiTokenHeads
from heads.policy import ChunkPolicy, HiddenPolicy, HiddenPolicyConfig


def test_targets_of_head_k_are_k_ahead():
    """y_t = t; EOS follows the end."""
    targets = head_targets(
        torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]), torch.tensor([6, 2]), 3, eos=99
    )
    assert targets.shape == (2, 6, 3)
    for head in (1, 2, 3):
        for row, length in zip(targets[..., head - 1].tolist(), (6, 2), strict=True):
            assert row == [t + head if t + head < length else 99 for t in range(6)]


@pytest.mark.parametrize("made", [tiny_decoder, tiny_backbone])
def test_loss_is_the_sum_of_head_losses_computed_by_hand(made):
    decoder, inputs = made(), batch()
    output, logits = decoder(inputs), decoder.heads.logits(decoder.speech_hidden(inputs))
    by_hand = []
    for head in range(1, 5):
        losses = []
        for b, (length, prompt) in enumerate(
            zip(inputs["speech_lengths"], inputs["prompt_lengths"], strict=True)
        ):
            for t in range(prompt - 1, length):
                target = int(inputs["speech_ids"][b, t + head]) if t + head < length else 12
                losses.append(F.cross_entropy(logits[b, t, head - 1][None], torch.tensor([target])))
        by_hand.append(torch.stack(losses).mean())
    assert torch.allclose(output.head_losses, torch.stack(by_hand), atol=1e-5)
    assert torch.allclose(output.loss, sum(by_hand), atol=1e-4)
    weighted = decoder(inputs, head_weights=[1, 0.5, 0.25, 0.125]).loss
    assert torch.allclose(
        weighted, sum(w * x for w, x in zip([1, 0.5, 0.25, 0.125], by_hand, strict=True)), atol=1e-4
    )
    with pytest.raises(ConfigError, match="3 .* 4 heads"):
        decoder(inputs, head_weights=[1, 1, 1])


def loss_head_by_head(decoder: CARDecoder, inputs: dict, weights: list[float]) -> torch.Tensor:
    """The loss as a slow reference: one head after another, at the rows of its targets alone."""
    hidden, heads = decoder.speech_hidden(inputs), decoder.heads
    lengths, place = inputs["speech_lengths"], torch.arange(inputs["speech_ids"].shape[1])
    kept = (place >= inputs["prompt_lengths"][:, None] - 1) & (place < lengths[:, None])
    total = torch.zeros(())
    for head, weight in enumerate(weights, start=1):
        targets = head_targets(inputs["speech_ids"], lengths, head, decoder.config.eos)[..., -1]
        z = hidden[kept]
        if head == 1:
            logits = heads.base(z)
        elif isinstance(heads, MultiTokenHeads):
            for block in range(heads.blocks):
                z = z + F.silu(
                    z @ heads.block_weight[block, head - 2].T + heads.block_bias[block, head - 2, 0]
                )
            logits = z @ heads.projection[head - 2].T
        else:
            z = z + heads.offset[head - 2]
            for i, (up, down) in enumerate(zip(heads.up, heads.down, strict=True)):
                z = z + down(
                    F.silu(up(z) * (1 + heads.scale[i, head - 2]) + heads.shift[i, head - 2])
                )
            logits = heads.out(heads.norm(z))
        total = total + weight * F.cross_entropy(logits, targets[kept])
    return total


@pytest.mark.parametrize("kind", ["independent", "shared"])
@pytest.mark.parametrize("logits", [None, 100])
def test_loss_and_gradients_are_those_of_heads_one_by_one(kind, logits, monkeypatch):
    """Also in pieces of a few positions."""
    if logits:
        monkeypatch.setattr(car, "LOGITS", logits)
    decoder, inputs, weights = tiny_decoder(kind=kind).train(), batch(), [1, 0.5, 0.25, 0.125]
    decoder.config.dropout = 0.0
    for layer in decoder.layers:
        layer.dropout = 0.0
    parameters = [p for p in decoder.parameters() if p.numel()]
    output, slow = decoder(inputs, weights), loss_head_by_head(decoder, inputs, weights)
    assert output.head_accuracies is None and torch.allclose(output.loss, slow, atol=1e-5)
    for ours, theirs in zip(
        *(torch.autograd.grad(loss, parameters) for loss in (output.loss, slow)), strict=True
    ):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-7


def test_a_share_of_the_positions_is_an_unbiased_estimate_and_other_heads_have_others(decoder):
    shares = disjoint_shares(4, 10, 0.2, torch.device("cpu"))
    assert shares.shape == (4, 2) and len(set(shares.flatten().tolist())) == 8
    wrapped = disjoint_shares(3, 10, 0.6, torch.device("cpu"))
    assert all(len(set(row)) == 6 for row in wrapped.tolist())
    torch.manual_seed(0)
    inputs = batch()
    whole = decoder(inputs).head_losses
    drawn = torch.stack([decoder(inputs, head_positions=0.3).head_losses for _ in range(400)])
    assert torch.equal(drawn[0, :1], whole[:1]) and float(drawn[:, 1:].std(0).min()) > 0.1
    error = drawn.std(0) / 20
    assert ((drawn.mean(0) - whole).abs() <= 4 * error + 1e-6).all()


def test_text_is_bidirectional_and_speech_is_causal(decoder):
    inputs = batch()
    hidden = decoder.speech_hidden(inputs)
    later = inputs["speech_ids"].clone()
    later[0, 4] = 11
    changed = decoder.speech_hidden({**inputs, "speech_ids": later})
    assert torch.equal(hidden[0, :4], changed[0, :4]) and not torch.allclose(
        hidden[0, 4], changed[0, 4]
    )
    text = inputs["text_ids"].clone()
    text[0, 2] = 17
    changed = decoder.speech_hidden({**inputs, "text_ids": text})
    # every speech position sees all text
    assert (hidden[0, :6] - changed[0, :6]).abs().amax(-1).min() > 1e-4
    assert torch.equal(hidden[1], changed[1])
    text = inputs["text_ids"].clone()
    text[0, 4] = 17  # padding of the first row
    assert torch.allclose(
        hidden[0], decoder.speech_hidden({**inputs, "text_ids": text})[0], atol=1e-6
    )


def test_first_k_heads_do_not_depend_on_the_others():
    torch.manual_seed(0)
    heads = draw_blocks(MultiTokenHeads(16, 11, 5, blocks=3))
    hidden = torch.randn(2, 3, 16)
    full = heads.logits(hidden)
    assert full.shape == (2, 3, 5, 11)
    for k in range(1, 6):
        assert torch.allclose(heads.logits(hidden, k), full[..., :k, :], atol=1e-6)
    own = torch.randn(4, 7, 16)  # states of their own
    for head, logits in enumerate(heads(own), start=2):
        assert torch.allclose(logits, heads.logits(own[head - 2])[:, head - 1], atol=1e-6)
    # as if each were a module of its own: residual blocks and a bias-free projection
    z = hidden
    for block in range(3):
        z = z + F.silu(F.linear(z, heads.block_weight[block, 2], heads.block_bias[block, 2, 0]))
    assert torch.allclose(full[..., 3, :], z @ heads.projection[2].T, atol=1e-5)


def test_blocks_are_distinct_parameters_and_start_as_a_constant_shift():
    block, projection = 16 * 16 + 16, 16 * 11
    heads = MultiTokenHeads(16, 11, 5, blocks=4)
    assert sum(p.numel() for p in heads.parameters()) == projection + 4 * (4 * block + projection)
    heads, hidden = MultiTokenHeads(16, 11, 3, blocks=1), torch.randn(5, 16)
    shift = F.silu(heads.block_bias[0, 0, 0])
    assert torch.allclose(
        heads.logits(hidden, 2)[:, 1], (hidden + shift) @ heads.projection[0].T, atol=1e-6
    )


@pytest.mark.parametrize("made", [tiny_decoder, tiny_backbone])
def test_checkpoint_round_trip_and_checksum(made, tmp_path):
    decoder = made()
    decoder.save_pretrained(tmp_path)
    loaded = load_decoder(tmp_path)
    assert type(loaded) is type(decoder) and loaded.config == decoder.config and not loaded.training
    assert loaded.checksum() == decoder.checksum() and not any(b.is_meta for b in loaded.buffers())
    assert torch.equal(loaded(batch()).loss, decoder(batch()).loss)
    with torch.no_grad():
        loaded.norm.weight[0] += 1e-3
    assert loaded.checksum() != decoder.checksum()


def test_weights_are_stored_in_half_where_that_loses_nothing(decoder, tmp_path):
    """A part that came from such a file, as a policy's chunk scorer, stays small; the model
    stays the same."""
    weight = decoder.speech_embedding.weight
    weight.data = weight.data.half().float()
    decoder.save_pretrained(tmp_path)
    kinds = {name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert kinds["speech_embedding.weight"] == torch.float16 != kinds["text_embedding.weight"]
    assert CARDecoder.from_pretrained(tmp_path).checksum() == decoder.checksum()
    decoder.save_pretrained(tmp_path, half=True)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {
        torch.float16
    }


def edited(removed: str = "", **changes):
    """What changes settings in the config.json of a folder, or removes one."""

    def edit(folder) -> None:
        settings = json.loads((folder / "config.json").read_text()) | changes
        settings.pop(removed, None)
        (folder / "config.json").write_text(json.dumps(settings))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(num_layers=3), "missing"),
        (edited(hidden_size=64), "shapes"),
        (edited(colour=1), "config.json: .*'colour'"),
        (edited("dropout"), r"config.json: .*\['dropout'\]"),
        (edited(format_version=2), "config.json: .*version 2.* 1"),
        (edited("format_version"), "config.json: .*version None.* 1"),
        (lambda p: (p / "model.safetensors").write_bytes(b"\0" * 100), "model.safetensors: "),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors: "),
        (lambda p: (p / "config.json").write_text("{"), "config.json: "),
        (lambda p: (p / "config.json").write_bytes(b'{"phonemes": "caf\xe9"}'), "config.json: "),
        (lambda p: (p / "config.json").write_text("[1, 2]"), "config.json: .*\\[1, 2\\]"),
        (lambda p: (p / "config.json").write_text("null"), "config.json: .*null"),
        (edited(dropout=5), "config.json: .*\\(dropout"),
        (edited(hidden_size="wide"), "config.json: .*hidden_size"),
    ],
)
def test_damaged_checkpoints_are_refused(decoder, tmp_path, damage, message):
    decoder.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        CARDecoder.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path)


def test_a_policy_is_no_decoder_knows_its_base_and_begins_uniform(decoder, tmp_path):
    policy = HiddenPolicy(
        HiddenPolicyConfig(32, 7, width=16, num_attention_heads=2, base_checksum=decoder.checksum())
    )
    probs = policy(torch.randn(2, 5, 32)).softmax(-1)
    assert torch.allclose(probs, torch.full_like(probs, 1 / 7))
    policy.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="'dcar-hidden-policy' .*'dcar-decoder'"):
        CARDecoder.from_pretrained(tmp_path)
    loaded = ChunkPolicy.from_pretrained(tmp_path)
    loaded.check_base(decoder.checksum())
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        loaded.check_base(tiny_decoder(seed=1).checksum())
