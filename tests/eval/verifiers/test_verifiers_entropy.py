"""Entropy chunking, and the statistics that thresholds, trees and transitions come from."""

import json

import pytest
import torch
from tiny_backbones import tiny_backbone, tiny_prompts
from tiny_data import CODES
from tiny_decoders import states, tiny_decoder
from tiny_verifiers import tiny_statistics

from dcar.decoding import FixedChunk, decode
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.methods import Models, load_models, make_methods
from dcar.model.load import load_decoder
from dcar.model.statistics import INFO, TENSORS, VerifierStatistics
from dcar.prompts.load import load_prompts
from dcar.sampling import SamplingConfig, warp
from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from eval.analysis import fit_verifiers as fitting

SAMPLING = SamplingConfig(max_tokens=60, max_tokens_per_text_unit=6)


def test_command_writes_and_shows(files, capsys):
    fitting.main(
        [
            f"decoder={files / 'decoder'}",
            f"data={files / 'data'}",
            f"out={files / 'again'}",
            "prompt_tokens=5",
            "thresholds=6",
            "ranks=4",
            "max_tokens=40",
            "min_tokens=20",
        ]
    )
    shown = capsys.readouterr().out
    assert "head 4:" in shown
    one, two = (VerifierStatistics.from_pretrained(files / name) for name in ("stats", "again"))
    assert one.checksum() == two.checksum()  # the same run again gives the same numbers
    assert one.info["sampling"]["max_tokens"] == 40 and one.info["provenance"]["split"] == "dev"
    assert (files / "stats" / "config.yaml").exists()


def test_decoders_on_language_models_are_fitted_alike(files, tmp_path, capsys):
    """The statistics of a backbone serve its methods."""
    model = tiny_backbone(tokenizer="tiny@abc", phonemes=PHONEME_VERSION)
    model.save_pretrained(tmp_path / "decoder")
    arguments = [f"decoder={tmp_path / 'decoder'}", f"data={files / 'data'}", "prompt_tokens=5"]
    fitting.main(
        [
            *arguments,
            f"out={tmp_path / 'stats'}",
            "thresholds=3",
            "ranks=4",
            "max_tokens=20",
        ]
    )
    assert "head 4:" in capsys.readouterr().out
    models = load_models(str(tmp_path / "decoder"), "", [], statistics=str(tmp_path / "stats"))
    names = ["vadusa-2", "mtp-viterbi-3", "entropy@2"]
    for entry in make_methods(names, models):
        spoken = decode(entry.decoder, tiny_prompts(), entry.method, SamplingConfig(max_tokens=20))
        assert sum(len(r.tokens) for r in spoken) > 0


def test_bigrams_are_those_of_the_training_split(files):
    found = VerifierStatistics.from_pretrained(files / "stats")
    previous, following = found.bigram_keys // found.states, found.bigram_keys % found.states
    codes = (previous < CODES) & (following < CODES)
    assert (following[codes] == (previous[codes] + 1) % CODES).all()  # speech that counts up
    assert int(found.bigram_counts[following == CODES].sum()) == 6  # six utterances end …
    assert int(found.bigram_counts[previous == CODES + 1].sum()) == 6  # … and begin


def test_rank_accuracy_equals_its_definition(files):
    """By loops over utterances, positions, heads and ranks."""
    found = VerifierStatistics.from_pretrained(files / "stats")
    model = load_decoder(files / "decoder")
    items = load_prompts(files / "data", "dev", model, 5, 0)
    sampling = SamplingConfig(max_tokens=40, min_tokens=20)
    for depth in (1, 2, 3):
        hits = []
        for item in items:
            hidden = states(model, item, item.reference_tokens)[len(item.prompt_ids) :]
            for t in range(len(hidden) - depth):
                ids = model.heads.logits(hidden[t], depth + 1)[-1].argsort(descending=True)[:4]
                hits.append(warp(model.heads.logits(hidden[t + depth], 1)[-1], sampling)[ids])
        assert torch.allclose(found.rank_accuracy[depth - 1], torch.stack(hits).mean(0), atol=1e-5)


def test_teacher_forcing_yields_the_states_of_decoding(files):
    model = load_decoder(files / "decoder")
    items = load_prompts(files / "data", "dev", model, 5, 0)
    for hidden, item in zip(fitting.teacher_forced(model, items, 2), items, strict=True):
        assert len(hidden) == len(item.reference_tokens) + 1
    spoken = decode(model, [items[0]], FixedChunk(2), SAMPLING, record_hidden=True)[0]
    items[0].reference_tokens[:] = spoken.tokens
    hidden = next(iter(fitting.teacher_forced(model, items, 2)))
    wanted = spoken.hidden[spoken.prompt_length - 1 :]
    assert torch.allclose(hidden[: len(wanted)], wanted, atol=1e-5)


