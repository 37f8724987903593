"""The quickstart's bookkeeping with commands of milliseconds, and every recipe against its
schema."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest
from test_docs import main_of

from dcar.cli import RECIPES as COMMAND_OF
from dcar.cli import kind_of, resolve
from dcar.config import load_config, schema_of
from dcar.config.recipes import shipped
from dcar.errors import DCARError
from dcar.model.car import CARDecoder
from dcar.prepare.prepared import prepared_info
from dcar.sources.shipped import ASSETS
from dcar.train.car import data_identity
from dcar.train.checkpoints import differing
from launch import quickstart
from launch.quickstart import QuickstartConfig, Step, content_digest, pipeline, run
from rl.config import DCPOConfig

ROOT = Path(__file__).parents[2]
NAMES = [f"{r.name}{v and ':'}{v}" for r in shipped() for v in ("", *r.variants)]


def schema(recipe: str) -> type:
    """What a recipe's command takes its settings from."""
    _, module, _ = resolve(COMMAND_OF[kind_of(recipe)].split())
    return schema_of(main_of(module))


COPY = (
    "import sys; s, t, log = sys.argv[1:]; open(log, 'a').write('x'); open(t, "
    "'w').write(open(s).read() + '!')"
)


class Chain:
    """source → a → (b beside c) → compare.txt, each a copy with a mark; counts how often each
    step ran."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.out = folder, folder / "out"
        self.source = folder / "source.txt"
        self.source.write_text("once")
        self.code = {name: COPY for name in "abcd"}
        monkeypatch.setattr(quickstart, "pipeline", self.steps)

    def path(self, name: str) -> Path:
        return self.out / ("compare.txt" if name == "d" else f"{name}.txt")

    def step(self, name: str, source: Path) -> Step:
        command = [
            sys.executable,
            "-S",
            "-c",
            self.code[name],
            str(source),
            str(self.path(name)),
            str(self.folder / f"{name}.count"),
        ]
        return Step(name, command, [self.path(name)], [source])

    def steps(self, config: QuickstartConfig) -> list[list[Step]]:
        assert Path(config.out) == self.out
        return [
            [self.step("a", self.source)],
            [self.step("b", self.path("a")), self.step("c", self.path("a"))],
            [self.step("d", self.path("b"))],
        ]

    def run(self) -> None:
        run(QuickstartConfig(out=str(self.out)))

    @property
    def counts(self) -> str:
        files = [self.folder / f"{name}.count" for name in "abcd"]
        return "".join(str(len(f.read_text())) if f.exists() else "0" for f in files)

    @property
    def records(self) -> list[str]:
        return sorted(p.stem for p in (self.out / "steps").glob("*.json"))


@pytest.fixture
def chain(tmp_path, monkeypatch) -> Chain:
    return Chain(tmp_path, monkeypatch)


# --- what is done is not done again ---------------------------------------------------------------


def test_every_step_runs_once_and_is_recorded(chain, capsys):
    chain.run()
    assert (
        chain.counts == "1111"
        and chain.path("d").read_text() == "once!!!"
        and chain.path("c").exists()
    )
    assert chain.records == ["a", "b", "c", "d"]
    record = json.loads((chain.out / "steps" / "a.json").read_text())
    assert (
        record["fingerprint"] == chain.step("a", chain.source).fingerprint()
        and record["seconds"] >= 0
    )
    assert record["command"][-3] == str(chain.source)
    shown = capsys.readouterr().out
    assert "== a: python -S -c" in shown and f"(log: {chain.out / 'c.log'})" in shown
    assert f"dcar report compare={chain.out}" in shown
    assert {p.name for p in chain.out.iterdir()} >= {"quickstart.yaml", "provenance.json", "c.log"}
    chain.run()
    assert chain.counts == "1111"
    assert capsys.readouterr().out.count("already done") == 4


@pytest.mark.parametrize(
    ("change", "counts", "step", "written"),
    [
        # what follows has the same input as before
        (lambda chain: chain.path("b").unlink(), "1211", "d", "once!!!"),
        (lambda chain: chain.source.write_text("twice"), "2222", "d", "twice!!!"),
        (
            lambda chain: chain.code.update(c=COPY + "; open(t, 'a').write('?')"),
            "1121",
            "c",
            "once!!?",
        ),
    ],
    ids=["an output vanished", "inputs", "a command"],
)
def test_what_changed_runs_again_and_what_is_behind_it(chain, change, counts, step, written):
    chain.run()
    change(chain)
    chain.run()
    assert chain.counts == counts and chain.path(step).read_text() == written


def test_a_training_of_other_inputs_is_set_aside_and_one_that_was_cut_off_is_not(
    chain, monkeypatch
):
    def steps(config: QuickstartConfig) -> list[list[Step]]:
        groups = chain.steps(config)
        groups[1][0].folder = chain.out / "trained"
        return groups

    monkeypatch.setattr(quickstart, "pipeline", steps)
    checkpoint = chain.out / "trained" / "checkpoint"
    chain.code["b"] = (
        f"import pathlib; p = pathlib.Path({str(checkpoint)!r}); p.parent.mkdir(exist_ok=True); "
        "p.open('a').write('.'); " + COPY
    )
    good, broken = chain.code["b"], chain.code["b"] + "; raise SystemExit(1)"

    def attempt(code: str) -> str:
        chain.code["b"] = code
        chain.run()
        return checkpoint.read_text()

    assert attempt(good) == "."
    chain.path("b").unlink()
    assert attempt(good) == ".."  # the same command goes on
    with pytest.raises(DCARError):
        attempt(broken)
    with pytest.raises(DCARError):
        attempt(broken)  # goes on, in the folder of the command that was cut off
    assert checkpoint.read_text() == ".."
    assert (chain.out / "trained.1" / "checkpoint").read_text() == ".."
    assert attempt(good) == "."
    assert (chain.out / "trained.2" / "checkpoint").read_text() == ".."


def test_fingerprints_know_command_and_content(tmp_path):
    file, folder = tmp_path / "f.txt", tmp_path / "model"
    file.write_text("1")
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")

    def fingerprint(*command: str) -> str:
        return Step("s", ["python", *command], [], [file, folder]).fingerprint()

    first = fingerprint("a", "b")
    assert (
        first
        == fingerprint("a", "b")
        == Step(
            "t",
            ["/usr/bin/python3", "a", "b"],
            [tmp_path],
            [file, folder],
            # the interpreter's path does not matter
        ).fingerprint()
    )
    assert len({first, fingerprint("a"), fingerprint("ab"), fingerprint("a", "b", "")}) == 4
    file.touch()
    for noise in ("log.txt", "provenance.json", "checkpoint-5/model.safetensors"):
        (folder / noise).write_text("other")
    assert fingerprint("a", "b") == first
    seen = {first}
    for path, text in (
        (file, "2"),
        (folder / "model.safetensors", "other"),
        (folder / "config.json", "{}"),
        (folder / "deep.yaml", "a: 1"),
    ):
        path.write_text(text)
        seen.add(fingerprint("a", "b"))
    assert len(seen) == 5
    (folder / "deep.yaml").rename(folder / "renamed.yaml")
    assert fingerprint("a", "b") not in seen
    assert content_digest(tmp_path / "nowhere") == content_digest(tmp_path / "neither")


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "code", "message", "finished"),
    [
        ("d", "raise SystemExit(7)", "'d' .*status 7", "abc"),
        (
            "c",
            "import sys; print('cause', file=sys.stderr); sys.exit(1)",
            "'c' .*status 1.*{out}/c.log",
            "a",
        ),
        ("a", "pass", "'a' .*{out}/a.txt", ""),
    ],
)
def test_a_failing_step_is_named_and_the_finished_ones_stay(chain, step, code, message, finished):
    chain.code[step] = code
    with pytest.raises(DCARError, match=message.format(out=chain.out)):
        chain.run()
    assert chain.records == [*finished]
    if step == "c":
        assert (chain.out / "c.log").read_text() == "cause\n"
    chain.code[step] = COPY
    chain.run()
    assert chain.records == [*"abcd"] and all(
        chain.counts[ord(name) - ord("a")] == "1" for name in finished
    )


def test_a_step_that_failed_takes_its_neighbour_down(chain):
    chain.code["b"] = "raise SystemExit(1)"
    chain.code["c"] = "import time; time.sleep(60)"
    begun = time.monotonic()
    with pytest.raises(DCARError, match="'b' .*status 1"):
        chain.run()
    assert time.monotonic() - begun < 30


def test_steps_side_by_side_run_at_the_same_time(chain):
    """Each waits for the other's mark: one after the other they would never end."""
    meet = (
        "import os, sys, time; s, t, log = sys.argv[1:]; open(log, 'w').write('x'); end = "
        "time.time() + 30\n"
        "while not os.path.exists(log[:-7] + {other!r} + '.count') and time.time() < end: "
        "time.sleep(0.01)\n"
        "assert time.time() < end; open(t, 'w').write('met')"
    )
    chain.code["b"], chain.code["c"] = meet.format(other="c"), meet.format(other="b")
    chain.run()
    assert chain.path("b").read_text() == chain.path("c").read_text() == "met"


