"""`dcar distil`: who speaks, who is chosen, where rows come from, and what a run that was cut
off has left."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import two_processes
from tiny_backbones import write_cosyvoice1, write_cosyvoice2, write_llasa
from tiny_data import CODES, counting, tiny_vocoder, write_prepared
from tiny_decoders import tiny_decoder

from dcar.decoding import FixedChunk, decode
from dcar.errors import CheckpointError, ConfigError, DataError
from dcar.model.backbones import convert
from dcar.model.companions import text_units
from dcar.model.load import load_decoder
from dcar.prepare import retokenize
from dcar.prepare.prepared import load_prepared, load_split, prepared_info
from dcar.prompts.chooser import PromptChooser
from dcar.prompts.items import make_prompts
from dcar.recognition.tokens import TokenRecognizer, TokenRecognizerConfig
from dcar.sampling import SamplingConfig
from dcar.text.english.inventory import PHONEME_VERSION, TEXT_VOCAB_SIZE
from dcar.train import car
from dcar.train.batches import SpeechDataset, collate
from launch import distil
from launch.distil import RECORDING, DistilConfig, Rendering, best, keeps_recording, run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_prepared(tmp_path / "prepared", train=10)


def save_reader(folder: Path, tokenizer: str) -> None:
    TokenRecognizer(
        TokenRecognizerConfig(
            speech_vocab_size=CODES,
            text_vocab_size=TEXT_VOCAB_SIZE,
            hidden_size=8,
            dilations=(1,),
            tokenizer=tokenizer,
            phonemes=PHONEME_VERSION,
        )
    ).save_pretrained(folder)


def arguments(config: DistilConfig) -> list[str]:
    """What the fixture has set but `out` and `sampling`."""
    return [
        f"{name}={json.dumps(getattr(config, name))}"
        for name in "data decoder methods samples token_recognizer prompt_tokens lowest_score".split()
    ]


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> DistilConfig:
    """A tiny decoder that speaks, and a token recogniser that has learned nothing: any candidate
    is good enough."""
    decoder = tiny_decoder(text_vocab_size=TEXT_VOCAB_SIZE)
    decoder.save_pretrained(tmp_path / "car")
    save_reader(tmp_path / "reads", "tiny@abc")
    return DistilConfig(
        data=str(corpus),
        decoder=str(tmp_path / "car"),
        methods=["car-2@t0", "car-2@t1"],
        samples=2,
        token_recognizer=str(tmp_path / "reads"),
        prompt_tokens=5,
        lowest_score=-1e6,
        sampling=SamplingConfig(min_tokens=10),
        out=str(tmp_path / "distilled"),
    )


CHANGED = ("speech", "duration", "prompt_speech", "prompt_voice")


def rows_of(folder: str | Path) -> list[dict]:
    return list(load_prepared(folder, "train"))


def test_scores_are_sums_and_the_best_is_chosen():
    lowest = -1.0
    plain, said = Rendering("a", [1], read=-0.1), Rendering("b", [1], read=-0.2)
    assert plain.score == pytest.approx(-0.1) and best([said, plain], lowest) is plain
    assert best([plain, Rendering("c", [2], read=-0.1)], lowest) is plain  # of equals the first
    heard = Rendering("d", [1], read=-0.2, wer=0.25, similarity=0.8)
    assert heard.score == pytest.approx(-0.2 - 0.25 + 0.8)
    assert best([plain, heard], lowest) is heard  # where some were voiced, it is one of them
    cut, low = Rendering("f", [1], truncated=True, read=0.0), Rendering("g", [1], read=-1.1)
    assert best([cut, low, Rendering("h", [], read=0.0)], lowest) is None
    assert (
        best([heard, Rendering("e", [1], read=-0.2, wer=0.0, similarity=0.8)], lowest).spoken_by
        == "e"
    )


def test_a_share_keeps_its_recording_whatever_the_run():
    ids = [f"u{i}" for i in range(4000)]
    kept = [keeps_recording(i, 0.3, 0) for i in ids]
    assert abs(np.mean(kept) - 0.3) < 0.03  # 4 standard errors
    assert all(keeps_recording(i, 0.5, 0) for i, k in zip(ids, kept, strict=True) if k)
    assert not any(keeps_recording(i, 0.0, 0) for i in ids) and all(
        keeps_recording(i, 1.0, 0) for i in ids
    )


def test_rows_say_who_spoke_them(config, corpus):
    assert run(config) == Path(config.out)
    before, after = rows_of(corpus), rows_of(config.out)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert new["recorded"] == old["speech"] and new["speech"] != old["speech"]
        assert new["spoken_by"] in ("car-2@t0 seed 0", "car-2@t1 seed 0", "car-2@t1 seed 1")
        assert new["duration"] == pytest.approx(len(new["speech"]) / 50) and math.isfinite(
            new["score"]
        )
        assert all(new[name] == old[name] for name in old if name not in CHANGED)
    assert list(load_prepared(corpus, "dev")) == list(load_prepared(config.out, "dev"))
    info = prepared_info(config.out)
    assert sum(info.content["distilled"]["rows"].values()) == len(after)
    assert info.counts["train"]["tokens"] == sum(len(row["speech"]) for row in after)
    assert not list(Path(config.out).parent.glob(".*partial"))


def test_training_sees_the_prompt_that_was_heard(config):
    """The tokens of a row are those that its method says behind the prompt that the row names."""
    run(config)
    split, teacher = load_split(config.out, "train"), distil.Teacher(config, "cpu")
    train = split.rows
    dataset = SpeechDataset(split, teacher.ways[0][0].decoder.config, config.prompt_tokens, seed=0)
    recordings = [list(tokens) for tokens in train["recorded"]]
    for i, row in enumerate(train):
        entry, seed = next(
            (e, s) for e, s in teacher.ways if row["spoken_by"] == f"{e.name} seed {s}"
        )
        prompt = make_prompts(teacher.split, config.prompt_tokens, seed, rows=[i])[0]
        assert row["prompt_speech"] == list(prompt.prompt_ids)
        assert row["prompt_voice"] == pytest.approx(prompt.speaker_embedding)
        (said,) = decode(entry.decoder, [prompt], entry.method, entry.sampling, seed=seed)
        assert row["speech"] == list(said.tokens)
        for epoch in (0, 1):
            assert dataset[epoch, i]["speech"] == [*row["prompt_speech"], CODES + 1, *row["speech"]]
    assert all(list(tokens) in recordings for tokens in PromptChooser(split, 5).speech)


# likelihoods are below
@pytest.mark.parametrize(("setting", "value"), [("recordings", 1.0), ("lowest_score", 0.0)])
def test_rows_that_keep_a_recording_have_prompts_of_recordings(config, corpus, setting, value):
    """Because all are asked to, or because no candidate serves."""
    setattr(config, setting, value)
    run(config)
    train = load_prepared(config.out, "train")
    assert (
        list(train["speech"]) == list(train["recorded"]) == [r["speech"] for r in rows_of(corpus)]
    )
    assert set(train["spoken_by"]) == {RECORDING} and all(map(math.isnan, train["score"]))
    recorded = {tuple(tokens) for tokens in train["recorded"]}
    assert not any(train["prompt_speech"])
    for item in make_prompts(load_split(config.out, "train"), 30, seed=3):
        assert item.prompt_ids in recorded


def test_limit_speaks_some_sentences_and_writes_no_others(config, corpus, tmp_path):
    config.limit = 6  # of two speakers, so that every sentence has a prompt
    run(config)
    chosen = {r["id"] for r in rows_of(config.out)}
    assert len(chosen) == 6 < len(rows_of(corpus))
    assert prepared_info(config.out).counts["train"]["utterances"] == 6
    config.seed, config.out = 1, str(tmp_path / "others")
    run(config)
    assert chosen != {r["id"] for r in rows_of(config.out)}


def test_a_distilled_corpus_is_not_distilled_again(config, tmp_path, corpus):
    run(config)
    config.data, config.out = config.out, str(tmp_path / "second")
    with pytest.raises(DataError, match=f"give data={corpus}"):
        run(config)


def test_what_was_finished_is_used_again(config, monkeypatch, tmp_path):
    monkeypatch.setattr(distil, "BLOCK", 4)
    run(config)
    whole = rows_of(config.out)
    config.out = str(tmp_path / "again")
    speak, spoken = distil.Teacher.speak, []

    def cut_off(self, rows):
        if len(spoken) == 1:
            raise KeyboardInterrupt
        spoken.append(rows)
        return speak(self, rows)

    monkeypatch.setattr(distil.Teacher, "speak", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not Path(config.out).exists()
    spoken.clear()
    monkeypatch.setattr(
        distil.Teacher, "speak", lambda self, rows: spoken.append(rows) or speak(self, rows)
    )
    config.batch_size = 3  # no effect on what is said
    run(config)
    assert [len(rows) for rows in spoken] == [4, 2] and json.dumps(
        rows_of(config.out)
    ) == json.dumps(whole)


class Hears:
    """Misses a word every other time."""

    name, asked = "hears", 0

    def transcribe(self, waves, sample_rate):
        first, self.asked = self.asked, self.asked + len(waves)
        return ["a red house" if i % 2 else "a house" for i in range(first, self.asked)]


def test_sound_decides_among_the_best_by_tokens(config, tmp_path, monkeypatch):
    vocoder = tiny_vocoder()
    monkeypatch.setattr(distil, "vocoder_for", lambda *args: vocoder)
    monkeypatch.setattr(distil, "load_recognizer", lambda name, device: Hears())
    config.recognizer = "hears"
    teacher = distil.Teacher(config, "cpu")
    (candidates,) = teacher.speak([0])
    judged = teacher.identity
    next(iter(vocoder.parameters())).data += 1
    assert teacher.identity != judged  # what another vocoder's sound was given is not used again
    heard = [c for c in candidates if c.wer is not None]
    assert len(heard) == 2 and min(c.read for c in heard) >= min(c.read for c in candidates)
    assert all(c.wer in (0.0, pytest.approx(1 / 3)) for c in heard)
    assert best(candidates, -math.inf).score == max(c.score for c in heard)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"token_recognizer": ""}, ConfigError, "token_recognizer, recognizer"),
        ({"methods": []}, ConfigError, "methods"),
        ({"methods": ["car-9"]}, ConfigError, "car-9"),
        ({"out": "DATA"}, DataError, "prepared: .*out"),
    ],
)
def test_refusals(config, corpus, change, error, says):
    with pytest.raises(error, match=says):
        for name, value in change.items():
            setattr(config, name, str(corpus) if value == "DATA" else value)
        config.__post_init__()
        run(config)


def test_a_teacher_of_another_tokenizer_is_refused(config, tmp_path):
    decoder = tiny_decoder(text_vocab_size=TEXT_VOCAB_SIZE, tokenizer="other@123")
    decoder.save_pretrained(tmp_path / "other")
    config.decoder = str(tmp_path / "other")
    with pytest.raises(DataError, match="other@123"):
        run(config)
    config.decoder = str(tmp_path / "car")
    save_reader(tmp_path / "reads", "other@123")
    with pytest.raises(CheckpointError, match="prepared: .*tiny@abc.*other@123"):
        run(config)


@pytest.mark.parametrize(
    ("kind", "write", "targets"),
    [
        ("cosyvoice2", write_cosyvoice2, ["q_proj", "v_proj", "down_proj"]),
        ("cosyvoice", write_cosyvoice1, ["linear_q", "linear_v", "w_2"]),
        ("llasa", write_llasa, ["q_proj", "v_proj", "down_proj"]),
    ],
)
def test_a_language_model_with_lora_speaks_and_is_trained_on(
    kind, write, targets, tmp_path, monkeypatch
):
    """Converted, trained with adapters, distilled, trained on with new ones: each command on
    what was written."""
    monkeypatch.chdir(tmp_path)
    Path("published").mkdir()
    write(Path("published"))
    write_prepared(Path("phonemes"), train=12, speech=counting)
    tiny_vocoder().save_pretrained("vocoder")
    whisper = ["text_tokenizer=published/whisper"] if kind == "cosyvoice" else []
    convert.main(
        [f"kind={kind}", "source=published", "heads=3", "head_blocks=1", "out=host", *whisper]
    )
    retokenize.main(["data=phonemes", "decoder=host", "out=data"])
    training = [
        "per_device_train_batch_size=6",
        "max_steps=12",
        "warmup_steps=1",
        "learning_rate=0.02",
        "save_steps=12",
        f"backbone.lora.target_modules={json.dumps(targets)}",
    ]
    car.main(["data=data", "backbone.path=host", "out=car", *training])
    monkeypatch.setattr(distil, "load_recognizer", lambda name, device: Hears())
    distil.main(
        (
            "data=data decoder=car methods=[car-2@t0,car-3@t1] samples=1 token_recognizer= "
            "recognizer=hears vocoder=vocoder lowest_score=-1 min_tokens=10 out=spoken"
        ).split()
    )
    spoken, recorded = load_split("spoken", "train"), load_split("data", "train")
    adapted = load_decoder("car/checkpoint-12")
    assert adapted.config.lora and not load_decoder("car").config.lora
    for item, row, recording in zip(
        make_prompts(recorded, 50, 0, bos=False), spoken.rows, recorded.rows, strict=True
    ):
        assert row["recorded"] == recording["speech"] and row["text_ids"] == recording["text_ids"]
        chunk, temperature = {"car-2@t0 seed 0": (2, 0.0), "car-3@t1 seed 0": (3, 1.0)}[
            row["spoken_by"]
        ]
        (said,) = decode(
            adapted,
            [item],
            FixedChunk(chunk),
            SamplingConfig(temperature=temperature, min_tokens=10),
        )
        # behind text and tokens of its prompt; merged or not
        assert row["speech"] == list(said.tokens)

    car.main(["data=spoken", "backbone.path=car", "out=again", *training])
    batch = collate(
        [SpeechDataset(spoken, adapted.config, 50, seed=0)[0, i] for i in range(len(spoken))]
    )
    with torch.no_grad():
        before, after = (float(load_decoder(folder)(batch).loss) for folder in ("car", "again"))
    assert after < before and text_units("again")("a red house") == spoken.rows[0]["text_ids"]
    with pytest.raises(ConfigError, match="init_from .*backbone.path"):
        car.main(["data=spoken", "init_from=car", "out=other"])


@pytest.mark.slow  # half a minute
def test_two_processes_write_what_one_writes(config, tmp_path):
    """A file of candidates holds the same sentences for any number of them."""
    run(config)
    script = tmp_path / "main.py"
    script.write_text(
        "import sys; from dcar.process import run_command; from launch import distil\n"
        "distil.BLOCK = 4; sys.exit(run_command('distil', lambda: distil.main(sys.argv[1:])))"
    )
    two_processes(script, *arguments(config), "min_tokens=10", f"out={tmp_path / 'two'}")
    assert json.dumps(rows_of(tmp_path / "two")) == json.dumps(rows_of(config.out))
