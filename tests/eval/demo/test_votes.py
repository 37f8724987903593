"""Blind votes: shuffled and counted by setting, appended whole, with the p value of a coin; the buttons that cast
them."""

import json
import random
import threading
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest

from dcar.errors import ConfigError, DataError
from eval.demo.votes import Setting, Tally, Trial, Votes, pairing, shuffled, summary, tallies, voting

A, B = Setting("car-5", 0.4), Setting("dcar", 0.8)


class Shown(Exception):
    """Stands for gradio.Error."""


def test_the_order_is_drawn_and_the_seed_too():
    trials = [shuffled("Yes.", "x", A, B, random.Random(i)) for i in range(200)]
    assert 60 < sum(t.first == A for t in trials) < 140
    assert all({t.first, t.second} == {A, B} for t in trials) and len({t.seed for t in trials}) == 200
    with pytest.raises(ConfigError, match="both sides are car-5 at 0.4"):
        shuffled("Yes.", "x", A, A)


def test_p_is_the_exact_binomial_one():
    for mine, yours in ((0, 0), (3, 3), (5, 0), (9, 2), (1, 7)):
        n, k = mine + yours, max(mine, yours)
        exact = min(1.0, 2 * sum(comb(n, i) for i in range(k, n + 1)) / 2**n)
        assert Tally(A, B, mine, yours, 4).p == pytest.approx(exact)


def test_votes_are_appended_with_all_that_made_the_sounds(tmp_path):
    votes = Votes(tmp_path / "new")
    assert votes.read() == [] and summary(tallies(votes.read())) == "No votes yet."
    votes.add(Trial("Yes.", "recording", 7, B, A), "first")
    votes.add(Trial("No.", "x", 8, A, B), "second")
    votes.add(Trial("No.", "x", 9, A, B), "none")
    votes.add(Trial("No.", "x", 9, A, B), "first")
    first, *_ = (json.loads(line) for line in votes.path.read_text().splitlines())
    assert first.pop("time") > 1e9
    assert first == {"choice": "first", "preferred": {"method": "dcar", "temperature": 0.8}, "text": "Yes.",
                     "voice": "recording", "seed": 7, "first": {"method": "dcar", "temperature": 0.8},
                     "second": {"method": "car-5", "temperature": 0.4}}
    assert tallies(votes.read()) == [Tally(A, B, 1, 2, 1)]
    assert "| car-5 at 0.4<br>dcar at 0.8 | 1<br>2 | 1 | 1.000 |" in summary(tallies(votes.read()))
    with pytest.raises(ConfigError, match="first, none, second"):
        votes.add(Trial("No.", "x", 9, A, B), "both")


def test_many_at_once_lose_no_vote(tmp_path):
    pages = [Votes(tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=lambda v=v: [v.add(Trial("word " * 100, "x", i, A, B), "first")
                                                    for i in range(25)]) for v in pages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert tallies(Votes(tmp_path).read()) == [Tally(A, B, 100, 0, 0)]


def test_a_line_that_was_cut_off_is_left_out_and_a_broken_one_is_named(tmp_path):
    votes = Votes(tmp_path)
    votes.add(Trial("Yes.", "x", 1, A, B), "first")
    whole = votes.path.read_text()
    votes.path.write_text(whole + whole[:40])
    assert len(votes.read()) == 1
    votes.path.write_text("{}\n" + whole)
    with pytest.raises(DataError, match=r"votes\.jsonl:1: not a vote"):
        votes.read()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="give another folder as votes"):
        Votes(tmp_path / "file").add(Trial("Yes.", "x", 1, A, B), "first")


def test_a_pair_counts_once_and_is_named_only_then(tmp_path):
    votes = Votes(tmp_path)
    trial = Trial("Yes.", "x", 1, B, A)
    left, message, table = voting(votes, "second", Shown)(trial)
    assert left is None and message == "Counted. First: **dcar at 0.8**. Second: **car-5 at 0.4**."
    assert "| car-5 at 0.4<br>dcar at 0.8 | 1<br>0 | 0 |" in table
    assert "Nothing to vote on" in voting(votes, "second", Shown)(None)[1]
    assert tallies(votes.read()) == [Tally(A, B, 1, 0, 0)]


def test_what_is_wrong_with_a_pair_is_shown():
    class Studio:
        def speak(self, *given, **more):
            raise ConfigError("no such voice in kept/a.wav")

    with pytest.raises(Shown, match="both sides are"):
        pairing(Studio(), Shown)("Yes.", "x", None, "car-5", 0.8, 0.0, "car-5", 0.8, 1.0)  # which has no dial
    with pytest.raises(Shown, match="no such voice in a.wav"):
        pairing(Studio(), Shown)("Yes.", "x", "kept/a.wav", "dcar", 0.8, 0.0, "far", 0.8, 0.0)


def test_a_dial_makes_another_setting():
    class Studio:
        def speak(self, text, voice, recording, method, temperature, seed):
            heard.append(method)
            return SimpleNamespace(spoken=SimpleNamespace(rate=24_000, wave=np.zeros(10, np.float32)))

    heard: list[str] = []
    *_, trial, _ = pairing(Studio(), Shown)("Yes.", "x", None, "dcar", 0.8, 0.5, "dcar", 0.8, 0.0)
    assert sorted(heard) == ["dcar", "dcar@d0.5"] and {trial.first.method, trial.second.method} == set(heard)
