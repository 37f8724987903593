"""Lengths of what methods speak against the recordings': counted rule-based, and the command."""

from __future__ import annotations

import pytest
from tiny_decoders import tiny_decoder

from dcar.decoding import decode
from dcar.errors import ConfigError
from dcar.prompts.load import load_prompts
from dcar.sampling import SamplingConfig
from eval.analysis import durations
from eval.methods.registry import Models, make_methods

SAMPLING = SamplingConfig(max_tokens=25, max_tokens_per_text_unit=10)


def test_lengths_are_those_of_what_is_spoken(files):
    decoder = tiny_decoder()
    items = load_prompts(str(files / "data"), "dev", decoder, 5, 0)
    (entry,) = make_methods(["sd"], Models(decoder), SAMPLING)
    row = durations.lengths(entry, items, [0, 1], batch_size=2)
    spoken = [r for seed in (0, 1) for r in decode(decoder, [i.prompt for i in items], entry.build(), SAMPLING,
                                                   seed=seed)]
    recorded = 2 * sum(len(i.reference_tokens) for i in items)
    assert row.length.value == pytest.approx(sum(len(r.tokens) for r in spoken) / recorded)
    assert row.truncated == sum(r.truncated for r in spoken) / len(spoken)
    assert row.accepted == sum(r.accepted for r in spoken) / sum(r.proposed for r in spoken)


def test_the_command_prints_a_table(files, capsys):
    arguments = [f"decoder={files / 'decoder'}", f"data={files / 'data'}", "prompt_tokens=5", "sampling.max_tokens=20"]
    durations.main([*arguments, "methods=[car-1,ssd-0.4-eos]", "seeds=[0]", "utterances=3"])
    head, plain, tolerant = capsys.readouterr().out.splitlines()
    assert "recording's" in head and plain.split()[0] == "car-1" and plain.split()[-1] == "–"
    assert tolerant.split()[0] == "ssd-0.4-eos" and 0 <= float(tolerant.split()[-1]) <= 100
    with pytest.raises(ConfigError, match="data is not set"):
        durations.main(["decoder=x"])
    with pytest.raises(ConfigError, match="need seeds"):
        durations.main(["seeds=[]"])