# --- the real pipeline and the recipes ------------------------------------------------------------


def settings(schema: type, *arguments: str):
    return load_config(schema, [*arguments, *(["use_cpu=true"] if schema is DCPOConfig else [])])


def read(recipe: str, *overrides: str):
    return settings(schema(recipe), "--config", recipe, *overrides)


@pytest.mark.parametrize("recipe", NAMES)
def test_recipes_fit_their_schema(recipe):
    assert isinstance(read(recipe), schema(recipe))


@pytest.mark.parametrize(("processes", "start"), [(1, "scratch"), (2, "starter")])
def test_the_pipeline_s_commands_are_valid_and_feed_each_other(
    tmp_path, monkeypatch, processes, start
):
    def shipped(name: str) -> Path:
        (folder := tmp_path / "assets" / name).mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setattr(quickstart, "shipped", shipped)
    out = tmp_path / "q"
    groups = pipeline(
        QuickstartConfig(out=str(out), start=start, train_steps=7, processes=processes)
    )
    assert [[s.name for s in group] for group in groups] == [
        ["distil", "texts"] if start == "starter" else [],
        ["car", "far"],
        ["chunk_scorer", "verifiers"],
        ["dcpo"],
        ["export"],
        ["compare"],
    ]
    made: list[Path] = []
    for group in groups:
        for step in group:
            words = step.command
            # the last -m: accelerate has one, too
            module = words[len(words) - words[::-1].index("-m")]
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            if module != "dcar.cli":
                config = settings(schema_of(main_of(module)), *words[words.index(module) + 1 :])
                if module == "dcar.train":
                    assert config.max_steps == 7
                    assert config.data == str(
                        out / "distilled" if start == "starter" else shipped("prepared")
                    )
                    initial = str(shipped("decoder" if step.name == "car" else "far"))
                    assert config.init_from == (initial if start == "starter" else "")
                if module == "rl.train":
                    assert config.chunk_scorer == str(out / "chunk_scorer")
                    assert config.data == str(
                        out / "texts" if start == "starter" else shipped("prepared")
                    )
            for path in step.inputs:  # is there, or an earlier step writes it
                assert path.exists() or any(m == path or path in m.parents for m in made), (
                    step.name,
                    path,
                )
        made += [path for step in group for path in step.outputs]
    assert out / "compare.json" in made and out / "report.html" in made
    assert ("--num_processes" in groups[-1][0].command) == (processes == 2)


def test_stage_one_goes_on_from_the_shipped_decoders_as_they_are():
    """The recipes describe the shipped decoders exactly, or `init_from` would refuse them."""
    info = prepared_info(ASSETS / "starter_prepared")
    for name, recipe in (
        ("decoder", "car_starter:shared"),
        ("far", "car_starter:far"),
        ("decoder", "finetune_starter"),
        ("far", "finetune_far_starter"),
    ):
        if not (ASSETS / name).exists():
            pytest.skip(f"no {name} is shipped yet")
        wanted = dataclasses.replace(read(recipe).model, **data_identity(info))
        assert differing(CARDecoder.load_config(ASSETS / name), wanted) == ""
