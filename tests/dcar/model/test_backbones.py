"""Decoders on language models of transformers: ragged decoding, training, CosyVoice 2, LLaSA,
what is refused."""

import copy
import itertools

import numpy as np
import pytest
import torch
from tiny_backbones import (
    CODES,
    SIZES,
    batch,
    plain_hidden,
    rewritten,
    tiny_backbone,
    tiny_prompts,
    write_cosyvoice2,
    write_llasa,
)
from tiny_data import write_prepared
from tiny_decoders import tiny_decoder

from dcar.decoding import FixedChunk, Prompt, RandomChunk, decode
from dcar.errors import AssetError, CheckpointError, ConfigError, DataError, TextError
from dcar.model.backbones.convert import ConvertConfig, convert
from dcar.model.backbones.decoder import BackboneConfig, BackboneDecoder
from dcar.model.batch import speech_batch
from dcar.model.companions import text_units
from dcar.model.load import load_decoder
from dcar.prepare.columns import Split
from dcar.prepare.prepared import load_prepared, prepared_info
from dcar.prepare.retokenize import RetokenizeConfig, retokenize
from dcar.prompts.items import make_prompts
from dcar.sampling import SamplingConfig

SAMPLING = SamplingConfig(max_tokens=25, min_tokens=3)


# --- ragged decoding ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "bos"),
    [
        ("cosyvoice", False),
        *itertools.product(("qwen2", "llama", "mistral", "qwen3"), (True, False)),
    ],
)
def test_recorded_states_are_those_of_the_plain_model(kind, bos, cosyvoice):
    """Every row of a ragged batch, rows leaving on the way, against the model's own forward pass
    of that row."""
    decoder = cosyvoice if kind == "cosyvoice" else tiny_backbone(kind=kind, bos=bos)
    prompts = tiny_prompts(bos)
    results = decode(decoder, prompts, RandomChunk([1, 2, 3]), SAMPLING, seed=3, record_hidden=True)
    assert len({len(r.tokens) for r in results}) > 2  # rows end at different times
    for prompt, result in zip(prompts, results, strict=True):
        speech = [*prompt.prompt_ids, *([decoder.config.start] if bos else []), *result.tokens][
            : len(result.hidden)
        ]
        expected = plain_hidden(decoder, list(prompt.text_ids), speech)
        assert torch.allclose(result.hidden, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 8}, "'mistral' .*sliding_window"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic'",
        ),
        ("gpt_neox", {}, "'gpt_neox' .*llama, qwen2, qwen3, mistral or cosyvoice-lm"),
        ("no-such-model", {}, "'no-such-model'"),
    ],
)
def test_architectures_that_cannot_be_used_are_refused(kind, changes, message):
    shape = {**SIZES, "model_type": kind, "vocab_size": 20, **changes}
    with pytest.raises(CheckpointError, match=message):
        BackboneDecoder(BackboneConfig(architecture=shape, speech_vocab_size=CODES))


# --- training -------------------------------------------------------------------------------------


def test_a_padded_batch_has_the_states_of_plain_sequences():
    decoder = tiny_backbone()
    hidden = decoder.speech_hidden(batch())
    for row, (text, speech) in enumerate(
        (([1, 2, 3], [1, 2, 13, 5, 6, 7]), ([4, 5, 6, 7, 8], [3, 13, 9, 10]))
    ):
        expected = plain_hidden(decoder, text, speech)
        assert torch.allclose(
            hidden[row, : len(speech)], expected, atol=1e-4 * float(expected.abs().max())
        )


