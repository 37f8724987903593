"""`dtype` of commands that decode: what is rounded, checksums, provenance; every command in
bfloat16."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare_worker import SHORT, LevelJudge, scored_policy, tiny_config, tiny_items, tiny_tools
from fake_gpu import fake_gpu
from tiny_backbones import tiny_backbone
from tiny_data import counting, tiny_vocoder, write_prepared
from tiny_decoders import policy_of, tiny_decoder
from toy_training import Listener

from dcar.decoding import decode
from dcar.errors import CheckpointError
from dcar.methods import load_models, make_methods
from dcar.model.draft import build_draft
from dcar.model.load import load_decoder
from dcar.model.precision import (
    cast_decoder,
    chosen_dtype,
    matched_policy,
    precision_identity,
    precision_of,
)
from dcar.sampling import warp
from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from dcar.train.chunk_scorer import TrainChunkScorerConfig
from dcar.train.chunk_scorer import run as train_chunk_scorer
from eval.analysis import fit_verifiers
from eval.compare.run import run
from heads.checkpoint import Checkpoint
from heads.policy import ChunkPolicy
from rl import train as dcpo

HALF = torch.bfloat16
METHODS = """
    far car-1 car-4 random-2-3 end-on-confident-2-4 dcar@hidden dcar-sampled@hidden dcar-shuffled@hidden dcar@drawn dcar@drawn@n3@d0.2 best-of-3-2 entropy-0.8 entropy@2 mtp-viterbi-3-4 sd sd@draft ssd-0.4 pcg-0.42 pcg-0.42@draft vadusa-2 typical topk-verify-5
""".split()


def weights_of(model: torch.nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters()}


def rounded(values: torch.Tensor) -> bool:
    """Whether all values are numbers of bfloat16."""
    return torch.equal(values, values.to(HALF).to(values.dtype))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Models that belong together and a prepared corpus, on disk."""
    path = tmp_path_factory.mktemp("precision")
    write_prepared(path / "data", train=6, dev=5, speech=counting)
    decoder = tiny_decoder(
        text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="tiny@abc", phonemes=PHONEME_VERSION
    )
    made: dict[str, Checkpoint] = {
        "decoder": decoder,
        "draft": build_draft(decoder),
        "hidden": policy_of(base=decoder.checksum()),
        "far": tiny_decoder(
            heads=1,
            seed=5,
            text_vocab_size=TEXT_VOCAB_SIZE,
            tokenizer="tiny@abc",
            phonemes=PHONEME_VERSION,
        ),
        "drawn": scored_policy(decoder),
        "vocoder": tiny_vocoder(),
    }
    for name, model in made.items():
        model.save_pretrained(path / name)
    fit_verifiers.main(
        [
            f"decoder={path / 'decoder'}",
            f"data={path / 'data'}",
            f"out={path / 'stats'}",
            "prompt_tokens=5",
            "thresholds=6",
            "ranks=4",
            "max_tokens=40",
            "min_tokens=20",
            "dtype=bfloat16",
        ]
    )
    return path


def models_of(files: Path, dtype: str | None):
    return load_models(
        str(files / "decoder"),
        str(files / "far"),
        [f"{n}={files / n}" for n in ("hidden", "drawn")],
        draft=str(files / "draft"),
        statistics=str(files / "stats"),
        dtype=dtype,
    )


# --- the setting ----------------------------------------------------------------------------------


def test_auto_is_bfloat16_on_a_gpu_where_float32_products_run_in_tf32():
    before = torch.get_float32_matmul_precision()
    try:
        assert (chosen_dtype("auto", "cpu"), chosen_dtype("bfloat16", "cpu")) == (
            torch.float32,
            HALF,
        )
        assert torch.get_float32_matmul_precision() == before
        assert (chosen_dtype("auto", "cuda:1"), chosen_dtype("float32", "cuda")) == (
            HALF,
            torch.float32,
        )
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


# --- what is rounded ------------------------------------------------------------------------------


def test_a_rounded_decoder_keeps_its_name_and_its_policies(tmp_path):
    exact = tiny_decoder()
    exact.save_pretrained(tmp_path)
    half = load_decoder(tmp_path, dtype="bfloat16")
    assert weights_of(half) == {HALF} and half.checksum() == exact.checksum() and not half.training
    # rounding does change the weights
    assert tiny_decoder().to(HALF).checksum() != exact.checksum()
    own, other = policy_of(base=exact.checksum()), policy_of(base="0" * 64)
    spoken = matched_policy(own, half)
    assert weights_of(spoken) == {HALF} and weights_of(own) == {torch.float32}
    assert spoken.checksum() == own.checksum() and matched_policy(spoken, half) is spoken
    spoken.check_base(half.checksum())
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        other.check_base(half.checksum())
    assert matched_policy(own, exact) is own and weights_of(
        load_decoder(tmp_path, dtype="auto")
    ) == {torch.float32}
    drawn = scored_policy(exact)
    assert matched_policy(drawn, half) is drawn and weights_of(drawn) == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_language_model_keeps_float32_heads_and_states(kind, tmp_path, prompts):
    tiny_backbone(kind=kind).save_pretrained(tmp_path)
    half, exact = load_decoder(tmp_path, dtype="bfloat16"), load_decoder(tmp_path)
    assert weights_of(half.backbone) == {HALF} and weights_of(half.heads) == {torch.float32}
    assert half.checksum() == exact.checksum() and precision_of(half)["dtype"] == "bfloat16"
    policy = policy_of(base=exact.checksum())
    assert matched_policy(policy, half) is policy
    models = load_models(str(tmp_path), "", [], dtype="bfloat16")
    models.policies[""] = policy
    for entry in make_methods(["car-3", "dcar", "sd"], models):
        assert all(r.tokens for r in decode(entry.decoder, prompts, entry.method, SHORT))


