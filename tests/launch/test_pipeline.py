"""The runner of the pipelines, with commands of milliseconds: what is finished is not run again,
and a kill, a signal or a failure loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import ROOT

from dcar.errors import DCARError, StoppedError
from launch.pipeline import Job, content_digest, run_pipeline, words

COPY = "import sys; s, t, log = sys.argv[2:5]; open(log, 'a').write('x'); "
COPY += "open(t, 'w').write(open(s).read() + '!')"
WAIT = "import time; time.sleep(60); sys.exit(1)"


class Chain:
    """source → a → (b beside c) → d, each a copy with a mark; counts how often each job ran."""

    def __init__(self, folder: Path):
        self.folder, self.out = folder, folder / "out"
        self.out.mkdir()
        self.source = folder / "source.json"
        self.source.write_text("once")
        (folder / "worker.py").write_text("import sys; exec(sys.argv[1])")
        self.code = dict.fromkeys("abcd", COPY)
        self.settings: list[str] = []
        self.checkpoints: Path | None = None

    def path(self, name: str) -> Path:
        return self.out / f"{name}.json"

    def job(self, name: str, source: Path) -> Job:
        files = (source, self.path(name), self.folder / f"{name}.count")
        command = ["python", "-m", "worker", self.code[name], *map(str, files), *self.settings]
        checkpoints = self.checkpoints if name == "b" else None
        return Job(name, command, self.path(name), [source], checkpoints=checkpoints)

    def run(self) -> None:
        groups = [
            [self.job("a", self.source)],
            [self.job("b", self.path("a")), self.job("c", self.path("a"))],
            [],
            [self.job("d", self.path("b"))],
        ]
        run_pipeline(groups, self.out, {"PYTHONPATH": str(self.folder)})

    @property
    def counts(self) -> str:
        files = [self.folder / f"{name}.count" for name in "abcd"]
        return "".join(str(len(f.read_text())) if f.exists() else "0" for f in files)

    @property
    def finished(self) -> str:
        records = sorted((self.out / "jobs").glob("*.json"))
        return "".join(p.stem for p in records if "finished" in json.loads(p.read_text()))


@pytest.fixture
def chain(tmp_path) -> Chain:
    return Chain(tmp_path)


# --- what is finished is not run again ------------------------------------------------------------


def test_every_job_runs_once_and_is_recorded(chain, capsys):
    chain.run()
    assert chain.counts == "1111" and chain.finished == "abcd"
    assert chain.path("d").read_text() == "once!!!" and chain.path("c").exists()
    shown = capsys.readouterr().out
    assert "== 1/4 a: python -m " in shown and f"messages: {chain.out / 'c.log'}" in shown
    chain.run()
    assert chain.counts == "1111" and capsys.readouterr().out.count(": finished 20") == 4


def remove(chain: Chain) -> None:
    chain.path("b").unlink()


def change_input(chain: Chain) -> None:
    chain.source.write_text("twice")


def change_command(chain: Chain) -> None:
    chain.code["c"] += "; open(t, 'a').write('?')"


def change_machine(chain: Chain) -> None:
    chain.settings = ["device=cuda"]


@pytest.mark.parametrize(
    ("change", "counts", "job", "content"),
    [
        # what follows b has the same input as before
        (remove, "1211", "d", "once!!!"),
        (change_input, "2222", "d", "twice!!!"),
        (change_command, "1121", "c", "once!!?"),
        (change_machine, "1111", "d", "once!!!"),
    ],
)
def test_what_changed_runs_again_and_what_reads_it(chain, change, counts, job, content):
    chain.run()
    change(chain)
    chain.run()
    assert chain.counts == counts and chain.path(job).read_text() == content


def test_a_training_of_other_inputs_is_set_aside_and_one_that_was_cut_off_is_not(chain):
    chain.checkpoints = chain.out / "trained"
    checkpoint = chain.checkpoints / "checkpoint"
    training = (
        f"import pathlib; p = pathlib.Path({str(checkpoint)!r}); p.parent.mkdir(exist_ok=True); "
        "p.open('a').write('.'); " + COPY
    )
    broken = training + "; raise SystemExit(1)"

    def attempt(code: str) -> str:
        chain.code["b"] = code
        chain.run()
        return checkpoint.read_text()

    assert attempt(training) == "."
    chain.path("b").unlink()
    assert attempt(training) == ".."  # the same command resumes
    for _ in range(2):  # another command starts anew, and resumes when it was cut off
        with pytest.raises(DCARError):
            attempt(broken)
    assert checkpoint.read_text() == ".."
    assert (chain.out / "trained.1" / "checkpoint").read_text() == ".."
    assert attempt(training) == "."
    assert (chain.out / "trained.2" / "checkpoint").read_text() == ".."


def test_fingerprints_know_command_recipe_and_content(tmp_path):
    file, folder, recipe = tmp_path / "f.txt", tmp_path / "model", tmp_path / "r.yaml"
    file.write_text("1")
    recipe.write_text("a: 1")
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")

    def fingerprint(*more: str) -> str:
        command = ["dcar", "train", "--config", f"{recipe}:variant", *more]
        return Job("s", command, tmp_path, [file, folder]).fingerprint()

    first = fingerprint("a", "b")
    assert first == fingerprint("a", "b") == fingerprint("a", "device=cuda", "b")
    assert len({first, fingerprint("a"), fingerprint("ab"), fingerprint("a", "b", "")}) == 4
    file.touch()
    for noise in ("log.txt", "provenance.json", "checkpoint-5/model.safetensors"):
        (folder / noise).write_text("other")
    assert fingerprint("a", "b") == first
    seen = {first}
    for path, text in (
        (file, "2"),
        (recipe, "a: 2"),
        (folder / "model.safetensors", "other"),
        (folder / "config.json", "{}"),
        (folder / "deep.yaml", "a: 1"),
    ):
        path.write_text(text)
        seen.add(fingerprint("a", "b"))
    assert len(seen) == 6
    (folder / "deep.yaml").rename(folder / "renamed.yaml")
    assert fingerprint("a", "b") not in seen
    assert content_digest(tmp_path / "nowhere") == content_digest(tmp_path / "neither")


def test_values_of_a_command_may_contain_spaces_and_be_several_words():
    values = {"out": Path("/my runs/x"), "more": ["a=1", "b=[1, 2]"], "none": []}
    assert words("dcar train out={out}/car {more} {none}", values) == [
        *("dcar", "train", "out=/my runs/x/car", "a=1", "b=[1, 2]")
    ]


# --- failures, signals and kills ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "code", "message", "finished"),
    [
        ("d", "raise SystemExit(7)", "job d .*status 7.*above", "abc"),
        ("c", "print('cause', file=sys.stderr); sys.exit(1)", "job c .*status 1.*c.log", "a"),
        ("a", "pass", "a ended without writing .*a.json", ""),
    ],
)
def test_a_failing_job_is_named_and_the_finished_ones_stay(chain, job, code, message, finished):
    chain.code[job] = code
    with pytest.raises(DCARError, match=message):
        chain.run()
    assert set(finished) <= set(chain.finished) and job not in chain.finished
    if job == "c":
        assert (chain.out / "c.log").read_text() == "cause\n"
    chain.code[job] = COPY
    chain.run()
    assert chain.finished == "abcd"
    assert all(chain.counts["abcd".index(name)] == "1" for name in finished)


@pytest.mark.parametrize("failing", "bc")
def test_a_job_that_failed_takes_its_neighbour_down(chain, failing):
    chain.code |= dict.fromkeys("bc", WAIT) | {failing: "raise SystemExit(1)"}
    begun = time.monotonic()
    with pytest.raises(DCARError, match=f"job {failing} .*status 1"):
        chain.run()
    assert time.monotonic() - begun < 30


def test_jobs_of_a_group_run_at_the_same_time(chain):
    """Each waits for the other's mark: one after the other they would never end."""
    meet = (
        "import os, time; s, t, log = sys.argv[2:5]; open(log, 'w').write('x'); "
        "end = time.time() + 30\n"
        "while not os.path.exists(log[:-7] + {other!r} + '.count') and time.time() < end: "
        "time.sleep(0.01)\n"
        "assert time.time() < end; open(t, 'w').write('met')"
    )
    chain.code |= {"b": meet.format(other="c"), "c": meet.format(other="b")}
    chain.run()
    assert chain.path("b").read_text() == chain.path("c").read_text() == "met"


