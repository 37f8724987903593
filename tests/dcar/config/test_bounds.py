"""What settings may be: every impossible value is a ConfigError that says what would do, and
where it stands."""

from pkgutil import resolve_name as schema

import pytest

from dcar.config import load_config
from dcar.errors import ConfigError
from dcar.sampling import SamplingConfig

TRAIN, DRAFT = "dcar.train.car:TrainConfig", "dcar.train.draft:TrainDraftConfig"
COMPARE = "eval.compare.config:CompareConfig"
PROFILE = "eval.compare.profile:ProfileConfig"
DCPO = "rl.config:DCPOConfig"
VOCODER = "dcar.vocoder.training.train:TrainVocoderConfig"
RECOGNIZER = "dcar.train.token_recognizer:TrainTokenRecognizerConfig"
SPEAK, TOKENIZER = "dcar.speak.speak:SpeakConfig", "dcar.tokens.fit:FitTokenizerConfig"
CONVERT = "dcar.model.backbones.convert:ConvertConfig"
PREPARE = "dcar.prepare.settings:PrepareConfig"

NEEDED = {
    SPEAK: ["text=a"],
    TOKENIZER: ["out=x"],
    PREPARE: ["out=x"],
    CONVERT: ["kind=llasa", "source=a", "out=b"],
    DCPO: ["use_cpu=true"],
    PROFILE: ["decoder=d", "data=d"],
}

IMPOSSIBLE = {
    TRAIN: """
        max_steps=0 max_steps=-1 max_steps=2.5 max_steps=many max_steps=null max_steps=[1,2]
        model.num_layers=0 model.hidden_size=0 model.hidden_size=-4 model.hidden_size=33
        model.num_attention_heads=5 model.num_attention_heads=0 model.ffn_size=0
        model.dropout=5 model.dropout=-0.1 model.dropout=1 model.speech_position_scale=nan
        model.num_prediction_heads=0 head_positions=-1 head_positions=0 head_positions=1.5
        prompt_tokens=-1 prompt_tokens=0 weight_decay=-0.1 eval_steps=0 eval_steps=-5
        save_steps=0 save_steps=-5 logging_steps=0 learning_rate=inf learning_rate=.inf
        learning_rate=-1 learning_rate=nan learning_rate=.nan learning_rate=0
        learning_rate=1e999 learning_rate=fast learning_rate=true
        per_device_train_batch_size=0 per_device_train_batch_size=-1
        gradient_accumulation_steps=0 dataloader_num_workers=-1 seed=-1 seed=4294967296
        seed=1000000000000000000000000000000 warmup_steps=-1 max_grad_norm=-1
        input_corruption=1 head_weight_decay=0 optim=sgd bf16=maybe backbone.train=all
        backbone.dtype=int8 backbone.lora.r=0 backbone.lora.lora_dropout=1 model=3
        model=null
    """,
    DRAFT: """
        max_steps=0 bottom_layers=-1 top_layers=-1 learning_rate=nan
        dataloader_num_workers=-1 optim=sgd prompt_tokens=0
    """,
    COMPARE: """
        temperature=nan temperature=-1 temperature=inf
        top_p=0 top_p=1.1 top_p=nan top_k=-1
        max_tokens=0 max_tokens_per_text_unit=0 seeds=[-1] seeds=[0,0]
        seeds=[] seeds=[a] limit=-1 batch_size=0 resamples=10 prompt_tokens=0
        prompt_seeds=[-1] threads=-1 audio_utterances=-1 methods=[] scorers=[dnsmos,dnsmos]
        repetition_share=0 out= data=
    """,
    PROFILE: """
        limit=-1 seeds=0 range_size=0 sizes=[0] seed=-1 temperature=nan
    """,
    DCPO: """
        max_steps=0 max_steps=-2 learning_rate=-1 learning_rate=nan learning_rate=inf
        weight_decay=-1 eval_steps=0 eval_steps=-1 save_steps=0 save_steps=-1
        temperature=nan temperature=-1 top_p=0 top_p=2 seed=-1 prompt_tokens=0
        per_device_train_batch_size=0 num_generations=1 num_generations=0
        dataloader_num_workers=-1 chunk_range=[0,2] chunk_range=[a] num_train_epochs=0
        num_train_epochs=nan policy_width=0 policy_heads=0 max_failed_rewards=2
        num_iterations=0 beta=-1 alpha=nan scale_rewards=half
        lr_scheduler_type=zigzag eval_strategy=sometimes
    """,
    VOCODER: """
        max_steps=0 learning_rate=nan ema_decay=1 segment_tokens=0 renderer_every=-1
        model=3 bf16=2
    """,
    RECOGNIZER: """
        input_corruption=1 longest_span=-1 max_steps=0 per_device_train_batch_size=0
        learning_rate=-1
    """,
    SPEAK: """
        temperature=nan --temperature=-1 --top-k=-1 seed=-1
        dial=50 dial=-2.1
    """,
    TOKENIZER: """
        vocab_size=0 passes=0 sample_hours=-1 corpus=tape
    """,
    CONVERT: """
        kind=gpt heads=0 head_blocks=0 seed=-1
    """,
    PREPARE: """
        limit=-1 speeds=[nan] speeds=[3] min_seconds=-1 batch_seconds=0 num_proc=-1
        dev_fraction=1 filter_seconds=[3] corpus=tape
    """,
}
CASES = [(name, text) for name, texts in IMPOSSIBLE.items() for text in texts.split()]
CASES += [(COMPARE, "methods={a: 1}"), (COMPARE, "sampling={temperature: 1}")]