@pytest.mark.parametrize("kind", ["car", "qwen2", "cosyvoice"])
def test_gradient_checkpointing_changes_memory_not_gradients(kind, cosyvoice):
    made = {
        "car": tiny_decoder,
        "qwen2": tiny_backbone,
        "cosyvoice": lambda: copy.deepcopy(cosyvoice),
    }[kind]
    plain, saving = made().train(), made().train()
    saving.gradient_checkpointing_enable()
    calls = []
    for part in saving.layers[0].children():
        part.register_forward_pre_hook(lambda module, _: calls.append(module))
    for model in (plain, saving):
        torch.manual_seed(1)  # dropout
        model(batch()).loss.backward()
    # forward, and again in the backward pass
    assert calls and all(calls.count(part) == 2 for part in calls)
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert a.grad is not None and torch.isfinite(a.grad).all(), name
        assert torch.allclose(a.grad, b.grad, atol=1e-4 if kind == "cosyvoice" else 1e-5), name
    moved = {
        name.partition(".layers")[0]
        for name, p in plain.named_parameters()
        if float(p.grad.abs().max()) > 0
    }
    if kind == "cosyvoice":
        assert {
            "backbone.embed_tokens",
            "backbone.embed_tokens.output.weight",
            "backbone",
            "heads.base.bias",
        } <= moved


# --- CosyVoice 2 ----------------------------------------------------------------------------------


