"""Stage one on a tiny corpus: learning, logging, resuming, processes, wrong weights."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from launched import ROOT, accelerate_launch, two_processes
from tiny_data import CODES, tiny_tokenizer, write_prepared
from tiny_training import MODEL, log_of, tiny_config, trainer_of

from dcar.config import load_config
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.car import CARDecoder
from dcar.optim import cosine, eden_factor
from dcar.prepare.prepared import prepared_info
from dcar.train.car import TrainConfig, data_identity, plan, run
from dcar.train.checkpoints import latest_checkpoint

# --- learning and what a run leaves behind --------------------------------------------------------


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[TrainConfig, CARDecoder, Path]:
    out = tmp_path_factory.mktemp("trained")
    config = tiny_config(
        data,
        out,
        {"dropout": 0.0},
        per_device_train_batch_size=8,
        max_steps=61,
        logging_steps=6,
        eval_steps=10,
        report_to=["tensorboard"],
    )
    return config, run(config), out


def test_every_head_learns_the_pattern(trained):
    _, _, out = trained
    evaluations = log_of(out, "eval_loss")
    # the last one again on what was saved
    assert [e["step"] for e in evaluations] == [10, 20, 30, 40, 50, 60, 61, 61]
    chance = math.log(CODES + 1)
    for head in (1, 2, 3):
        last = evaluations[-1]
        assert last[f"eval_head{head}_loss"] < 0.4 * chance
        assert last[f"eval_head{head}_accuracy"] > 0.8
        assert last[f"eval_head{head}_loss"] < 0.7 * evaluations[0][f"eval_head{head}_loss"]
    for e in evaluations:
        assert e["eval_loss"] == pytest.approx(sum(e[f"eval_head{h}_loss"] for h in (1, 2, 3)))
    losses = [line["loss"] for line in log_of(out, "loss")]
    # the training loss sums the three heads
    assert len(losses) == 10 and losses[0] > 1.5 * chance > 3 * losses[-1]


def test_speech_embeddings_can_start_from_the_tokenizers_codebook(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    data = write_prepared(
        tmp_path / "data", checksum=tokenizer.checksum, spec=str(tmp_path / "tokenizer")
    )
    config = tiny_config(data, tmp_path / "run", codebook_init=True)
    torch.manual_seed(0)
    started, plain = (
        plan(c, data_identity(prepared_info(data)))[2]()
        for c in (config, dataclasses.replace(config, codebook_init=False))
    )
    truth = torch.pdist(torch.from_numpy(tokenizer.centroids))
    for name in ("speech_embedding.weight", "heads.base.weight", "heads.projection"):
        tables = [m.state_dict()[name] for m in (started, plain)]
        if name == "heads.projection":
            assert torch.equal(*tables[0][:2, :CODES])  # head by head; EOS is drawn
            tables = [t[0] for t in tables]
        likeness = [
            float(torch.corrcoef(torch.stack([torch.pdist(t[:CODES]), truth]))[0, 1])
            for t in tables
        ]
        assert likeness[0] > 0.8 > 0.4 > likeness[1], (name, likeness)
        assert float(tables[0].std() / tables[1].std()) == pytest.approx(1, abs=0.1)
    assert run(config).config.speech_vocab_size == CODES
    with pytest.raises(ConfigError, match="codebook_init .*init_from .*backbone.path"):
        tiny_config(data, tmp_path / "run", codebook_init=True, init_from="x")
    (tmp_path / "tokenizer" / "tokenizer.json").rename(tmp_path / "gone.json")
    with pytest.raises(DataError, match=f"{config.data}: "):
        run(dataclasses.replace(config, out=str(tmp_path / "other")))
    codec = write_prepared(tmp_path / "codec", spec="s3:speech_tokenizer_v1")
    with pytest.raises(ConfigError, match="codec: .*codebook_init=false"):
        run(tiny_config(codec, tmp_path / "codec_run", codebook_init=True))


def test_a_run_leaves_decoder_config_log_and_provenance(trained, data):
    config, decoder, out = trained
    saved = CARDecoder.from_pretrained(out)
    assert saved.checksum() == decoder.checksum() and not decoder.training
    prepared = prepared_info(data)
    assert saved.config == dataclasses.replace(config.model, **data_identity(prepared))
    assert (saved.config.speech_vocab_size, saved.config.tokenizer) == (CODES, "tiny@abc")
    assert saved.config.phonemes == prepared.phonemes
    source = json.loads((out / "provenance.json").read_text())
    assert (source["steps"], source["processes"], source["checksum"]) == (61, 1, saved.checksum())
    assert source["data"] == prepared.content and source["metrics"]["eval_head3_accuracy"] > 0.8
    given = load_config(TrainConfig, ["--config", str(out / "config.yaml")])
    resolved, *_ = plan(given, data_identity(prepared))
    assert resolved == dataclasses.replace(config, model=saved.config)
    assert list((out / "runs").rglob("events*"))
    checkpoint = latest_checkpoint(out)
    assert checkpoint.name == "checkpoint-61" and not list(out.rglob("training_args.bin"))
    # every checkpoint is a decoder
    assert CARDecoder.from_pretrained(checkpoint).checksum() == saved.checksum()


def test_training_goes_on_from_given_weights(trained, tmp_path, data):
    config, decoder, out = trained
    tuned = run(
        dataclasses.replace(
            config, out=str(tmp_path), init_from=str(out), max_steps=1, learning_rate=1e-9
        )
    )
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(tuned.state_dict().values(), decoder.state_dict().values(), strict=True)
    )


def test_far_is_a_decoder_of_one_head(data, tmp_path):
    far = run(tiny_config(data, tmp_path, {"num_prediction_heads": 1}))
    assert far.config.num_prediction_heads == 1 and far.heads.projection.numel() == 0
    evaluation, again = log_of(tmp_path, "eval_loss")
    assert (
        evaluation["eval_loss"] == evaluation["eval_head1_loss"]
        and "eval_head2_loss" not in evaluation
    )
    assert evaluation["eval_loss"] == again["eval_loss"] < 1.5 * math.log(CODES + 1)


def test_scaled_adam_follows_eden(data, tmp_path):
    config = tiny_config(
        data,
        tmp_path,
        {"dropout": 0.0},
        optim="scaled_adam",
        learning_rate=0.03,
        warmup_steps=4,
        max_steps=30,
        eval_steps=10,
        gradient_accumulation_steps=2,
    )
    decoder = run(config)
    assert trainer_of(config, decoder).args.max_grad_norm == 0  # it clips by itself
    assert [line["learning_rate"] for line in log_of(tmp_path, "loss")[:8]] == pytest.approx(
        # 5 batches and 3 updates an epoch
        [0.03 * eden_factor(step, step // 3, warmup_batches=4) for step in range(8)],
        rel=0.01,
    )
    evaluations = [line["eval_loss"] for line in log_of(tmp_path, "eval_loss")]
    assert evaluations[-1] < 0.75 * 3 * math.log(CODES + 1) and evaluations[-1] < evaluations[0]


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "steps", "changes"),
    [
        (3, 6, {}),  # in the middle of an epoch, and over its end
        (5, 7, {}),  # at the end of an epoch
        (2, 4, {"gradient_accumulation_steps": 2}),  # three updates an epoch, the last of one batch
        (3, 6, {"optim": "scaled_adam", "learning_rate": 0.01}),
    ],
    ids=str,
)
def test_resumed_run_equals_one_that_never_stopped(data, tmp_path, stop, steps, changes):
    """T15: bit for bit, with dropout and corrupted inputs, which draw from the global generator."""
    changes = {
        "max_steps": steps,
        "save_steps": stop,
        "input_corruption": 0.2,
        "head_positions": 0.7,
        **changes,
    }
    whole = run(tiny_config(data, tmp_path / "whole", **changes))
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{stop}", killed / f"checkpoint-{stop}")
    (killed / f"checkpoint-{stop + 9}").mkdir()  # and while it wrote another
    start = CARDecoder.from_pretrained(killed / f"checkpoint-{stop}")
    resumed = run(tiny_config(data, killed, **changes))
    assert start.checksum() != resumed.checksum() == whole.checksum()

    def figures(out: Path) -> list[tuple]:
        return [
            (line["step"], line["loss"], line["grad_norm"], line["learning_rate"])
            for line in log_of(out, "loss")
        ]

    assert (
        figures(killed) == figures(tmp_path / "whole")[stop:]
        and len(figures(killed)) == steps - stop
    )


def test_another_number_of_steps_an_epoch_is_refused(data, tmp_path):
    """Parts of the data would be left out or repeated; the same number by another division of the
    batch resumes."""
    size = {"per_device_train_batch_size": 8, "save_steps": 1}
    run(tiny_config(data, tmp_path, max_steps=2, **size))
    halved = {**size, "per_device_train_batch_size": 4}
    with pytest.raises(CheckpointError, match="checkpoint-2: 3 steps an epoch then, 5 now"):
        run(tiny_config(data, tmp_path, max_steps=4, **halved))
    run(tiny_config(data, tmp_path, max_steps=4, gradient_accumulation_steps=2, **halved))
    assert log_of(tmp_path, "loss")[-1]["step"] == 4


def test_changed_settings_are_those_of_a_resumed_run_or_refused(data, tmp_path):
    """Rate, schedule, decay and rhythm; log, config.yaml and provenance say what ran, and from
    which step on."""
    run(tiny_config(data, tmp_path, max_steps=4, warmup_steps=2, weight_decay=0.1))
    changes = dict(warmup_steps=2, max_steps=6, learning_rate=0.02, weight_decay=0.3, save_steps=1)
    run(tiny_config(data, tmp_path, **changes))
    schedule = cosine(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.02), total=6, warmup=2
    )
    expected = [0.02 * schedule.lr_lambdas[0](step) for step in (4, 5)]
    assert [line["learning_rate"] for line in log_of(tmp_path, "loss")[4:]] == pytest.approx(
        expected
    )
    changed = {"learning_rate": [5e-3, 0.02], "max_steps": [4, 6], "weight_decay": [0.1, 0.3]}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    assert [line for line in lines if "resumed" in line] == [
        {"step": 4, "resumed": True, "changed": changed}
    ]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]
    groups = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt", weights_only=True)[
        "param_groups"
    ]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    saved = (tmp_path / "config.yaml").read_text()
    for refused, why in (
        ({"optim": "scaled_adam"}, "optim='adamw_torch_fused' .here 'scaled_adam'"),
        ({"learning_rate": 0.03}, "learning_rate=0.02 .here 0.03.*max_steps"),
        ({"max_steps": 4}, "checkpoint-6: .*max_steps to 6"),
        ({"seed": 3}, "seed=0 .here 3."),
    ):
        with pytest.raises(CheckpointError, match=why):
            run(tiny_config(data, tmp_path, **{**changes, **refused}))
    assert (tmp_path / "config.yaml").read_text() == saved and "learning_rate: 0.02" in saved
    run(tiny_config(data, tmp_path, **{**changes, "max_steps": 7}))
    assert json.loads((tmp_path / "provenance.json").read_text())["resumed"] == [
        {"step": 4, "changed": changed},
        {"step": 6, "changed": {"max_steps": [6, 7]}},
    ]


def test_resuming_another_model_s_run_is_refused(data, trained):
    config, _, _out = trained
    other = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_layers=1, ffn_size=48)
    )
    with pytest.raises(CheckpointError, match="num_layers .*2.* 1") as caught:
        run(other)
    assert "ffn_size" in str(caught.value) and "hidden_size" not in str(caught.value)


def test_going_on_with_other_data_is_refused(tmp_path):
    """A finished run, too, would else hand out a decoder of the data before, with a card of
    those there are now."""
    folder = write_prepared(tmp_path / "data", train=4, dev=2)
    config = tiny_config(folder, tmp_path / "out", max_steps=2)
    first = run(config)
    assert run(config).checksum() == first.checksum()
    shutil.rmtree(folder)
    write_prepared(folder, train=6, dev=2)
    for steps in (2, 3):
        with pytest.raises(CheckpointError, match=r"checkpoint-2: .*data .*prepared.json"):
            run(dataclasses.replace(config, max_steps=steps))
    assert (
        run(dataclasses.replace(config, resume_from_checkpoint="never")).checksum()
        != first.checksum()
    )


# --- several processes ----------------------------------------------------------------------------


def test_two_processes_train_and_evaluate_like_one(data, tmp_path):
    """Two real gloo processes; nine dev utterances in three batches, so one process repeats a
    batch and must not count it."""
    out = tmp_path / "two"
    model = [f"model.{k}={str(v).lower()}" for k, v in MODEL.items()]
    accelerate_launch(
        "-m",
        "dcar.train",
        *model,
        f"data={data}",
        f"out={out}",
        "prompt_tokens=5",
        "per_device_train_batch_size=4",
        "max_steps=4",
        "logging_steps=1",
    )
    two = json.loads((out / "provenance.json").read_text())
    assert (two["processes"], two["steps"]) == (2, 4)
    steps = log_of(out, "loss")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]  # one log, of the main process
    assert steps[2]["epoch"] == 1.0  # five batches in three steps of two
    decoder = CARDecoder.from_pretrained(out)
    assert decoder.checksum() == two["checksum"]
    alone = trainer_of(tiny_config(data, tmp_path / "one"), decoder).evaluate()
    figures = {k: v for k, v in alone.items() if k.startswith("eval_")}
    assert figures == pytest.approx(
        {k: v for k, v in two["metrics"].items() if k.startswith("eval_")}, rel=1e-5
    )
    assert len(figures) == 7


SPOKEN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tiny_training import tiny_config
from dcar.train import settings
from dcar.train.car import CARTrainer, run
from dcar.train import spoken

class Judge:
    def __call__(self, model):
        return [3, 0], [10, 10]

spoken.SpokenJudge.load = classmethod(lambda cls, *a: Judge())
seen, corrupt = [], CARTrainer._corrupt
def kept(self, ids):
    seen.append(torch.rand(3).tolist())
    return corrupt(self, ids)
CARTrainer._corrupt = kept
out = Path(sys.argv[3])
run(tiny_config(Path(sys.argv[2]), out, eval_steps=2, save_steps=2, max_steps=4, input_corruption=0.1,
                spoken=settings.SpokenSettings(sentences=2)))
import json, os
(out / f"drawn-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_processes_judge_each_step_once_and_draw_noise_of_their_own(data, tmp_path):
    """The last step is looked at twice, by the loop and by the export: all processes wait for
    the judge, or none."""
    (tmp_path / "program.py").write_text(SPOKEN)
    two_processes(tmp_path / "program.py", ROOT / "tests/toys", data, tmp_path / "out")
    assert sorted(json.loads((tmp_path / "out/spoken.json").read_text())["steps"], key=int) == [
        "0",
        "2",
        "4",
    ]
    first, second = (
        json.loads((tmp_path / f"out/drawn-{rank}.json").read_text()) for rank in (0, 1)
    )
    assert len(first) == len(second) == 4 and not set(map(tuple, first)) & set(map(tuple, second))


# --- wrong weights --------------------------------------------------------------------------------


def test_starting_weights_of_another_model(trained, data, tmp_path):
    _, _, out = trained
    with pytest.raises(ConfigError, match="hidden_size .*32.* 48") as caught:
        run(tiny_config(data, tmp_path, {"hidden_size": 48, "dropout": 0.0}, init_from=str(out)))
    assert "num_layers" not in str(caught.value)
    other = write_prepared(tmp_path / "other", checksum="def")
    with pytest.raises(ConfigError, match="tokenizer .*'tiny@abc'.*'tiny@def'"):
        run(tiny_config(other, tmp_path, {"dropout": 0.0}, init_from=str(out)))
    with pytest.raises(CheckpointError, match="nothing/config.json: "):
        run(tiny_config(data, tmp_path, init_from=str(tmp_path / "nothing")))


def test_weight_decay_is_that_of_matrices_alone(data, tmp_path):
    config = tiny_config(data, tmp_path, weight_decay=0.5)
    trainer = trainer_of(config, CARDecoder(config.model))
    for group in trainer.create_optimizer().param_groups:
        assert group["betas"] == (0.9, 0.98)
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.5 if parameter.dim() > 1 else 0.0)
