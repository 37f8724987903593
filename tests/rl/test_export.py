"""Export: the policy directory, the serving program, refusals."""

import contextlib
import io
import json
import re
import subprocess
import sys

import pytest
import torch
from tiny_decoders import tiny_decoder

from dcar.decoding import PolicyChunk, Prompt, decode
from dcar.doctor import verify
from dcar.errors import CheckpointError, ConfigError
from dcar.sampling import SamplingConfig
from dcar.storage import seal
from heads.chunk_scorer import ChunkScorerConfig
from heads.policy import (
    CandidatePolicy,
    CandidatePolicyConfig,
    ChunkPolicy,
    HiddenPolicy,
    HiddenPolicyConfig,
)
from rl.export import ServingStep, main


def common(base) -> dict:
    return dict(
        hidden_size=32,
        num_actions=4,
        chunk_range=(2, 3),
        base_checksum=base.checksum(),
        tokenizer="tiny@abc",
    )


@pytest.fixture
def run(tmp_path):
    """A finished run of a tiny decoder, as rl.train leaves it."""
    base = tiny_decoder()
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    policy = HiddenPolicy(HiddenPolicyConfig(**common(base), width=16, num_attention_heads=2))
    torch.nn.init.normal_(policy.output.weight)
    policy.save_pretrained(tmp_path / "run" / "policy")
    source = {
        "metrics": {"eval_wer": 0.1234, "eval_action_histogram": [0.25, 0.75]},
        "steps": 7,
        "processes": 2,
        "recognizer": "toy",
        "config": {"forced_rows": "policy_ratio", "num_generations": 8},
    }
    (tmp_path / "run" / "policy" / "provenance.json").write_text(json.dumps(source))
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 7}\n')
    return tmp_path


def check_example(out) -> None:
    """The program in the card of an exported policy is short, needs torch alone, and runs in
    that folder."""
    example = re.search(
        r"## Serving program.*?```python\n(.*?)```", (out / "README.md").read_text(), re.S
    )[1]
    assert len(example.splitlines()) <= 10 and re.findall(r"import (\w+)", example) == ["torch"]
    with contextlib.chdir(out), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(example, "card", "exec"), {"__name__": "__main__"})
    assert said.getvalue().count("keep [") == 2


def export(run, *more):
    main([f"run={run / 'run'}", f"decoder={run / 'base'}", f"out={run / 'out'}", *more])
    return run / "out"


def test_directory_holds_policy_card_and_provenance(run):
    out = export(run, "program=false")
    policy = ChunkPolicy.from_pretrained(out)
    assert policy.checksum() == ChunkPolicy.from_pretrained(run / "run" / "policy").checksum()
    assert policy.config.chunk_range == (2, 3) and policy.config.num_actions == 4
    policy.check_base(tiny_decoder().checksum())
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        policy.check_base(tiny_decoder(seed=1).checksum())
    card = (out / "README.md").read_text()
    for text in (
        "eval_wer | 0.1234",
        "[0.2500, 0.7500]",
        "7 steps on 2",
        "tiny@abc",
        "forced_rows policy_ratio",
        policy.config.base_checksum,
    ):
        assert text in card
    assert (
        json.loads((out / "provenance.json").read_text())["steps"] == 7
        and (out / "log.jsonl").is_file()
    )
    assert not (out / "serving.pt2").exists()


def test_a_checkpoint_is_exported_with_its_own_step_and_no_metrics(run):
    """Those of the finished run are of other weights."""
    source = json.loads((run / "run" / "policy" / "provenance.json").read_text())
    (run / "run" / "provenance.json").write_text(json.dumps(source))
    checkpoint = (run / "run" / "policy").rename(run / "run" / "checkpoint-3")
    (checkpoint / "provenance.json").unlink()
    origin = {"settings": {"num_generations": 4}, "revision": "abc"}
    seal(checkpoint, {}, step=3, processes=2, run=origin)
    main([f"run={checkpoint}", f"out={run / 'out'}", "program=false"])
    card = (run / "out" / "README.md").read_text()
    assert "3 steps on 2" in card and "num_generations 4" in card and "none recorded" in card
    assert "0.1234" not in card


def test_digests_are_those_of_the_exported_files(run):
    """Also of a second export into the folder, from which the program of the first is gone."""
    for more in ((), ("program=false",)):
        out = export(run, *more)
        assert verify(out) == {out / "provenance.json": (4 + (not more), [])}
        assert (out / "serving.pt2").exists() == (not more)