def named(text: str) -> str:
    """The setting that `key=value` is about, as a message calls it."""
    key = text.removeprefix("--").partition("=")[0].replace("-", "_")
    return key.rpartition(".")[2]


@pytest.mark.parametrize(
    ("name", "text"), CASES, ids=[f"{n.split(':')[1]} {t[:40]}" for n, t in CASES]
)
def test_impossible_values_are_refused_and_named(name, text):
    with pytest.raises(ConfigError) as caught:
        load_config(schema(name), [*NEEDED.get(name, []), text])
    message = str(caught.value)
    assert named(text) in message or "zigzag" in text or "sometimes" in text
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (TRAIN, "max_steps: 0", "max_steps"),
        (TRAIN, "learning_rate: .inf", "learning_rate"),
        (TRAIN, "learning_rate: -1", "learning_rate"),
        (TRAIN, "model: {dropout: 5}", "model.dropout"),
        (TRAIN, "model:\n  bos: true\n  hidden_size: 33", "hidden_size 33"),
        (TRAIN, "optim: sgd", "adamw_torch_fused, scaled_adam"),
        (TRAIN, "optimiser: sgd", "'optim'"),
        (TRAIN, "model: {hiden_size: 8}", "'model.hidden_size'"),
        (TRAIN, "model: 3", "model.…"),
        (COMPARE, "temperature: .nan", "temperature"),
        (COMPARE, "sampling: {temperature: 1}", "set temperature, top_k, "),
        (COMPARE, "seeds: [0, -1]", "seeds"),
        # one spelling of one setting: others, TRL's among them, are refused with it
        (COMPARE, "sampling.top_k: 3", "write top_k=…"),
        (DCPO, "output_dir: runs/x", "write out=…"),
        (DCPO, "max_completion_length: 40", "write max_tokens=…"),
        (DCPO, "num_generations: 1", "num_generations"),
    ],
)
def test_a_file_is_named_with_the_line(tmp_path, name, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"# a comment\n{text}\n")
    line = len(recipe.read_text().splitlines())
    with pytest.raises(ConfigError) as caught:
        load_config(schema(name), ["--config", str(recipe), *NEEDED.get(name, [])])
    assert str(caught.value).startswith(f"{recipe}:{line}: ") and message in str(caught.value)


def test_where_files_and_command_line_disagree_both_are_named(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model:\n  hidden_size: 36\n")
    with pytest.raises(
        ConfigError, match=rf"^{recipe}:2, .*: hidden_size 36 .*num_attention_heads"
    ):
        load_config(schema(TRAIN), ["--config", str(recipe), "model.num_attention_heads=8"])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"max_tokens": 0},
        {"top_k": 2.5},
        {"top_k": -1},
        {"min_tokens": -1},
    ],
)
def test_a_program_is_held_to_the_same_bounds(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        SamplingConfig(**changes)


def test_the_edges_themselves_are_allowed():
    config = load_config(
        schema(TRAIN),
        (
            "max_steps=1 head_positions=1 model.dropout=0 weight_decay=0 "
            "dataloader_num_workers=0 seed=4294967295 max_steps=1e3 learning_rate=1e-9 "
            "max_grad_norm=0 input_corruption=0"
        ).split(),
    )
    assert (config.max_steps, config.head_positions, config.model.dropout, config.seed) == (
        1000,
        1.0,
        0.0,
        2**32 - 1,
    )
    assert load_config(schema(COMPARE), ["temperature=0", "top_p=1"]).sampling.temperature == 0
    assert load_config(schema(DCPO), ["max_steps=-1", "use_cpu=true"]).max_steps == -1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (TRAIN, "out"),
        (TRAIN, "data"),
        (PREPARE, "out"),
        (COMPARE, "out"),
        (DCPO, "out"),
        (PROFILE, "data"),
        (VOCODER, "out"),
    ],
)
def test_a_file_where_a_folder_belongs(tmp_path, name, key):
    (tmp_path / "file").write_text("")
    needed = [a for a in NEEDED.get(name, []) if not a.startswith(f"{key}=")]
    for place in ("file", "file/below"):
        with pytest.raises(ConfigError, match=f" {key}: "):
            load_config(schema(name), [*needed, f"{key}={tmp_path / place}"])


def test_a_folder_where_a_file_belongs(tmp_path):
    with pytest.raises(ConfigError, match=" out: "):
        load_config(schema(SPEAK), ["some text", "-o", str(tmp_path)])
