"""LoRA, frozen and joint training of a language model with CAR heads, and one run to its end."""

from pathlib import Path

import pytest
import torch
from compare_worker import LevelJudge, ToneVocoder
from safetensors.torch import load_file
from tiny_backbones import CODES, SIZES, architecture, batch, tiny_backbone, write_llasa
from tiny_training import log_of

from dcar.config import load_config
from dcar.decoding import FixedChunk, Prompt, decode
from dcar.decoding.readers import reader_of
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.backbones.convert import ConvertConfig, convert
from dcar.model.backbones.decoder import BackboneDecoder, cast_backbone
from dcar.model.backbones.lora import LoraSettings, add_lora, merge, save_adapter, set_trainable
from dcar.model.car import CARConfig
from dcar.model.load import load_decoder
from dcar.sampling import SamplingConfig
from dcar.train.car import run
from dcar.train.settings import BackboneTraining, TrainConfig

SMALL = LoraSettings(r=4, lora_alpha=8.0, target_modules=["q_proj", "v_proj", "down_proj"])


def trained_by_hand(
    decoder: BackboneDecoder, mode: str = "lora", steps: int = 5
) -> BackboneDecoder:
    set_trainable(decoder, mode)
    optimizer = torch.optim.AdamW([p for p in decoder.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        decoder(batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return decoder.eval()


def states(decoder) -> torch.Tensor:
    with torch.no_grad():
        return decoder.speech_hidden(batch())


def test_train_save_load_merge_all_compute_the_same(tmp_path):
    decoder = add_lora(tiny_backbone(), SMALL)
    before = states(decoder)
    # B = 0: nothing has changed yet
    assert torch.allclose(before, states(tiny_backbone()), atol=1e-6)
    trained_by_hand(decoder)
    expected, loss = states(decoder), decoder(batch()).loss
    assert float((expected - before).abs().max()) > 0.05
    decoder.save_pretrained(tmp_path / "whole")
    merged = merge(load_decoder(tmp_path / "whole"))
    merged.save_pretrained(tmp_path / "merged")
    for other in (load_decoder(tmp_path / "whole"), merged, load_decoder(tmp_path / "merged")):
        assert torch.allclose(states(other), expected, atol=2e-4 * float(expected.abs().max()))
        assert torch.allclose(other(batch()).loss, loss, rtol=1e-3)
    assert merged.config.lora is None and not any("lora" in k for k in merged.state_dict())
    assert load_decoder(tmp_path / "merged").checksum() == merged.checksum()
    prompts = [Prompt(f"u{i}", (1, 2, 3 + i), (4,)) for i in range(3)]
    spoken = [
        [r.tokens for r in decode(d, prompts, FixedChunk(2), SamplingConfig(max_tokens=20))]
        for d in (decoder, merged)
    ]
    assert spoken[0] == spoken[1]


def test_the_adapter_is_one_that_peft_reads(tmp_path):
    """PeftModel on the published causal model, with our adapter folder, has the hidden states of
    our decoder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write_llasa(tmp_path / "lm")
    decoder = convert(
        ConvertConfig("llasa", str(tmp_path / "lm"), str(tmp_path / "out"), heads=3, head_blocks=1)
    )
    torch.manual_seed(0)
    trained_by_hand(add_lora(decoder, SMALL))
    save_adapter(decoder, tmp_path / "adapter")
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(str(tmp_path / "lm")), str(tmp_path / "adapter")
    ).eval()
    ids = torch.tensor([[5, 9, 20, 31, 7]])
    with torch.no_grad():
        theirs = model(ids, output_hidden_states=True).hidden_states[-1]
        ours = decoder.backbone(
            inputs_embeds=decoder.backbone.embed_tokens(ids), use_cache=False
        ).last_hidden_state
    assert torch.allclose(theirs, ours, atol=1e-4)
    untouched = AutoModelForCausalLM.from_pretrained(str(tmp_path / "lm"))(
        ids, output_hidden_states=True
    )
    assert not torch.allclose(untouched.hidden_states[-1], ours, atol=1e-2)


def changed(before: dict, after: dict) -> set[str]:
    return {k for k in before if not torch.equal(before[k], after[k])}


@pytest.mark.parametrize("mode", ["lora", "joint"])
def test_each_mode_trains_its_share_and_nothing_else(mode):
    decoder = add_lora(tiny_backbone(), SMALL) if mode == "lora" else tiny_backbone()
    before = {k: v.clone() for k, v in decoder.state_dict().items()}
    trained_by_hand(decoder, mode)
    moved = changed(before, decoder.state_dict())
    own = {k for k in before if k.startswith("heads.") and not k.startswith("heads.base.")}
    assert own <= moved
    if mode == "lora":
        assert moved == own | {"heads.base.weight"} | {k for k in before if "lora_" in k}
    else:
        assert moved >= {k for k in before if k.startswith("backbone.layers.")} | {
            "speech_embedding.weight"
        }


def test_new_speech_is_trained_with_adapters_and_not_frozen():
    decoder = add_lora(tiny_backbone(source="text-lm"), SMALL)
    set_trainable(decoder, "lora")
    assert decoder.speech_embedding.weight.requires_grad
    with pytest.raises(ConfigError, match="backbone.train=heads"):
        set_trainable(tiny_backbone(source="text-lm"), "heads")


def test_a_frozen_model_in_bfloat16_trains_float32_adapters():
    decoder = cast_backbone(add_lora(tiny_backbone(), SMALL), torch.bfloat16)
    kinds = {("lora_" in k, p.dtype) for k, p in decoder.backbone.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    first = float(decoder(batch()).loss.detach())
    assert float(trained_by_hand(decoder, steps=20)(batch()).loss.detach()) < 0.8 * first
    cache, hidden = reader_of(decoder).prefill(
        *[batch()[k] for k in ("text_ids", "text_lengths", "speech_ids", "speech_lengths")]
    )
    assert cache.kv[0].dtype == torch.bfloat16 and hidden.dtype == torch.float32


def test_what_does_not_fit_is_refused():
    for message, ask in (
        (
            r"\['query'\] .*'q_proj'",
            lambda: add_lora(tiny_backbone(), LoraSettings(target_modules=["query"])),
        ),
        ("adapters", lambda: add_lora(add_lora(tiny_backbone(), SMALL), SMALL)),
        ("target_modules ", lambda: LoraSettings(target_modules=[])),
        ("backbone.train=lora", lambda: set_trainable(tiny_backbone(), "lora")),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()


# --- stage one by its command, and all that follows -----------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A small random Qwen2 on disk, converted: it knows no speech and reads phonemes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", vocab_size=80, tie_word_embeddings=True, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(str(folder / "published"))
    convert(
        ConvertConfig(
            "causal-lm",
            str(folder / "published"),
            str(folder / "converted"),
            heads=3,
            head_blocks=1,
            bos=True,
            phonemes=True,
            speech_vocab_size=CODES,
        )
    )
    return folder / "converted"


def settings(qwen: Path, data: Path, out: Path, mode: str = "lora", **changes) -> TrainConfig:
    values = dict(
        prompt_tokens=5,
        per_device_train_batch_size=6,
        max_steps=30,
        warmup_steps=2,
        learning_rate=2e-2,
        logging_steps=10,
        eval_steps=30,
        save_steps=15,
        gradient_checkpointing=True,
    )
    return TrainConfig(
        data=str(data),
        out=str(out),
        backbone=BackboneTraining(str(qwen), mode, SMALL),
        **{**values, **changes},
    )


def test_one_lora_run_to_the_end(qwen, data, tmp_path):
    """Stage one with adapters -> DCPO -> export -> compare, on a small random Qwen2."""
    from dcar.methods import load_models
    from dcar.prompts.load import load_prompts
    from eval.compare.config import CompareConfig
    from eval.compare.run import run as compare
    from eval.compare.tools import Tools
    from rl.config import DCPOConfig
    from rl.export import ExportConfig, export
    from rl.train import run as train_policy

    config = settings(qwen, data, tmp_path / "car")
    decoder = run(config)
    learned = log_of(tmp_path / "car", "eval_head3_loss")[-1]["eval_head3_loss"]
    # it has learned to count ahead
    assert learned < 0.75 * torch.log(torch.tensor(CODES + 1.0)).item()
    assert decoder.config.lora is None and decoder.config.tokenizer == "tiny@abc"
    assert load_decoder(tmp_path / "car" / "checkpoint-30").config.lora["r"] == 4
    card = (tmp_path / "car" / "README.md").read_text()
    assert decoder.checksum() in card and "eval_head3_accuracy" in card and "text-lm, qwen2" in card
    # beside the merged decoder lie its adapters, and its heads as they are
    own = load_file(tmp_path / "car" / "adapter" / "heads.safetensors")
    assert own and all(torch.equal(v, decoder.state_dict()[k]) for k, v in own.items())
    assert (tmp_path / "car" / "adapter" / "adapter_model.safetensors").is_file()
    # a finished run is not trained further; its resolved settings describe it
    assert (
        run(
            load_config(TrainConfig, ["--config", str(tmp_path / "car" / "config.yaml")])
        ).checksum()
        == decoder.checksum()
    )

    vocoder, judge = ToneVocoder(), LevelJudge()
    items = load_prompts(str(data), "train", decoder, 5, 0)
    policy = train_policy(
        DCPOConfig(
            output_dir=str(tmp_path / "dcpo"),
            max_reward_wer=10.0,
            use_cpu=True,
            disable_tqdm=True,
            num_generations=4,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            chunk_range=[2, 3],
            policy_width=16,
            policy_heads=2,
            max_completion_length=40,
            decoder=str(tmp_path / "car"),
            data=str(data),
        ),
        vocoder=vocoder,
        recognizer=judge,
        train_dataset=items[:8],
        eval_dataset=items[:2],
    )
    out = export(
        ExportConfig(str(tmp_path / "dcpo"), str(tmp_path / "policy"), str(tmp_path / "car"))
    )
    assert (out / "serving.pt2").is_file() and (out / "README.md").is_file() and policy.is_dir()

    tools = Tools(
        {"split": {0: items[:4]}},
        load_models(str(tmp_path / "car"), "", [str(out)]),
        vocoder,
        judge,
        recording=None,
        identity={"v": "tone"},
    )
    result = compare(
        CompareConfig(
            methods=["car-1", "car-3", "random-2-3", "dcar"],
            seeds=[0],
            batch_size=2,
            resamples=100,
            timing_utterances=1,
            sampling=SamplingConfig(max_tokens=40),
            audio_utterances=0,
            references=False,
            report=False,
            device="cpu",
            out=str(tmp_path / "compare"),
        ),
        tools,
    )
    rows = {row.method: row for row in result.first.rows}
    assert rows["car-1"].tokens_per_pass <= 1 < rows["car-3"].tokens_per_pass
    assert result.methods["dcar"]["decoder"] == decoder.checksum() and rows["dcar"].n == 4


@pytest.mark.parametrize("kind", ["independent", "shared"])
def test_heads_alone_leave_the_model_as_it_was(kind, data, tmp_path):
    decoder = tiny_backbone(
        head_kind=kind, text_prefix=(), text_suffix=(), architecture=architecture(vocab_size=80)
    )
    decoder.save_pretrained(tmp_path / "base")
    tuned = run(settings(tmp_path / "base", data, tmp_path / "out", "heads", max_steps=3))
    own = {
        n
        for n in decoder.state_dict()
        if n.startswith("heads.") and not n.startswith("heads.base.")
    }
    assert changed(decoder.state_dict(), tuned.state_dict()) == own
    assert not (tmp_path / "out" / "adapter").exists()


def test_settings_that_contradict_each_other_are_refused(qwen, data, tmp_path):
    decoder = load_decoder(qwen)
    for name, phonemes, tokenizer in (("bpe", "text-tokenizer:abc", ""), ("s3", "", "s3@1")):
        decoder.config.phonemes, decoder.config.tokenizer = phonemes, tokenizer
        decoder.save_pretrained(tmp_path / name)
    run(settings(qwen, data, tmp_path / "run", max_steps=1))
    for error, message, ask in (
        (
            ConfigError,
            "`model` .*backbone.path",
            lambda: run(settings(qwen, data, tmp_path, model=CARConfig(num_layers=2))),
        ),
        (
            ConfigError,
            "init_from .*backbone.path",
            lambda: run(settings(qwen, data, tmp_path, init_from="runs/car")),
        ),
        (ConfigError, "backbone.dtype", lambda: BackboneTraining(train="joint", dtype="bfloat16")),
        (ConfigError, "joint, lora, heads", lambda: BackboneTraining(train="full")),
        (
            DataError,
            "dcar prepare mode=retokenize",
            lambda: run(settings(tmp_path / "bpe", data, tmp_path / "x")),
        ),
        (
            DataError,
            "tiny@abc, .* s3@1",
            lambda: run(settings(tmp_path / "s3", data, tmp_path / "x")),
        ),
        (
            CheckpointError,
            "lora .*resume_from_checkpoint=never",
            lambda: run(settings(qwen, data, tmp_path / "run", "joint", max_steps=2)),
        ),
    ):
        with pytest.raises(error, match=message):
            ask()