def test_program_computes_the_same_with_torch_alone(run, tmp_path):
    """Loaded in a process that cannot import this project, at other batch sizes and lengths. The
    card's table has the shapes that it answers with, and its example runs in the exported
    folder."""
    out = export(run)
    assert [faults for _, faults in verify(out).values()] == [[]]  # of the program and the card
    step = ServingStep(ChunkPolicy.from_pretrained(out), tiny_decoder().heads).eval()
    cases = []
    for batch, length in ((1, 1), (3, 40), (2, 301)):
        hidden, lengths = torch.randn(batch, length, 32), torch.randint(1, length + 1, (batch,))
        with torch.no_grad():
            cases.append((hidden, lengths, *step(hidden, lengths)))
            # the decision is that of the policy at each row's last position
            log_probs = step.policy(hidden)
        wanted = log_probs[torch.arange(batch), lengths - 1]
        assert torch.allclose(cases[-1][2], wanted, atol=1e-5)
    torch.save(cases, tmp_path / "cases.pt")
    script = """
import sys, torch
torch.set_num_threads(1)
program = torch.export.load(sys.argv[1]).module()
for hidden, lengths, actions, distributions in torch.load(sys.argv[2]):
    a, l = program(hidden, lengths)
    assert a.shape == actions.shape and l.shape == distributions.shape
    assert torch.allclose(a, actions, atol=1e-5) and torch.allclose(l, distributions, atol=1e-4)
assert not any(name.split(".")[0] in ("dcar", "heads", "rl") for name in sys.modules)
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, out / "serving.pt2", tmp_path / "cases.pt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]

    check_example(out)
    program = torch.export.load(str(out / "serving.pt2"))
    assert [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT"
    ] == ["hidden", "lengths"]
    card = (out / "README.md").read_text()
    (actions, heads) = program.module()(torch.randn(3, 5, 32), torch.tensor([5, 1, 2]))
    assert (actions.dtype, heads.dtype) == (torch.float32, torch.float32)
    for name, shape in (("log_probs", actions.shape[1:]), ("logits", heads.shape[1:])):
        assert re.search(rf"\| {name} \| \[B, {', '.join(map(str, shape))}\] float32", card)
    assert "Serving program" not in (export(run, "program=false") / "README.md").read_text()


def exported_after_the_draw(folder, scored: bool, *more: str):
    """A decoder and a policy that looks at candidates, exported: (decoder, policy, folder)."""
    base = tiny_decoder()
    held = (
        {"chunk_scorer": ChunkScorerConfig(32, 4, base.config.output_size, 4, 8)} if scored else {}
    )
    shape = CandidatePolicyConfig(**common(base), sizes=(1, 2, 3), **held)
    policy = CandidatePolicy(shape).eval()
    torch.nn.init.normal_(policy.scores.linear.weight, std=0.2)
    if scored:
        torch.nn.init.normal_(policy.chunk_scorer.output.weight, std=8.0)
    policy.save_pretrained(folder / "policy")
    base.save_pretrained(folder / "base")
    main([f"run={folder / 'policy'}", f"decoder={folder / 'base'}", f"out={folder / 'out'}", *more])
    return base, policy, folder / "out"


@pytest.mark.filterwarnings("error:The tensor attributes")
@pytest.mark.parametrize("scored", [False, True])
def test_a_program_of_a_policy_after_the_draw_and_its_card(tmp_path, scored):
    """Decisions and tokens are those of decoding; the card's example runs with torch alone."""
    base, policy, out = exported_after_the_draw(tmp_path, scored)
    check_example(out)
    program = torch.export.load(str(out / "serving.pt2")).module()
    prompt = Prompt("a", (1, 2, 3, 4, 5), (1, 2))
    sampling = SamplingConfig(temperature=0, max_tokens=20)
    (result,) = decode(base, [prompt], PolicyChunk(policy), sampling, record_hidden=True)
    spoken = []
    for position, action, kept in zip(
        result.decision_positions, result.sizes, result.emitted, strict=True
    ):
        noise = torch.zeros(1, 1, 3, 13)
        noise[:, :, 0, 12] = -1e9 if not spoken else 0.0  # min_tokens
        log_probs, _, tokens = program(
            result.hidden[None, : position + 1], torch.tensor([position + 1]), noise
        )
        assert int(log_probs.argmax()) + 1 == action
        spoken += tokens[0, 0, :kept].tolist()
    assert spoken[: len(result.tokens)] == result.tokens and len(spoken) == len(result.tokens)


