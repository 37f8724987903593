"""Recognisers: NeMo CTC on a tiny model made here, the packaged ones on real files, speaker embeddings."""

import importlib.util
import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_nemo import save_ctc, save_transducer
from tones import noise

from dcar.audio import load_audio, save_audio
from dcar.errors import AssetError, AudioError, ConfigError, DataError, TextError
from dcar.prompts.load import corpus_recordings
from dcar.recognition.base import Recognizer
from dcar.recognition.ctc import viterbi
from dcar.recognition.load import load_recognizer
from dcar.recognition.manifest import CHARACTERS, Recording, load_manifest
from dcar.recognition.nemo import NemoCTCRecognizer, quiet_nemo
from dcar.recognition.pretrained import MoonshineRecognizer
from dcar.recognition.train import Batches, TrainRecognizerConfig, run
from dcar.sources.shipped import ASSETS
from dcar.text.wer import spoken_words
from dcar.voices.encoder import SpeakerEncoder


def spoken_sample() -> tuple[np.ndarray, int]:
    """The short recording of a man reading Beckett that ships inside useful-moonshine-onnx."""
    return load_audio(Path(importlib.util.find_spec("moonshine_onnx").origin).parent / "assets" / "beckett.wav")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """Six rows: three flac files and three arrays of one npz at another rate."""
    folder = tmp_path_factory.mktemp("speech")
    rows = []
    for i in range(3):
        save_audio(folder / f"{i}.flac", noise(1.0 + i / 4, i), 16_000)
        rows.append({"audio": f"{i}.flac", "text": f"Take {i} boats."})
    waves = {f"u{i}": (noise(1.2, 10 + i, 24_000) * 32767).astype(np.int16) for i in range(3)}
    np.savez(folder / "waves.npz", sample_rate=24_000, **waves)
    rows += [{"audio": "waves.npz", "key": key, "text": "it's grey"} for key in waves]
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A tiny model of NeMo, as one that others trained."""
    return save_ctc(tmp_path_factory.mktemp("published") / "first.nemo")


@pytest.fixture(scope="module", params=["ctc", "transducer"])
def tuned(request, manifest, published, tmp_path_factory) -> tuple[Path, Path, dict[str, Any]]:
    """What a fine-tuning of three steps started from, what it left, and its metrics."""
    folder = tmp_path_factory.mktemp(request.param)
    start = published if request.param == "ctc" else save_transducer(folder.parent / "first-transducer.nemo")
    config = TrainRecognizerConfig(str(manifest), str(manifest), str(folder / "tiny.nemo"), init_from=str(start),
                                   max_steps=3, batch_seconds=4, eval_minutes=0, device="cpu", learning_rate=1e-2)
    return start, folder / "tiny.nemo", run(config)


@pytest.fixture(scope="module")
def nemo(published) -> NemoCTCRecognizer:
    recognizer = load_recognizer(f"nemo:{published}")
    assert isinstance(recognizer, NemoCTCRecognizer) and recognizer.name == "nemo-ctc:first"
    return recognizer


def test_fine_tuning_goes_on_from_the_weights_and_writes_model_card_and_metrics(tuned):
    start, output, metrics = tuned
    assert sorted(p.name for p in output.parent.iterdir()) == ["tiny.json", "tiny.md", "tiny.nemo"]
    assert metrics["steps"] == 3 and len(metrics["log"]) == 3 and metrics["dev_reference_words"] == 18
    assert all(np.isfinite(record["loss"]) for record in metrics["log"])
    card = output.with_suffix(".md").read_text()
    assert "WER on the dev set" in card and f"Fine-tuned from `{start.name}` by" in card
    assert json.loads(output.with_suffix(".json").read_text())["config"]["max_steps"] == 3
    before, after = (load_recognizer(f"nemo:{path}")._model for path in (start, output))  # type: ignore[attr-defined]
    assert {p.dtype for p in after.parameters()} == {torch.float32}  # stored in half precision
    moved = [float((b - a).detach().abs().max()) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert max(moved) > 1e-3 and max(moved) < 0.2  # three steps of at most 0.01 each, from these very weights


def test_nemo_takes_any_rate_and_batching_changes_nothing(nemo):
    assert isinstance(nemo, Recognizer)
    waves = [noise(s, i) for i, s in enumerate((0.7, 2.0, 0.05, 1.1))]
    texts = nemo.transcribe(waves, 16_000)
    assert len(texts) == 4 and all(isinstance(t, str) and set(t) <= set(CHARACTERS) for t in texts)
    together = dict(nemo._log_probs(waves, 16_000))
    for i, wave in enumerate(waves):
        torch.testing.assert_close(dict(nemo._log_probs([wave], 16_000))[0], together[i], atol=1e-4, rtol=1e-4)
    assert len(nemo.transcribe([noise(0.5, 3, 24_000)], 24_000)) == 1
    assert nemo.transcribe([], 16_000) == []


def test_greedy_decoding_collapses_repeats_and_blanks(nemo, monkeypatch):
    blank = len(CHARACTERS)
    a, b = CHARACTERS.index("a"), CHARACTERS.index("b")
    for frames, text in (([a, a, blank, a, b, b], "aab"), ([blank, blank], ""), ([a, 0, 0, b, 0], "a b")):
        log_probs = torch.nn.functional.one_hot(torch.tensor(frames), blank + 1).float()
        monkeypatch.setattr(nemo, "_log_probs", lambda waves, rate, lp=log_probs: iter([(0, lp)]))
        assert nemo.transcribe([noise(1, 0)], 16_000) == [text]


def test_alignments_are_those_of_nemo():
    with quiet_nemo():
        from nemo.collections.asr.parts.utils.aligner_utils import viterbi_decoding
    rng, blank = np.random.default_rng(0), len(CHARACTERS)
    for seed, (frames, length) in enumerate([(60, 20), (90, 35), (60, 45)]):
        logits = torch.randn(frames, blank + 1, generator=torch.Generator().manual_seed(seed))
        log_probs, target = torch.log_softmax(2 * logits, -1), rng.integers(0, blank, length)
        states = torch.full((1, 2 * length + 1), blank)
        states[0, 1::2] = torch.from_numpy(target)
        [path] = viterbi_decoding(log_probs[None], states, torch.tensor([frames]), torch.tensor([2 * length + 1]),
                                  torch.device("cpu"))
        _, units = viterbi(log_probs.numpy(), target, blank)
        assert units.tolist() == (np.maximum(np.array(path) - 1, 0) // 2).tolist()


def test_texts_are_aligned_by_the_pass_that_scores_them(nemo):
    waves, texts = [noise(1.5, 1), noise(0.2, 0), noise(1.0, 0)], ["It’s grey!", "far too many words", "take 2 boats"]
    scores = nemo.log_likelihood(waves, 16_000, texts)
    for found, score, text, wave in zip(nemo.align(waves, 16_000, texts), scores, texts, waves, strict=True):
        assert found.log_likelihood == score and found.characters == len(found.costs) == len(spoken_words(text))
        frames = len(dict(nemo._log_probs([wave], 16_000))[0])
        assert len(found.units) == frames and (np.diff(found.units) >= 0).all()
        if text.startswith("far"):
            assert np.isinf(found.costs).all() and score == -np.inf
        else:  # one path is less likely than all together
            assert -found.costs.sum() / found.characters < score and set(found.units) == set(range(len(found.costs)))
    with pytest.raises(TextError, match="no words"):
        nemo.align(waves[:1], 16_000, ["?!"])


def test_missing_or_broken_models_name_the_way_out(tmp_path):
    (tmp_path / "broken.nemo").write_bytes(b"not a tar file")
    for name, message in ((f"nemo:{tmp_path / 'absent.nemo'}", "no such recogniser"),
                          (f"nemo:{tmp_path / 'broken.nemo'}", "cannot restore"), ("siri", "choose moonshine")):
        with pytest.raises(AssetError, match=message):
            load_recognizer(name)


def test_a_row_spoken_too_fast_for_ctc_is_left_out_with_a_warning(manifest, tmp_path, caplog):
    good = json.dumps({"audio": str(manifest.parent / "0.flac"), "text": "a boat"})
    fast = json.dumps({"audio": str(manifest.parent / "0.flac"), "text": "far too many words for one second of audio"})
    (tmp_path / "m.jsonl").write_text("\n".join([good] * 20 + [fast]))
    assert len(load_manifest(tmp_path / "m.jsonl", 0.04)) == 20
    assert "m.jsonl:21" in caplog.text and "too short" in caplog.text


def test_broken_manifest_lines_are_named(manifest, tmp_path):
    good = {"audio": str(manifest.parent / "0.flac"), "text": "a boat"}
    cases = {
        "{broken": "needs a JSON object",
        json.dumps({"audio": "x.flac"}): "text",
        json.dumps(good | {"text": "…"}): "no words",
        json.dumps(good | {"audio": "absent.flac"}): "absent.flac",
        json.dumps({"audio": str(manifest.parent / "waves.npz"), "key": "u9", "text": "a"}): "u9",
    }
    for line, message in cases.items():
        path = tmp_path / "bad.jsonl"
        path.write_text(json.dumps(good) + "\n" + line + "\n")
        with pytest.raises(DataError, match=f"bad.jsonl:2: .*{message}"):
            load_manifest(path, 0.04)
    path.write_text(json.dumps(good | {"text": "far too many words for a single second of audio"}))
    with pytest.raises(DataError, match=r"(?s)cannot be aligned.*bad\.jsonl:1: .*too short"):
        load_manifest(path, 0.04)
    with pytest.raises(ConfigError, match=r"\.nemo"):
        run(TrainRecognizerConfig(str(manifest), str(manifest), "model.bin", "first.nemo"))


def test_batches_are_a_function_of_seed_and_epoch(nemo):
    recordings = [Recording((noise(0.5 + i / 10, i) * 32767).astype(np.int16), "ab c") for i in range(9)]
    config = TrainRecognizerConfig("", "", "x.nemo", "first.nemo", batch_seconds=3, seed=4)
    one, two = (iter(Batches(recordings, nemo._model, config)) for _ in range(2))
    for _ in range(8):
        (epoch, a), (epoch_b, b) = next(one), next(two)
        assert epoch == epoch_b and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert epoch >= 1
    plan = Batches(recordings, nemo._model, config).plan(0)
    assert sorted(i for batch in plan for i in batch) == list(range(9))


@pytest.mark.parametrize("name", ["moonshine", pytest.param("whisper-base", marks=pytest.mark.slow)])
def test_words_are_heard_at_any_rate(name):
    judge = load_recognizer(name)
    wave, rate = spoken_sample()
    text = judge.transcribe([wave[: 5 * rate]], rate)[0].lower()
    assert "fail" in text or "tried" in text
    assert len(judge.transcribe([noise(1.0, 0)], 16_000)[0]) < 80
    if name == "whisper-base":
        assert judge.transcribe([np.zeros(16_000, np.float32)], 16_000) == [""]
    else:
        assert isinstance(judge, MoonshineRecognizer)
    with pytest.raises(AudioError):
        judge.transcribe([np.full(100, np.nan, np.float32)], 16_000)


def test_moonshine_does_not_hear_a_number_where_speech_begins_at_once():
    """Without silence around it, this shipped recording begins with a "1." that nobody said."""
    wave, rate = corpus_recordings(str(ASSETS / "starter_prepared"))("af_sarah_0024")
    judge = MoonshineRecognizer()
    assert judge.transcribe([wave], rate) == ["Empires rise slowly and tend to collapse in a hurry."]
    judge.silence_seconds = 0.0
    assert judge.transcribe([wave], rate)[0].startswith("1.")


def test_speaker_embedding_is_of_unit_norm_and_of_one_voice():
    encoder = SpeakerEncoder()
    wave, rate = spoken_sample()
    half = len(wave) // 2
    one, two = encoder.embed(wave[:half], rate), encoder.embed(wave[half:], rate)
    assert one.shape == (256,) and np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    buzz = encoder.embed(noise(3.0, 0), 16_000)
    assert one @ two > 0.75 > one @ buzz
    for bad in (np.zeros(16_000, np.float32), np.zeros(0, np.float32), np.full(100, np.inf, np.float32)):
        with pytest.raises(AudioError):
            encoder.embed(bad, 16_000)


def test_threads_that_are_quiet_together_leave_logging_as_it_was():
    """A reward that timed out is still inside while the next one enters and leaves."""
    before = logging.root.manager.disable
    first, second = quiet_nemo(), quiet_nemo()
    with first:
        second.__enter__()
    assert logging.root.manager.disable == logging.WARNING  # the second is still inside
    second.__exit__(None, None, None)
    assert logging.root.manager.disable == before


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
@pytest.mark.parametrize("by", ["extract", "extractall"])
def test_archives_are_checked_where_python_knows_no_filters(name, by, tmp_path, monkeypatch):
    """Python 3.11.2, Debian 12's, takes no `filter`: NeMo's own call must work there, and nothing leave the folder."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # 3.11.2 itself has none
    before = tarfile.TarFile.extract, tarfile.TarFile.extractall

    def take(archive: Path, out: Path) -> None:
        with quiet_nemo(), tarfile.open(archive) as tar:
            if by == "extractall":
                tar.extractall(out, filter="data")
            for member in tar.getmembers() if by == "extract" else ():
                tar.extract(member, out, filter="data")

    def pack(archive: Path, *members: tarfile.TarInfo) -> Path:
        with tarfile.open(archive, "w") as tar:
            for member in members:
                member.size = 3 if member.isreg() else 0
                tar.addfile(member, io.BytesIO(b"abc"))
        return archive

    def link(name: str) -> tarfile.TarInfo:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, "../.."
        return member

    take(pack(tmp_path / "good.tar", tarfile.TarInfo("./weights"), tarfile.TarInfo("in/config")), tmp_path / "good")
    assert (tmp_path / "good/weights").read_bytes() == (tmp_path / "good/in/config").read_bytes() == b"abc"
    for bad in (tarfile.TarInfo(name), link("in")):
        with pytest.raises(tarfile.ExtractError, match="not a plain file inside the archive"):
            take(pack(tmp_path / "bad.tar", bad, tarfile.TarInfo("in/config")), tmp_path / "a/b")
    assert not list(tmp_path.rglob("evil")) and not Path("/evil").exists() and not (tmp_path / "a/b/in").is_symlink()
    assert (tarfile.TarFile.extract, tarfile.TarFile.extractall) == before
