"""Draft models: which layers they inherit, what is trained, resuming, and whose they are."""

import json

import pytest
import torch
from tiny_backbones import architecture, tiny_backbone, tiny_prompts
from tiny_data import CODES, counting, write_prepared
from tiny_decoders import tiny_decoder
from tiny_training import SMALL, arguments, check_resumption, log_of

from dcar.cli import main
from dcar.decoding import FixedChunk, decode
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.backbones.lora import LoraSettings, add_lora
from dcar.model.car import CARConfig, CARDecoder
from dcar.model.draft import BackboneDraft, DraftDecoder, build_draft, check_draft, inherited_layers
from dcar.model.load import load_decoder
from dcar.sampling import SamplingConfig
from dcar.text.english.inventory import PHONEME_VERSION
from dcar.train.draft import TrainDraftConfig, run
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding


def test_inherited_layers():
    """The shares of the paper, those asked for, and those that are not there."""
    shares = {
        24: ((0, 1), (18, 19, 20, 21, 22, 23)),
        12: ((0,), (9, 10, 11)),
        8: ((0,), (6, 7)),
        2: ((0,), (1,)),
    }
    assert {depth: inherited_layers(depth) for depth in shares} == shares
    assert inherited_layers(6, bottom=2, top=3) == ((0, 1), (3, 4, 5))
    for depth, bottom, top in ((1, 0, 0), (4, 3, 2), (4, -1, 2)):
        with pytest.raises(ConfigError, match="bottom_layers.*top_layers"):
            inherited_layers(depth, bottom, top)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    model = CARDecoder(
        CARConfig(
            text_vocab_size=64,
            speech_vocab_size=CODES,
            hidden_size=32,
            num_layers=4,
            num_attention_heads=2,
            ffn_size=64,
            num_prediction_heads=3,
            head_blocks=1,
            bos=True,
            speech_position_scale=0.3,
            tokenizer="tiny@abc",
            phonemes=PHONEME_VERSION,
        )
    )
    path = tmp_path_factory.mktemp("target") / "car"
    model.save_pretrained(path)
    return path


def settings(data, target, out, **changes) -> dict:
    return (
        dict(decoder=str(target), data=str(data), out=str(out), prompt_tokens=5, **SMALL) | changes
    )


def test_bottom_and_head_learn_and_the_rest_stays(data, target, tmp_path):
    main(
        [
            "train-draft",
            *arguments(settings(data, target, tmp_path / "draft", max_steps=40, eval_steps=20)),
        ]
    )
    draft = DraftDecoder.from_pretrained(tmp_path / "draft")
    base = CARDecoder.from_pretrained(target)
    check_draft(draft, base)
    start = build_draft(base)
    # no additional heads
    trained = {name for name, p in start.named_parameters() if p.requires_grad and p.numel()}
    assert trained == {
        n for n, _ in start.named_parameters() if n.startswith(("layers.0.", "heads.base"))
    }
    frozen = {name: value for name, value in start.state_dict().items() if name not in trained}
    after = draft.state_dict()
    assert all(torch.equal(after[name], value) for name, value in frozen.items()) and frozen
    assert all(not torch.equal(after[name], start.state_dict()[name]) for name in trained)
    losses = [line["loss"] for line in log_of(tmp_path / "draft", "loss")]
    assert losses[-1] < 0.4 * losses[0]
    steps = [line["step"] for line in log_of(tmp_path / "draft", "eval_head1_loss")]
    assert steps == [20, 40, 40]  # the last one on what was saved
    assert (
        json.loads((tmp_path / "draft" / "provenance.json").read_text())["checksum"]
        == draft.checksum()
    )
    assert "decoder:" in (tmp_path / "draft" / "config.yaml").read_text()


def test_what_does_not_belong_together_is_refused(data, target, tmp_path):
    run(TrainDraftConfig(**settings(data, target, tmp_path / "draft", max_steps=1, save_steps=1)))
    assert (tmp_path / "draft" / "checkpoint-1").is_dir()
    draft = DraftDecoder.from_pretrained(tmp_path / "draft")
    other = CARDecoder.from_pretrained(target)
    with torch.no_grad():
        other.norm.weight[0] += 1
    with pytest.raises(CheckpointError, match="draft .*dcar train-draft"):
        check_draft(draft, other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="checkpoint-1: .*target_checksum"):
        run(TrainDraftConfig(**settings(data, tmp_path / "other", tmp_path / "draft")))
    foreign = write_prepared(tmp_path / "foreign", checksum="xyz", speech=counting)
    with pytest.raises(DataError, match="foreign: .*tiny@xyz.*tiny@abc"):
        run(TrainDraftConfig(**settings(foreign, target, tmp_path / "x")))
    with pytest.raises(ConfigError, match="bottom_layers.*top_layers"):
        run(
            TrainDraftConfig(
                **settings(data, target, tmp_path / "x", bottom_layers=3, top_layers=2)
            )
        )
    with pytest.raises(ConfigError, match="bottom_layers"):
        TrainDraftConfig(bottom_layers=-1)


