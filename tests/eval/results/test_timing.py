"""What is inside the clock of a comparison: everything that a method needs, and no capture of a
graph."""

from dataclasses import replace

import pytest
from compare_worker import SHORT, made_timing, tiny_tools

import dcar.decoding.engine as engine
import eval.results.timing as timing
from dcar.methods import make_methods

METHODS = ["car-1", "car-3", "dcar-sampled", "sd"]


@pytest.fixture
def clock(monkeypatch):
    """What was spoken in order: (utterance, method, graphs captured meanwhile)."""
    spoken, captured, measure = [], [], timing._measure

    class Counted(engine.StepGraphs):
        """Captures nothing: a key counts as a graph when it is first asked for."""

        def __init__(self, enabled, device):
            super().__init__(enabled, device)
            self.enabled = True

        def run(self, key, step, save=None):
            if key not in self._graphs:
                self._graphs[key] = None
                captured.append(key)
            step()

    def watched(vocoder, entry, item, *more):
        before = len(captured)
        record = measure(vocoder, entry, item, *more)
        spoken.append((item.utterance_id, entry.name, len(captured) - before))
        return record

    monkeypatch.setattr(engine, "StepGraphs", Counted)
    monkeypatch.setattr(timing, "_measure", watched)
    return spoken


def timed(tools, out, process=0, processes=1):
    entries = make_methods(METHODS, tools.models, SHORT)
    asked = (tools.vocoder, entries, 0, out)
    timing.time_methods(tools.items, *asked, process=process, processes=processes)
    return timing.read_timings(tools.items, entries, 0, out, processes=processes)


def test_no_graph_is_captured_inside_the_clock(tmp_path, clock, monkeypatch):
    """The first utterance alone does not meet every shape: later ones have other texts and
    lengths."""
    monkeypatch.setattr(engine, "COLUMN_BLOCK", 8)
    monkeypatch.setattr(timing, "on_gpu", lambda entry: True)
    tools = tiny_tools()
    records = timed(tools, tmp_path)
    assert len(records) == 24 and len(clock) == 4 + 2 * 24
    first, second = clock[4::2], clock[5::2]
    assert (
        [c[:2] for c in first] == [c[:2] for c in second] == [spoken[:2] for spoken in clock[5::2]]
    )
    assert {spoken[:2] for spoken in first} == {(t.id, t.method) for t in records}
    assert sum(c[2] for c in first) > 0 and sum(c[2] for c in second) == 0
    assert timing.speed_of(records, "dcar-sampled").lm_rtf > 0


def test_the_cpu_warms_up_once(tmp_path, clock):
    tools = tiny_tools()
    records = timed(tools, tmp_path)
    assert len(records) == 24 and len(clock) == 4 + 24


def test_two_processes_time_utterances_of_their_own(tmp_path, clock):
    tools = tiny_tools()
    assert len(timed(tools, tmp_path, 0, 2)) == 12 and len(clock) == 4 + 12
    assert len(timed(tools, tmp_path, 1, 2)) == 24
    one, two = ({name for name, _, _ in clock[i * 16 :][:16]} for i in (0, 1))
    assert not one & two and one | two == {item.utterance_id for item in tools.items}
    assert len(timed(tools, tmp_path, 1, 2)) == 24 and len(clock) == 32  # nothing is timed again


def test_times_of_another_prompt_or_device_are_not_used_again(tmp_path, monkeypatch):
    tools, asked = tiny_tools(), []
    entries = make_methods(METHODS, tools.models, SHORT)

    def measured(vocoder, entry, item, seed, of):
        asked.append(item.utterance_id)
        return made_timing(entry.name, item.utterance_id, len(asked), of=of)

    def found():
        asked.clear()
        timing.time_methods(tools.items, tools.vocoder, entries, 0, tmp_path)
        times = timing.read_timings(tools.items, entries, 0, tmp_path)
        return {(t.id, t.method): t.lm for t in times}

    monkeypatch.setattr(timing, "_measure", measured)
    first = found()
    assert len(asked) == 4 + 24  # warm-up, and six utterances by four methods
    assert found() == first and not asked
    tools.items[3] = replace(tools.items[3], prompt_ids=(1, 2))
    assert {key for key, _ in found().items() - first.items()} == {("utt<3>", m) for m in METHODS}
    assert asked == 8 * ["utt<3>"]
    monkeypatch.setattr(timing, "on_gpu", lambda entry: False)
    tools.models.decoder.to("meta")
    assert len(found()) == 24 and len(asked) == 4 + 24


def test_speedup_is_the_quotient_of_the_times_in_the_table():
    times = [
        made_timing(
            m,
            str(i),
            lm,
            vocoder=1.0,
            audio=2.0,
            tokens=9,
            first_audio=None if m == "far" else lm / 100,
        )
        for m, values in (("far", (4, 6, 100)), ("car-2", (2, 2, 4)))
        for i, lm in enumerate(values)
    ]
    far, car = timing.speed_of(times, "far"), timing.speed_of(times, "car-2")
    assert (far.rtf, car.rtf) == (3.5, 1.5)
    assert (far.first_audio, car.first_audio) == (None, 0.02)
    gain = timing.speedup(times, "car-2", "far")
    assert (gain.total, gain.lm, gain.baseline) == (3.5 / 1.5, 3, "far")
    assert gain.quartiles == pytest.approx([2.0, 11.2667], abs=1e-3)  # of 5/3, 7/3, 101/5
    assert timing.speedup(times, "car-2", "car-1") is timing.speed_of(times, "car-1") is None