@pytest.mark.parametrize("status", [75, 130])
def test_a_job_that_was_stopped_stops_the_pipeline_with_its_status(chain, status):
    chain.code["d"] = f"sys.exit({status})"
    with pytest.raises(StoppedError, match="job d") as caught:
        chain.run()
    assert caught.value.status == status and chain.finished == "abc"


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_reaches_the_running_jobs_and_the_handlers_are_restored(chain, sent, status):
    """Both jobs end by their own handlers; the first sends the signal to the runner, and, as a
    terminal does, SIGINT to both jobs."""
    mark = chain.folder / "pid"
    chain.code["c"] = (
        f"import os, signal; signal.signal({sent}, lambda *_: sys.exit({status})); "
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
        f"open({str(mark)!r}, 'w').write(str(os.getpid())); {WAIT}"
    )
    chain.code["b"] = (
        f"import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"while not (os.path.exists({str(mark)!r}) and open({str(mark)!r}).read()): "
        f"time.sleep(0.01)\n"
        f"os.kill(os.getppid(), {int(sent)})\n"
        f"if {sent == signal.SIGINT}:\n"
        f"    os.kill(int(open({str(mark)!r}).read()), 2); sys.exit(130)\n{WAIT}"
    )
    before, begun = signal.getsignal(sent), time.monotonic()
    with pytest.raises(StoppedError, match="job [bc]") as caught:
        chain.run()
    assert caught.value.status == status and time.monotonic() - begun < 30
    assert chain.finished == "a" and signal.getsignal(sent) == before


def test_a_killed_runner_continues_with_the_job_that_was_running(chain):
    """SIGKILL, while b and c run: a is not run again, and d runs once."""
    script = chain.folder / "runner.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom test_pipeline import Chain\n"
        "chain = Chain.__new__(Chain)\nchain.__dict__ |= dict(folder=Path(sys.argv[1]), "
        "out=Path(sys.argv[1]) / 'out', source=Path(sys.argv[1]) / 'source.json', "
        f"settings=[], checkpoints=None, code={chain.code | {'b': WAIT}!r})\nchain.run()\n"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "launch", ROOT / "tests" / "toys")))
    runner = subprocess.Popen(
        [sys.executable, script, chain.folder], env={**os.environ, "PYTHONPATH": path}
    )
    end = time.monotonic() + 120
    while not chain.path("c").exists() and time.monotonic() < end:
        time.sleep(0.05)
    runner.kill()
    assert runner.wait() == -signal.SIGKILL and chain.finished == "a"
    chain.run()
    assert chain.finished == "abcd"
    assert chain.counts[0] == chain.counts[1] == chain.counts[3] == "1"