def test_what_is_seen_and_drawn_of_a_rounded_decoder_is_float32():
    decoder = tiny_decoder()
    policy, draws = scored_policy(decoder), torch.randint(0, 12, (3, 2, 4))
    hidden, logits = torch.randn(3, 32, dtype=HALF), torch.randn(3, 4, 13, dtype=HALF)
    features = policy.candidate_features(hidden, logits, draws)
    assert features.dtype == torch.float32 and not rounded(features)
    assert torch.equal(features, policy.candidate_features(hidden.float(), logits.float(), draws))
    assert policy.log_probs(features).dtype == torch.float32
    before = matched_policy(policy_of(), decoder.to(HALF))
    said = before(torch.randn(1, 3, 32, dtype=HALF))
    assert said.dtype == torch.float32 and torch.allclose(
        said.exp().sum(-1), torch.ones(1, 3), atol=1e-6
    )
    assert warp(logits, SHORT).dtype == torch.float32


# --- who says it ----------------------------------------------------------------------------------


def test_on_a_gpu_float32_is_tf32_and_said_so(monkeypatch):
    before = torch.get_float32_matmul_precision()
    try:
        with fake_gpu(monkeypatch) as device:
            decoder = tiny_decoder().to(device)
            assert precision_identity(decoder) == {}
            chosen_dtype("float32", device)
            assert precision_of(decoder) == {"dtype": "float32", "float32_products": "tf32"}
            assert precision_identity(decoder) == {"precision": "tf32"}
            assert precision_identity(cast_decoder(decoder, HALF)) == {"precision": "bfloat16"}
    finally:
        torch.set_float32_matmul_precision(before)


# --- every command --------------------------------------------------------------------------------


def test_every_method_speaks_in_bfloat16(files):
    prompts = tiny_items(3)
    for entry in make_methods(METHODS, models_of(files, "bfloat16")):
        trees = entry.method.tree is not None  # hidden states are not recorded of these
        results = decode(entry.decoder, prompts, entry.method, SHORT, record_hidden=not trees)
        assert all(r.tokens for r in results), entry.name
        assert trees or {r.hidden.dtype for r in results} == {HALF}, entry.name


def test_a_comparison_in_bfloat16_says_so_and_speaks_anew(files, tmp_path):
    def compared(dtype: str | None) -> tuple[dict, int]:
        judge = LevelJudge()
        tools = replace(tiny_tools(judge), models=models_of(files, dtype))
        config = tiny_config(
            tmp_path,
            methods=["car-3", "dcar@hidden"],
            seeds=[0],
            references=False,
            report=False,
            audio_utterances=0,
            timing_utterances=1,
        )
        return run(config, tools), judge.calls

    result, calls = compared("float32")
    assert calls and result.provenance["precision"] == {
        "dtype": "float32",
        "float32_products": "ieee",
    }
    assert compared(None)[1] == 0  # the same records
    result, calls = compared("bfloat16")
    assert calls and result.provenance["precision"] == {
        "dtype": "bfloat16",
        "float32_products": "ieee",
    }
    assert {of["precision"] for of in result.methods.values()} == {"bfloat16"}


@pytest.mark.parametrize("reads", ["hidden", "candidates"])
def test_dcpo_trains_a_float32_policy_of_a_rounded_decoder(files, reads):
    out = files / f"dcpo-{reads}"
    dcpo.main(
        [
            f"decoder={files / 'decoder'}",
            f"data={files / 'data'}",
            f"vocoder={files / 'vocoder'}",
            f"out={out}",
            "use_cpu=true",
            "per_device_train_batch_size=8",
            "num_generations=4",
            "chunk_range=[2,3]",
            f"policy_reads={reads}",
            *(
                "policy_width=16 policy_heads=2 num_train_epochs=1 num_iterations=2 "
                "max_tokens=20 prompt_tokens=5 disable_tqdm=true dtype=bfloat16 "
                "max_reward_wer=9"
            ).split(),
        ],
        recognizer=Listener(),
    )
    policy = ChunkPolicy.from_pretrained(out / "policy")
    source = json.loads((out / "provenance.json").read_text())
    assert source["precision"] == {"dtype": "bfloat16", "float32_products": "ieee"}
    assert policy.config.base_checksum == load_decoder(files / "decoder").checksum()
    assert not all(rounded(p) for p in policy.parameters())  # it learned in float32
    models = load_models(str(files / "decoder"), "", [str(out / "policy")], dtype="bfloat16")
    (entry,) = make_methods(["dcar"], models)
    assert entry.identity["policy"] == policy.checksum()


def test_a_chunk_scorer_of_a_rounded_decoder(files):
    out = files / "scorer"
    made = train_chunk_scorer(
        TrainChunkScorerConfig(
            decoder=str(files / "decoder"),
            data=str(files / "data"),
            out=str(out),
            prompt_tokens=5,
            max_steps=2,
            width=8,
            dtype="bfloat16",
        )
    )
    assert weights_of(made) == {torch.float32}
    assert json.loads((out / "provenance.json").read_text())["precision"]["dtype"] == "bfloat16"
    made.check_base(load_decoder(files / "decoder", dtype="bfloat16").checksum())