# --- drafts of pretrained language models ---------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """A small random Qwen2 of four layers whose text is phonemes, with heads, on disk."""
    path = tmp_path_factory.mktemp("lm") / "qwen"
    tiny_backbone(
        3,
        architecture=architecture(vocab_size=80, num_hidden_layers=4),
        phonemes=PHONEME_VERSION,
        tokenizer="tiny@abc",
    ).save_pretrained(path)
    return path


@pytest.mark.parametrize(("kind", "inherited"), [("car", (0, 6, 7)), ("language model", (0, 2, 3))])
def test_middle_layers_are_left_out(kind, inherited, language_model):
    target = tiny_decoder(num_layers=8) if kind == "car" else load_decoder(language_model)
    draft = build_draft(target, 1, 2).eval()
    assert draft.config.inherited_layers == inherited and draft.config.bottom_layers == 1
    assert (
        draft.config.num_layers == len(draft.layers) == 3 and draft.config.num_prediction_heads == 1
    )
    assert draft.config.output_size == target.config.output_size
    for own, index in enumerate(inherited):
        for name, value in draft.layers[own].state_dict().items():
            assert torch.equal(value, target.layers[index].state_dict()[name])
    if kind == "language model":
        trained = {n for n, p in draft.named_parameters() if p.requires_grad and p.numel()}
        assert isinstance(draft, BackboneDraft)
        assert {n.rpartition(".layers.0.")[0] or n for n in trained} == {
            "backbone",
            "heads.base.weight",
        }
        with pytest.raises(ConfigError, match="adapters"):
            build_draft(add_lora(load_decoder(language_model), LoraSettings(r=2)))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_draft_of_all_layers_is_accepted_token_by_token(kind):
    """Its cache stays in step with the target's, whatever was refused before: the tokens are
    those of car-1."""
    target = tiny_backbone(4, kind=kind)
    draft = build_draft(target, 1, 1).eval()
    prompts = tiny_prompts()
    sampling = SamplingConfig(min_tokens=12, max_tokens=30, max_tokens_per_text_unit=8)
    plain = decode(target, prompts, FixedChunk(1), sampling)
    drafted = decode(target, prompts, SpeculativeDecoding(drafter=ModelDrafter(draft, 3)), sampling)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(
        r.accepted == r.proposed != [] and r.passes < p.passes
        for r, p in zip(drafted, plain, strict=True)
    )
    with torch.no_grad():
        draft.heads.base.weight += (
            0.5 * draft.heads.base.weight.std() * torch.randn_like(draft.heads.base.weight)
        )
    imperfect = SpeculativeDecoding(drafter=ModelDrafter(draft, 3))
    greedy = SamplingConfig(temperature=0, min_tokens=12, max_tokens=30, max_tokens_per_text_unit=8)
    expected = decode(target, prompts, FixedChunk(1), greedy)
    found = decode(target, prompts, imperfect, greedy)
    assert [r.tokens for r in found] == [r.tokens for r in expected]
    assert 0 < sum(sum(r.accepted) for r in found) < sum(sum(r.proposed) for r in found)


def test_training_a_draft_of_a_language_model(data, language_model, tmp_path):
    """Two sessions equal one; the draft brings the text tokenizer of its target along and loads
    as a decoder."""
    (language_model / "text_tokenizer").mkdir(exist_ok=True)
    (language_model / "text_tokenizer" / "tokenizer.json").write_text("{}")
    main(["train-draft", *arguments(settings(data, language_model, tmp_path / "draft"))])
    draft, target = load_decoder(tmp_path / "draft"), load_decoder(language_model)
    check_draft(draft, target)
    start = build_draft(target)
    trained = {name for name, p in start.named_parameters() if p.requires_grad and p.numel()}
    after = draft.state_dict()
    moved = {
        name for name, value in start.state_dict().items() if not torch.equal(after[name], value)
    }
    assert moved == trained
    assert "Draft model" in (tmp_path / "draft" / "README.md").read_text()
    assert (tmp_path / "draft" / "text_tokenizer" / "tokenizer.json").is_file()
    check_resumption(
        run,
        lambda out, **changes: TrainDraftConfig(**settings(data, language_model, out, **changes)),
        tmp_path,
    )