def test_a_wished_length_is_met_on_the_data_it_was_fitted_on(files, tmp_path):
    """The threshold fitted for so many tokens a pass gives about that many. Between the fitted
    thresholds lengths are interpolated, and those of a random decoder jump, so there are many."""
    fitting.main(
        [
            f"decoder={files / 'decoder'}",
            f"data={files / 'data'}",
            f"out={tmp_path / 'stats'}",
            "prompt_tokens=5",
            "thresholds=24",
            "max_tokens=40",
            "min_tokens=20",
        ]
    )
    models = load_models(str(files / "decoder"), "", [], statistics=str(tmp_path / "stats"))
    items = load_prompts(files / "data", "dev", models.decoder, 5, 0)
    sampling = SamplingConfig(max_tokens=40, min_tokens=20)
    met = []
    for wish in (1.5, 2.2, 3.0):
        (entry,) = make_methods([f"entropy@{wish}"], models)
        results = decode(entry.decoder, items, entry.method, sampling)
        met.append(sum(len(r.tokens) for r in results) / sum(r.passes for r in results))
    assert met == pytest.approx([1.5, 2.2, 3.0], abs=0.3)
    curve = models.statistics.entropy_lengths
    assert float(curve[0]) == pytest.approx(1.0, abs=0.06) and float(curve[-1]) > 3.2


def test_threshold_by_interpolation():
    found = tiny_statistics()
    assert [found.threshold_for(n) for n in (1.0, 1.5, 2.0, 3.0, 4.0)] == pytest.approx(
        [0.0, 0.5, 1.0, 2.5, 3.0]
    )
    for wrong in (0.5, 4.1):
        with pytest.raises(ConfigError, match=f"{wrong} .*1.00 to 4.00"):
            found.threshold_for(wrong)


def test_saved_statistics_are_loaded_strictly(tmp_path):
    found = tiny_statistics()
    found.save_pretrained(tmp_path)
    loaded = VerifierStatistics.from_pretrained(tmp_path)
    assert loaded.checksum() == found.checksum() and (loaded.decoder, loaded.states) == (
        found.decoder,
        14,
    )
    with pytest.raises(CheckpointError, match="nowhere: .*dcar fit-verifiers"):
        VerifierStatistics.from_pretrained(tmp_path / "nowhere")
    about = json.loads((tmp_path / INFO).read_text())
    (tmp_path / INFO).write_text(json.dumps({**about, "tensors": "0" * 64}))
    with pytest.raises(CheckpointError, match="statistics.safetensors .*statistics.json"):
        VerifierStatistics.from_pretrained(tmp_path)
    (tmp_path / INFO).write_text(json.dumps({**about, "format_version": 0}))
    with pytest.raises(
        CheckpointError, match="statistics.json: .*version 0.* 1; .*`dcar fit-verifiers"
    ):
        VerifierStatistics.from_pretrained(tmp_path)
    (tmp_path / INFO).write_text(json.dumps(about))
    (tmp_path / TENSORS).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: .*header"):
        VerifierStatistics.from_pretrained(tmp_path)


def test_statistics_of_another_decoder_are_refused(files):
    with pytest.raises(CheckpointError, match="statistics .*'tiny@abc'.*`dcar fit-verifiers`"):
        Models(tiny_decoder(seed=1), statistics=VerifierStatistics.from_pretrained(files / "stats"))


def test_wrong_settings_of_the_fit(files, tmp_path):
    with pytest.raises(ConfigError, match="thresholds "):
        fitting.main(["thresholds=1"])
    tiny_decoder(
        heads=1, text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="tiny@abc", phonemes=PHONEME_VERSION
    ).save_pretrained(tmp_path / "far")
    with pytest.raises(ConfigError, match="heads"):
        fitting.main([f"decoder={tmp_path / 'far'}", f"data={files / 'data'}", f"out={tmp_path}"])
    tiny_decoder(tokenizer="other@1").save_pretrained(tmp_path / "foreign")
    with pytest.raises(DataError, match="data: .*tiny@abc.*other@1"):
        fitting.main(
            [f"decoder={tmp_path / 'foreign'}", f"data={files / 'data'}", f"out={tmp_path}"]
        )
