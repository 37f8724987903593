"""The order of the heads and the attention of the first layer, held against slow references."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from tiny_backbones import tiny_backbone
from tiny_data import write_prepared
from tiny_decoders import states, tiny_decoder

from dcar.errors import ConfigError
from dcar.prompts.load import load_prompts
from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from eval.analysis.fit_verifiers import teacher_forced
from eval.analysis.heads import (
    RECENT,
    HeadsConfig,
    attention_of,
    first_attention,
    losses_by_head,
    run,
    table,
)

FITTING = dict(text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="tiny@abc", phonemes=PHONEME_VERSION)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("heads") / "data", train=2, dev=3)


@pytest.fixture(params=[True, False], ids=["bos", "continuation"])
def model(request):
    return tiny_decoder(**FITTING, bos=request.param)


def test_losses_are_those_of_each_head_at_its_own_position(model, data):
    items = load_prompts(str(data), "dev", model, 5, 0)
    for item, hidden in zip(items, teacher_forced(model, items), strict=True):
        losses = losses_by_head(model, hidden, item.reference_tokens)
        targets = [*item.reference_tokens, 12]
        assert losses.shape == (4, len(targets))
        for i, target in enumerate(targets):
            for k in range(4):
                if i < k:
                    assert losses[k, i].isnan()
                    continue
                past = states(model, item, item.reference_tokens[: i - k])[-1]
                expected = -model.heads.logits(past)[k].log_softmax(-1)[target]
                torch.testing.assert_close(losses[k, i], expected, atol=1e-4, rtol=1e-4)


def test_attention_is_what_the_first_layer_computes(model, data, monkeypatch):
    """With an identity in place of the values, torch's kernel returns the weights themselves."""
    item = load_prompts(str(data), "dev", model, 5, 0)[0]
    kernel, seen = F.scaled_dot_product_attention, []

    def record(q, k, v, **options):
        seen.append(kernel(q, k, torch.eye(q.shape[-2]).expand(*q.shape[:2], -1, -1), **options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr("heads.layers.F.scaled_dot_product_attention", record)
    weights = first_attention(model, item)
    texts = len(item.text_ids)
    torch.testing.assert_close(weights, seen[0][0].mean(0)[texts:])
    assert not model.layers[0]._forward_pre_hooks


def test_equal_weights_are_summarised_exactly():
    texts, first, speech = 4, 2, 20
    weights = torch.ones(speech, texts + speech).tril(texts)
    weights /= weights.sum(1, keepdim=True)
    found = attention_of(weights, texts, first)
    rows = range(first, speech)
    assert found.text == pytest.approx(sum(texts / (texts + r + 1) for r in rows) / len(rows))
    assert found.recent == pytest.approx(
        sum(min(RECENT, r + 1) / (texts + r + 1) for r in rows) / len(rows)
    )
    entropy = torch.tensor([texts + r + 1.0 for r in rows]).log().mean()
    assert found.entropy == pytest.approx(float(entropy), rel=1e-5)


def test_analysis_end_to_end(data, tmp_path):
    tiny_decoder(**FITTING).save_pretrained(tmp_path / "car")
    tiny_decoder(heads=1, **FITTING).save_pretrained(tmp_path / "far")
    given = dict(data=str(data), prompt_tokens=5, out=str(tmp_path / "out"))
    result = run(
        HeadsConfig(**given, decoder=str(tmp_path / "car"), far_decoder=str(tmp_path / "far"))
    )
    written = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert asdict(result).items() <= written.items()
    assert sum(row.best for row in result.heads) == pytest.approx(1)
    assert set(result.attention) == {"decoder", "far_decoder"}
    assert all(
        (tmp_path / "out" / f"{name}.png").stat().st_size > 1000 for name in ("heads", "attention")
    )
    assert "far_decoder, first layer" in table(result)
    with pytest.raises(ConfigError, match="far: .*one with several heads"):
        run(HeadsConfig(**given, decoder=str(tmp_path / "far")))


def test_a_converted_language_model_is_refused(data, tmp_path):
    tiny_backbone(4, phonemes=PHONEME_VERSION).save_pretrained(tmp_path / "lm")
    with pytest.raises(ConfigError, match="converted"):
        run(HeadsConfig(data=str(data), decoder=str(tmp_path / "lm"), out=str(tmp_path / "out")))