def test_cosyvoice2_speaks_with_the_distribution_of_its_own_inference(tmp_path):
    """Against the computation of Qwen2LM.inference, written out: sos, text, task id, speech ->
    llm_decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = write_cosyvoice2(tmp_path)
    decoder = convert(
        ConvertConfig("cosyvoice2", str(tmp_path), str(tmp_path / "out"), heads=3, head_blocks=1)
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(str(tmp_path / "CosyVoice-BlankEN"))
    ).eval()
    model.load_state_dict(
        {k.removeprefix("llm.model."): v for k, v in tensors.items() if k.startswith("llm.model.")}
    )
    text, speech = [7, 20, 33, 5], [3, 11, 0, 4, 4]
    sos, task = tensors["llm_embedding.weight"][:, None]
    x = torch.cat(
        (
            sos,
            model.model.embed_tokens(torch.tensor(text)),
            task,
            tensors["speech_embedding.weight"][torch.tensor(speech)],
        )
    )[None]
    with torch.no_grad():
        hidden = model(inputs_embeds=x, output_hidden_states=True).hidden_states[-1][
            0, -len(speech) :
        ]
    logits = hidden @ tensors["llm_decoder.weight"].T + tensors["llm_decoder.bias"]
    ours = decoder.speech_hidden(speech_batch([text], [speech], [1]))
    assert torch.allclose(decoder.heads.logits(ours, 1)[0, :, 0], logits[:, : CODES + 1], atol=1e-4)
    # new heads start as shifted copies of it
    assert torch.equal(decoder.heads.projection[1], tensors["llm_decoder.weight"][: CODES + 1])
    shared = convert(
        ConvertConfig(
            "cosyvoice2",
            str(tmp_path / "llm.pt"),
            str(tmp_path / "shared"),
            heads=16,
            head_blocks=2,
            head_kind="shared",
        )
    )
    assert torch.equal(shared.heads.logits(ours, 1), decoder.heads.logits(ours, 1))
    assert (
        torch.equal(shared.heads.out.weight, shared.heads.base.weight) and len(shared.heads.up) == 2
    )
    assert load_decoder(tmp_path / "shared").checksum() == shared.checksum()
    loaded = load_decoder(tmp_path / "out")
    assert (
        loaded.config.sequence_start
        and not loaded.config.bos
        and loaded.config.speech_vocab_size == CODES
    )
    assert "cosyvoice2, qwen2" in (tmp_path / "out" / "README.md").read_text()
    encode = text_units(tmp_path / "out")
    assert encode.name == loaded.config.phonemes
    prompt = Prompt("u", tuple(encode("a red house")), (1, 2))
    assert decode(loaded, [prompt], FixedChunk(3), SamplingConfig(max_tokens=9))[0].tokens


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t, f: rewritten(
                f, {"text_encoder.embed.0": torch.zeros(2), "llm.encoders.0.w": torch.zeros(2)}
            ),
            "CosyVoice 1 .*kind=cosyvoice",
        ),
        (lambda t, f: rewritten(f, t, **{"llm_embedding.weight": None}), "CosyVoice 3"),
        (lambda t, f: rewritten(f, t, **{"llm_decoder.bias": None}), r"\['llm_decoder.bias'\]"),
        (
            lambda t, f: rewritten(f, t, **{"llm_decoder.weight": torch.zeros(4, 32)}),
            r"llm_decoder.weight \(4, 32\)",
        ),
        (
            lambda t, f: rewritten(f, t, **{"llm.model.model.layers.2.x": torch.zeros(3)}),
            "unexpected",
        ),
        (lambda t, f: rewritten(f, t, extra=torch.nn.Linear(1, 1)), "llm.pt: .*CosyVoice2-0.5B"),
        (lambda t, f: (f / "llm.pt").write_bytes(b"not a checkpoint"), "llm.pt: .*CosyVoice2-0.5B"),
        (
            lambda t, f: (f / "llm.pt").unlink(),
            "llm.pt: [^:;]*; download FunAudioLLM/CosyVoice2-0.5B",
        ),
        (lambda t, f: torch.save([1, 2], f / "llm.pt"), "llm.pt: .* list, "),
        (
            lambda t, f: (f / "CosyVoice-BlankEN" / "config.json").write_text(
                '{"model_type": "llama"}'
            ),
            "config.json: .*model_type",
        ),
        (
            lambda t, f: (f / "CosyVoice-BlankEN" / "config.json").write_text(
                '{"model_type": "qwen2"}'
            ),
            "hidden_size None",
        ),
        (lambda t, f: None, "6561 .*12"),
    ],
)
def test_other_checkpoints_are_refused_by_name(tmp_path, damage, message):
    damage(write_cosyvoice2(tmp_path), tmp_path)
    codes = 6561 if "6561" in message else 0
    with pytest.raises(AssetError if "[^:;]" in message else CheckpointError, match=message):
        convert(
            ConvertConfig(
                "cosyvoice2", str(tmp_path), str(tmp_path / "out"), speech_vocab_size=codes
            )
        )
    assert not (tmp_path / "out").exists()


# --- LLaSA and other causal models ----------------------------------------------------------------


def test_llasa_speaks_with_the_distribution_of_its_own_prompt(tmp_path):
    """Against transformers' own model on the chat that LLaSA's documentation builds."""
    model, tokenizer = write_llasa(tmp_path / "llasa")
    decoder = convert(
        ConvertConfig("llasa", str(tmp_path / "llasa"), str(tmp_path / "out"), heads=2)
    )
    text = "a green hill"
    chat = [
        {
            "role": "user",
            "content": f"Convert the text to speech:<|TEXT_UNDERSTANDING_START|>{text}"
            "<|TEXT_UNDERSTANDING_END|>",
        },
        {"role": "assistant", "content": "<|SPEECH_GENERATION_START|>"},
    ]
    ids = tokenizer.apply_chat_template(
        chat, tokenize=True, continue_final_message=True, return_dict=False
    )
    speech = [4, 0, 11, 5]
    first = tokenizer.convert_tokens_to_ids("<|s_0|>")
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *[first + s for s in speech]]])).logits[
            0, -len(speech) :
        ]
    wanted = [
        *range(first, first + CODES),
        tokenizer.convert_tokens_to_ids("<|SPEECH_GENERATION_END|>"),
    ]
    encode = text_units(tmp_path / "out")
    hidden = decoder.speech_hidden(speech_batch([encode(text)], [speech], [1]))
    assert torch.allclose(decoder.heads.logits(hidden, 1)[0, :, 0], logits[:, wanted], atol=1e-4)
    # the speech rows moved, they are not there twice
    assert decoder.config.text_vocab_size == first


def test_speech_ids_by_hand_and_a_model_without_speech(tmp_path):
    model, tokenizer = write_llasa(tmp_path / "lm")
    first = tokenizer.convert_tokens_to_ids("<|s_0|>")
    source, out = str(tmp_path / "lm"), str(tmp_path / "out")
    decoder = convert(
        ConvertConfig(
            "causal-lm",
            source,
            out,
            first_speech_id=first,
            speech_vocab_size=CODES - 2,
            start_id=5,
            eos_id=6,
        )
    )
    assert torch.equal(decoder.speech_embedding.weight[0], model.model.embed_tokens.weight[first])
    assert torch.equal(decoder.heads.base.weight[CODES - 2], model.lm_head.weight[6])
    assert torch.equal(
        decoder.speech_embedding.weight[decoder.config.start], model.model.embed_tokens.weight[5]
    )
    assert decoder.config.text_vocab_size == len(tokenizer)  # the codes are not all that follows
    new = convert(
        ConvertConfig("causal-lm", source, out, speech_vocab_size=30, phonemes=True, bos=True)
    )
    assert (
        new.config.source == "text-lm"
        and new.config.phonemes == ""
        and new.config.output_size == 31
    )
    by_hand = dict(first_speech_id=first, speech_vocab_size=99, start_id=5, eos_id=6)
    for error, message, kind, folder, settings in (
        (CheckpointError, "99 .*12", "llasa", source, dict(speech_vocab_size=99)),
        (CheckpointError, "vocabulary of 320", "causal-lm", source, by_hand),
        (
            ConfigError,
            "start_id",
            "causal-lm",
            source,
            dict(first_speech_id=first, speech_vocab_size=9),
        ),
        (ConfigError, "speech_vocab_size", "causal-lm", source, {}),
        (AssetError, "/nothing: ", "causal-lm", str(tmp_path / "nothing"), {}),
    ):
        with pytest.raises(error, match=message):
            convert(ConvertConfig(kind, folder, out, **settings))
    write_cosyvoice2(tmp_path)  # whose tokenizer knows no speech
    with pytest.raises(CheckpointError, match="SPEECH_GENERATION_START"):
        convert(ConvertConfig("llasa", str(tmp_path / "CosyVoice-BlankEN"), out))


# --- text -----------------------------------------------------------------------------------------


def test_a_corpus_with_the_models_own_text(tmp_path, monkeypatch):
    """Written whole, with all columns, or not at all."""
    data = write_prepared(tmp_path / "data", train=4, dev=2)
    write_cosyvoice2(tmp_path)
    convert(ConvertConfig("cosyvoice2", str(tmp_path), str(tmp_path / "out")))
    monkeypatch.setattr(
        "dcar.prepare.retokenize.load_prepared",
        lambda folder, split: load_prepared(folder, split).add_column(
            "spoken_by", ["car-5"] * (4 if split == "train" else 2)
        ),
    )
    config = RetokenizeConfig(str(data), str(tmp_path / "out"), str(tmp_path / "own"))
    with monkeypatch.context() as patch:
        patch.setattr("dcar.prepare.prepared.put_in_place", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            retokenize(config)
    assert not (tmp_path / "own").exists()
    retokenize(config)
    rows, encode = load_prepared(tmp_path / "own", "train"), text_units(tmp_path / "out")
    assert rows[0]["text_ids"] == encode("a red house") and rows["spoken_by"][:] == ["car-5"] * 4
    assert rows[0]["speech"] == load_prepared(data, "train")[0]["speech"]
    assert prepared_info(tmp_path / "own").phonemes == encode.name
    items = make_prompts(Split.of(rows), 5, seed=0, bos=False)
    # the prompt's text stands before the target's
    assert items[0].text_ids == tuple(2 * encode("a red house"))
    with pytest.raises(DataError, match=f"{data}: .* out"):
        retokenize(RetokenizeConfig(str(data), str(tmp_path / "out"), str(data)))
    with pytest.raises(TextError):
        encode("")
    _, other = write_llasa(tmp_path / "llasa")
    other.save_pretrained(str(tmp_path / "out" / "text_tokenizer"))
    with pytest.raises(CheckpointError, match=f"text_tokenizer: .*{encode.name}"):
        text_units(tmp_path / "out")


def test_named_prompts_bring_their_own_text_ids(tmp_path):
    """A retokenized corpus with prompts: the continuation layout reads the ids of the text
    tokenizer, not phonemes."""
    data = write_prepared(tmp_path / "data", train=2, dev=1)
    rows = load_prepared(data, "train").map(
        lambda r: {"prompt_text": "a hill", "prompt_speech": [1, 2, 3], "prompt_voice": [0.0]}
    )
    rows = rows.add_column("prompt_text_ids", [[101, 102]] * 2)
    item = make_prompts(Split.of(rows), 5, seed=0, bos=False)[0]
    assert item.text_ids[:2] == (101, 102) and item.prompt_ids == (1, 2, 3)
    assert np.array_equal(item.speaker_embedding, [0.0])
