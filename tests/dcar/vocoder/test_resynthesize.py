"""Training speech for the reward recogniser: a split as the vocoder says it, a corpus of its
own."""

import json
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
import torch
from tiny_corpora import toy_prepare, toy_settings, write_manifest
from tiny_data import ToyTokenizer, tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder

from dcar.corpus.read import load_corpus
from dcar.errors import CheckpointError
from dcar.prepare.prepared import load_prepared, load_split
from dcar.prompts.items import make_prompts
from dcar.prompts.load import vocoder_for
from dcar.vocoder.load import load_vocoder
from dcar.vocoder.resynthesize import ResynthesizeConfig, run


@pytest.fixture
def settings(tmp_path) -> dict[str, str]:
    """A prepared corpus and a vocoder for it."""
    tiny_vocoder().save_pretrained(tmp_path / "vocoder")
    data = write_prepared(tmp_path / "data", train=5)
    return dict(data=str(data), vocoder=str(tmp_path / "vocoder"), out=str(tmp_path / "out"))


def change_rate(data: Path) -> None:
    info = json.loads((data / "prepared.json").read_text())
    info["tokenizer"]["rate_hz"] = 25.0
    (data / "prepared.json").write_text(json.dumps(info))


def test_the_result_is_a_corpus_of_what_the_vocoder_says(settings, tmp_path):
    manifest = run(ResynthesizeConfig(**settings, split="train", batch_size=2))
    said = {u.id: u for u in load_corpus("jsonl", manifest, "train")}
    prepared = {row["id"]: row for row in load_prepared(settings["data"], "train")}
    assert said.keys() == prepared.keys()
    vocoder = load_vocoder(settings["vocoder"])
    for name, row in prepared.items():
        assert (said[name].text, said[name].speaker) == (row["text"], row["speaker"])
        wave, rate = said[name].load()
        [own] = vocoder.synthesize([row["speech"]], np.asarray([row["voice"]], np.float32))
        assert rate == vocoder.sample_rate and len(wave) == rate // 50 * len(row["speech"])
        assert np.abs(wave - own).max() < 1e-4
    settings["out"] = str(tmp_path / "other")
    other = run(ResynthesizeConfig(**settings, split="train", other_voices=True, limit=4))
    others = load_corpus("jsonl", other)
    assert len(others) == 4
    assert not all(np.array_equal(u.load()[0], said[u.id].load()[0]) for u in others)


def test_a_gpu_speaks_the_same_in_whole_batches(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("dcar.vocoder.streaming.product_type", lambda: torch.float32)
    here = load_corpus("jsonl", run(ResynthesizeConfig(**settings, device="cpu")))
    settings["out"] = str(tmp_path / "there")
    monkeypatch.setattr("dcar.vocoder.resynthesize.own_device", lambda _: "cuda:0")
    with fake_gpu.fake_gpu(monkeypatch):
        manifest = run(ResynthesizeConfig(**settings, device="cuda", batch_size=3))
        waves = [shape for shape in fake_gpu.reads if len(shape) == 2]
    assert [shape[0] for shape in waves] == [3, 2]
    for one, other in zip(here, load_corpus("jsonl", manifest), strict=True):
        np.testing.assert_allclose(one.load()[0], other.load()[0], atol=1e-4)


def test_tokens_of_another_rate_or_tokenizer_are_refused(settings, tmp_path):
    change_rate(tmp_path / "data")
    with pytest.raises(CheckpointError, match="vocoder .*50 .*tiny .*25"):
        run(ResynthesizeConfig(**settings))
    card = tmp_path / "vocoder" / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "tokenizer_checksum": "another"}))
    with pytest.raises(CheckpointError, match="vocoder .*another.*abc"):
        run(ResynthesizeConfig(**settings))


class TwelveCodes(ToyTokenizer):
    vocab_size = 12


def buzzes(tmp_path, count: int, split: str) -> list[np.ndarray]:
    """A corpus of low buzzes, prepared in tmp_path / "p"; returns them."""
    waves = [
        (0.3 * np.sign(np.sin(np.arange(24_000 + 2400 * i) / 25))).astype(np.float32)
        for i in range(count)
    ]
    manifest = write_manifest(tmp_path, count * [{"split": split}], waves, 24_000)
    settings = toy_settings(manifest, tmp_path / "p", corpus="jsonl", splits=(split,))
    toy_prepare(settings, TwelveCodes())
    return waves


def test_stage_two_hands_prompts_to_a_vocoder_that_hears_them(tmp_path, monkeypatch):
    """CosyVoice's vocoder in a DCPO recipe once stopped for want of them. Other rates are
    refused here as well."""
    waves = buzzes(tmp_path, 2, "dev")
    data = str(tmp_path / "p")
    base = tiny_decoder(text_vocab_size=64)
    given = []
    items = make_prompts(load_split(data, "dev"), 10, 0)
    monkeypatch.setattr(
        "dcar.prompts.load.load_vocoder",
        lambda spec, device, prompts: given.append(prompts) or tiny_vocoder(),
    )
    vocoder_for(base, data, items, "cosyvoice:folder")
    wave, rate = given[0](items[0].speaker_embedding)
    assert rate == 24_000 and len(wave) == len(waves[int(items[0].prompt_utterance_id[1:])])
    vocoder_for(base, data, items, "starter")
    assert given[1] is None
    change_rate(tmp_path / "p")
    with pytest.raises(CheckpointError, match="vocoder .*50 .*toy .*25"):
        vocoder_for(base, data, items, "starter")