def test_a_program_that_chooses_among_draws(tmp_path):
    """Given the chunks that decoding drew, it chooses the same candidate and size; the card says
    what goes in and out."""
    base, policy, out = exported_after_the_draw(tmp_path, True, "num_candidates=5")
    program = torch.export.load(str(out / "serving.pt2")).module()
    drawn = []

    class Watched(PolicyChunk):
        def draw_and_choose(self, state, logits):
            chunks, features, choice = super().draw_and_choose(state, logits)
            drawn.append(chunks)
            return chunks, features, choice

    rule = Watched(policy, num_candidates=5)
    (result,) = decode(
        base,
        [Prompt("a", (1, 2, 3, 4, 5), (1, 2))],
        rule,
        SamplingConfig(min_tokens=30, max_tokens=60),
        record_hidden=True,
    )
    # else there was nothing to choose
    assert len(set(result.chosen)) > 2 and len(set(result.sizes)) > 1
    spoken, inputs = [], []
    for position, chunks in zip(result.decision_positions, drawn, strict=True):
        noise = 1e4 * torch.nn.functional.one_hot(chunks, 13).float()  # so that these are drawn
        inputs.append((result.hidden[None, : position + 1], noise))
        log_probs, _, tokens = program(inputs[-1][0], torch.tensor([position + 1]), noise)
        n = len(inputs) - 1
        best = 4 * result.chosen[n] + result.sizes[n] - 1
        assert int(log_probs.argmax()) == best
        assert log_probs.amax().item() == pytest.approx(result.log_probs[n], abs=1e-4)
        assert torch.equal(tokens, chunks)
        spoken += tokens[0, result.chosen[n], : result.emitted[n]].tolist()
    assert spoken == result.tokens
    rows = list(range(min(4, len(inputs))))  # side by side, of other lengths
    hidden = torch.nn.utils.rnn.pad_sequence([inputs[n][0][0] for n in rows], batch_first=True)
    lengths = torch.tensor([inputs[n][0].shape[1] for n in rows])
    answers = program(hidden, lengths, torch.cat([inputs[n][1] for n in rows]))
    # candidates may begin alike: which of them is the best is then up to rounding
    taken = torch.tensor([[4 * result.chosen[n] + result.sizes[n] - 1] for n in rows])
    likeliest = answers[0].amax(-1, keepdim=True)
    torch.testing.assert_close(answers[0].gather(1, taken), likeliest, atol=1e-4, rtol=0)

    check_example(out)
    card = (out / "README.md").read_text()
    assert re.search(r"\| `noise` \| \[B, 5, 3, 13\] float32", card)
    for name, answer, dtype in zip(
        ("log_probs", "logits", "tokens"), answers, ("float32", "float32", "int64"), strict=True
    ):
        shape = ", ".join(["B", *map(str, answer.shape[1:])])
        assert f"| {name} | [{shape}] {dtype}" in card and str(answer.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["num_candidates=4"], "chunk_scorer"),
        (["num_candidates=0"], "≥ 1"),
        (["num_candidates=4", "program=false"], "program=true"),
    ],
)
def test_refuses_draws_that_nothing_chooses_among(run, more, said):
    with pytest.raises(ConfigError, match=said):
        export(run, *more)
    assert not (run / "out").exists()


def test_export_refuses_what_does_not_fit(run):
    tiny_decoder(seed=1).save_pretrained(run / "other")
    with pytest.raises(CheckpointError, match="policy .*dcar train-policy"):
        main([f"run={run / 'run'}", f"decoder={run / 'other'}", f"out={run / 'out'}"])
    assert not (run / "out").exists()
    with pytest.raises(ConfigError, match="decoder=.*program=false"):
        main([f"run={run / 'run'}", f"out={run / 'out'}"])
    with pytest.raises(CheckpointError, match="base/x: .*`dcar train-policy`"):
        main([f"run={run / 'base' / 'x'}", "program=false"])
    with pytest.raises(CheckpointError, match="'dcar-decoder' checkpoint, not a policy"):
        main([f"run={run / 'base'}", "program=false", f"out={run / 'out'}"])
    with pytest.raises(ConfigError, match="^run "):
        main(["program=false"])
