"""CosyVoice-300M: its llm.pt in small, against a slow reference written after its source; decoding,
refusals.

The reference follows cosyvoice/llm/llm.py and
cosyvoice/transformer/{encoder,attention,embedding,subsampling}.py in its order of operations: a
table of 2 L − 1 relative positions, its projection, and the shift that lines them up.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_backbones import (
    CODES,
    SPEECH,
    TEXT,
    YAML,
    rewritten,
    tiny_prompts,
    tiny_text_tokenizer,
    write_cosyvoice1,
)

from dcar.decoding import FixedChunk, Prompt, decode
from dcar.errors import CheckpointError
from dcar.model.backbones.convert import ConvertConfig, convert
from dcar.model.batch import speech_batch
from dcar.model.companions import text_units
from dcar.model.draft import build_draft
from dcar.model.load import load_decoder
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import ModelDrafter
from eval.verifiers.sd import SpeculativeDecoding


class Reference:
    """One sequence at a time, without a cache, as the source computes it."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.t = tensors

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], eps=1e-5
        )

    def attention(
        self, name: str, x: torch.Tensor, positions: torch.Tensor, heads: int
    ) -> torch.Tensor:
        length, size = x.shape
        q, k, v = (self.linear(f"{name}.linear_{w}", x).view(length, heads, -1) for w in "qkv")
        p = self.linear(f"{name}.linear_pos", positions).view(2 * length - 1, heads, -1)
        content = torch.einsum("ihd,jhd->hij", q + self.t[f"{name}.pos_bias_u"], k)
        place = torch.einsum("ihd,rhd->hir", q + self.t[f"{name}.pos_bias_v"], p)
        padded = torch.cat((torch.zeros(heads, length, 1), place), 2).view(
            heads, 2 * length, length
        )
        place = padded[:, 1:].reshape(heads, length, 2 * length - 1)[:, :, :length]  # the shift
        scores = (content + place) / math.sqrt(size // heads)
        scores = scores.masked_fill(
            ~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf
        )
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(length, size)
        return self.linear(f"{name}.linear_out", mixed)

    def encoder(self, name: str, x: torch.Tensor, shape: dict[str, int]) -> torch.Tensor:
        text = name == "text_encoder"
        x = self.norm(f"{name}.embed.out.1", self.linear(f"{name}.embed.out.0", x))
        x = (x if text else x.relu()) * math.sqrt(shape["size"])
        away = torch.arange(len(x) - 1, -len(x), -1.0)[:, None]  # L − 1 … −(L − 1)
        angle = away * torch.exp(
            torch.arange(0, shape["size"], 2) * -(math.log(10_000.0) / shape["size"])
        )
        positions = torch.zeros(len(away), shape["size"])
        positions[:, 0::2], positions[:, 1::2] = angle.sin(), angle.cos()
        first, second = ("norm_mha", "norm_ff") if text else ("norm1", "norm2")
        for i in range(shape["layers"]):
            at = f"{name}.encoders.{i}"
            x = x + self.attention(
                f"{at}.self_attn", self.norm(f"{at}.{first}", x), positions, shape["heads"]
            )
            y = self.linear(f"{at}.feed_forward.w_1", self.norm(f"{at}.{second}", x))
            x = x + self.linear(f"{at}.feed_forward.w_2", F.silu(y) if text else y.relu())
        return self.norm(f"{name}.after_norm", x)

    def logits(self, text: list[int], speech: list[int]) -> torch.Tensor:
        """Return llm_decoder's output after every speech token, [S, V + 1]: TransformerLM.inference without
        a speaker vector."""
        encoded = self.encoder(
            "text_encoder", self.t["text_embedding.weight"][torch.tensor(text)], TEXT
        )
        sos, task = self.t["llm_embedding.weight"][:, None]
        x = torch.cat(
            (
                sos,
                self.linear("text_encoder_affine_layer", encoded),
                task,
                self.t["speech_embedding.weight"][torch.tensor(speech)],
            )
        )
        return self.linear("llm_decoder", self.encoder("llm", x, SPEECH))[-len(speech) :]


def test_it_speaks_with_the_distribution_of_the_source(cosyvoice, published):
    """Teacher-forced in a padded batch, and step by step in the ragged cache."""
    reference = Reference(published[1])
    texts, speech = [[7, 20, 33, 5], [9, 1]], [[3, 11, 0, 4, 4, 7], [2, 2, 9]]
    hidden = cosyvoice.speech_hidden(speech_batch(texts, speech, [1, 1]))
    for row in range(2):
        expected = reference.logits(texts[row], speech[row])
        found = cosyvoice.heads.logits(hidden[row, : len(speech[row])], 1)[:, 0]
        assert float(expected.std()) > 0.5
        assert torch.allclose(found, expected, atol=2e-4 * float(expected.abs().max()))
    prompts = [
        Prompt(f"u{i}", tuple(t), tuple(s))
        for i, (t, s) in enumerate(zip(texts, speech, strict=True))
    ]
    greedy = SamplingConfig(temperature=0, min_tokens=8, max_tokens=12, max_tokens_per_text_unit=9)
    for prompt, result in zip(
        prompts, decode(cosyvoice, prompts, FixedChunk(1), greedy), strict=True
    ):
        spoken = list(prompt.prompt_ids)
        for step, token in enumerate(result.tokens):
            probs = reference.logits(list(prompt.text_ids), spoken)[-1]
            if step < 8:
                probs[CODES] = -torch.inf
            assert token == int(probs.argmax())
            spoken.append(token)


def test_both_orders_of_the_product_with_positions_agree(cosyvoice):
    """Decoding turns the queries, training projects the table; many queries and few give the
    same scores."""
    attention = cosyvoice.layers[0].self_attn
    table, q = torch.randn(50, 32), torch.randn(2, 4, 3, 8)
    few = attention._by_distance(q, table)
    calls = []
    hook = attention.linear_pos.register_forward_hook(lambda *_: calls.append(1))
    many = attention._by_distance(q.repeat(1, 1, 40, 1), table)[:, :, :3]
    hook.remove()
    assert calls == [1] and torch.allclose(few, many, atol=1e-4)


def test_its_own_layers_draft_for_it(cosyvoice):
    draft = build_draft(cosyvoice, 1, 2).eval()  # all three
    sampling = SamplingConfig(min_tokens=8, max_tokens=20, max_tokens_per_text_unit=8)
    prompts = tiny_prompts(False)
    plain = decode(cosyvoice, prompts, FixedChunk(1), sampling)
    drafted = decode(
        cosyvoice, prompts, SpeculativeDecoding(drafter=ModelDrafter(draft, 3)), sampling
    )
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert all(r.accepted == r.proposed for r in drafted)


def test_the_command(published, tmp_path):
    folder, tensors = published
    settings = dict(
        kind="cosyvoice", source=str(folder), out=str(tmp_path / "out"), heads=3, head_blocks=1
    )
    made = convert(ConvertConfig(**settings, text_tokenizer=str(folder / "whisper")))
    loaded = load_decoder(tmp_path / "out")
    assert loaded.checksum() == made.checksum() and loaded.config == made.config
    assert loaded.config.sequence_start and not loaded.config.bos
    assert torch.equal(loaded.heads.projection[1], tensors["llm_decoder.weight"])
    assert "cosyvoice, cosyvoice-lm" in (tmp_path / "out" / "README.md").read_text()
    encode = text_units(tmp_path / "out")
    prompt = Prompt("u", tuple(encode("a red house")), (1, 2))
    assert decode(loaded, [prompt], FixedChunk(3), SamplingConfig(max_tokens=9))[0].tokens


def yaml(folder: Path, old: str, new: str) -> None:
    (folder / "cosyvoice.yaml").write_text(YAML.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f, t: rewritten(f, {"llm.model.model.norm.weight": torch.ones(2)}),
            "CosyVoice 2 or 3 .*cosyvoice2",
        ),
        (
            lambda f, t: rewritten(f, t, **{"llm_decoder.bias": torch.zeros(3)}),
            r"llm_decoder.bias \(3,\)",
        ),
        (lambda f, t: rewritten(f, t, **{"llm.after_norm.bias": None}), r"\['norm.bias'\]"),
        (
            lambda f, t: yaml(f, "static_chunk_size: 1", "static_chunk_size: 0"),
            "static_chunk_size .*'0', '1'",
        ),
        (lambda f, t: yaml(f, "linear_legacy", "linear"), "input_layer"),
        (
            lambda f, t: yaml(
                f, "        use_cnn", "        activation_type: 'gelu'\n        use_cnn"
            ),
            "activation_type",
        ),
        (
            lambda f, t: tiny_text_tokenizer(["<|more|>"]).save_pretrained(str(f / "whisper")),
            "text_tokenizer=",
        ),
        (lambda f, t: (f / "llm.pt").write_bytes(b"broken"), "llm.pt: .*CosyVoice-300M"),
    ],
)
def test_other_checkpoints_are_refused(tmp_path, damage, message):
    damage(tmp_path, write_cosyvoice1(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        convert(
            ConvertConfig(
                "cosyvoice",
                str(tmp_path),
                str(tmp_path / "out"),
                heads=2,
                text_tokenizer=str(tmp_path / "whisper"),
            )
        )
    assert not (tmp_path / "out").exists()
