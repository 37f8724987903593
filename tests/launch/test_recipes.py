"""Every recipe with its own settings on models and data of toy size: two updates, or two
utterances.

Only paths, sizes of models and lengths of runs are overridden; method names, ranges, rewards,
optimisers and sampling are the recipe's. The schemas are in test_quickstart.py.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_worker import HOP, WORDS, LevelJudge, ToneVocoder, tiny_items, tiny_tools
from test_quickstart import NAMES, ROOT, read
from tiny_backbones import CODES, architecture, tiny_backbone
from tiny_data import counting, tiny_tokenizer, write_prepared
from tiny_decoders import tiny_decoder
from tiny_residual import LAYERS, write_residual
from tiny_training import log_of
from tiny_vocoder import toy_data

from dcar.cli import kind_of
from dcar.config import recipes
from dcar.config.load import plain
from dcar.methods import Models, read_methods
from dcar.methods.entries import named_folder
from dcar.model.car import CARDecoder
from dcar.model.draft import build_draft
from dcar.model.load import load_decoder
from dcar.model.statistics import MEL_BANDS
from dcar.recognition.ctc import Alignment
from dcar.sampling import SamplingConfig
from dcar.sources.shipped import shipped
from dcar.text.english.inventory import PHONEME_VERSION
from dcar.train.car import run as train
from dcar.train.chunk_scorer import run as train_chunk_scorer
from dcar.train.draft import run as train_draft
from dcar.train.residual import run as train_residual
from dcar.train.token_recognizer import run as train_token_recognizer
from dcar.vocoder.model import TokenVocoder
from dcar.vocoder.training.train import run as train_vocoder
from eval.analysis.fit_verifiers import fit
from eval.compare.config import CompareConfig
from eval.compare.profile import run as profile
from eval.compare.run import run as compare
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import CandidatePolicy, CandidatePolicyConfig, HiddenPolicy, HiddenPolicyConfig
from rl.trainer import DCPOTrainer

PAPERS = r"arXiv \d{4}\.\d{5}|Interspeech 2025"
PAPER = [r for r in recipes.shipped() if re.search(PAPERS, r.summary)]
SMALL = dict(hidden_size=32, num_layers=2, num_attention_heads=2, ffn_size=64, text_vocab_size=64)
NAMED = dict(speech_vocab_size=CODES, tokenizer="tiny@abc", phonemes=PHONEME_VERSION)
TWO_UPDATES = (
    "max_steps=2 logging_steps=1 save_steps=1000 eval_steps=1000 "
    "dataloader_num_workers=0 prompt_tokens=5"
).split()


def of(*kinds: str) -> list[str]:
    """The recipes of these kinds and their variants, as parameters of a test."""
    return [name for name in NAMES if kind_of(name) in kinds]


def losses(out: Path) -> list[float]:
    """Of the two updates."""
    found = [line["loss"] for line in log_of(out, "loss")]
    assert len(found) == 2 and all(0 < loss < 1e3 for loss in found)
    return found


class Judge(LevelJudge):
    """Reads levels, of any number of codes, and finds every text as likely as its speech is
    long."""

    def transcribe(self, waves, sample_rate):
        levels = [(wave.reshape(-1, HOP).mean(1) * 20).round().astype(int) - 1 for wave in waves]
        return [" ".join(WORDS[t % len(WORDS)] for t in row) for row in levels]

    def log_likelihood(self, waves, sample_rate, texts):
        return [-1.0 / len(wave) for wave in waves]

    def align(self, waves, sample_rate, texts):
        heard = self.transcribe(waves, sample_rate)
        return [
            Alignment(
                np.ones(len(text)),
                np.arange(len(wave)) * len(text) // len(wave),
                -1.0,
                len(text),
                words,
            )
            for wave, text, words in zip(waves, texts, heard, strict=True)
        ]


# --- what the files say ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", recipes.shipped(), ids=lambda r: r.name)
def test_a_recipe_says_what_it_is_and_has_a_launch_line_that_is_its_own(recipe):
    text = (recipes.folder() / f"{recipe.name}.yaml").read_text()
    head = text.splitlines()[:10]
    assert recipe.summary and any(
        re.search(rf"^#   .*(--config |recipe=)(launch/recipes/)?{recipe.name}\b", line)
        for line in head
    )
    named = set(re.findall(r"--config (?:launch/recipes/)?(\w+)", text))
    assert named <= {r.name for r in recipes.shipped()}


def test_paper_recipes_feed_each_other():
    """What a recipe of the papers reads, another one writes, or its header (or the index) says
    how to make it."""
    names = [
        n
        for n in NAMES
        if n.partition(":")[0] in {r.name for r in PAPER}
        or "_paper" in n
        or "car_cosyvoice2" in n
        or "car_llasa_8b" in n
    ]
    config = {name: plain(read(name)) for name in names}
    made = {c["out"] for c in config.values()}
    texts = [(recipes.folder() / f"{name.partition(':')[0]}.yaml").read_text() for name in names]
    said = {
        m
        for text in [*texts, (ROOT / "docs" / "papers.md").read_text()]
        for m in re.findall(r"(?:out=|export |… )(runs/\w+)", text)
    }
    wanted = {
        (name, found)
        for name, c in config.items()
        for found in re.findall(r"runs/\w+", str({k: v for k, v in c.items() if k != "out"}))
    }
    assert {(n, f) for n, f in wanted if f not in made | said and f != "runs/xcodec2"} == set()


@pytest.mark.parametrize(
    ("variant", "differs"),
    [
        ("3-4", {"chunk_range": [3, 4]}),
        (
            "2-3-4",
            {"chunk_range": [2, 3, 4], "num_generations": 12, "per_device_train_batch_size": 48},
        ),
        ("2-3-4-5", {"chunk_range": [2, 3, 4, 5]}),
        (
            "free",
            {"chunk_range": [1, 2, 3, 4, 5, 6, 7], "forced_rows": "none", "reward_funcs": ["wer"]},
        ),
        ("no_chase", {"forced_rows": "none"}),
        ("no_penalty", {"reward_funcs": ["wer"]}),
        ("libriheavy_3-4-5-6", {"chunk_range": [3, 4, 5, 6], "decoder": "runs/car_libriheavy"}),
    ],
)
def test_a_row_of_an_ablation_differs_by_what_it_is_called_after(variant, differs):
    full, row = (vars(read(name, "out=runs/x")) for name in ("dcpo_paper", f"dcpo_paper:{variant}"))
    volatile = {"logging_dir", "run_name", "generation_batch_size"} | {
        k for k in full if k.startswith("_")
    }
    ours = {
        k: v
        for k, v in row.items()
        if v != full[k]
        and k not in volatile
        and not dataclasses.is_dataclass(v)
        and type(v).__module__ in ("builtins",)
    }
    assert ours == differs


@pytest.mark.parametrize(
    ("car", "far"),
    [
        *((f"car_{size}", f"car_{size}:far") for size in ("tiny", "starter", "paper")),
        ("car_paper:s3_50hz", "car_paper:far_s3_50hz"),
        ("car_paper:s3_25hz", "car_paper:far_s3_25hz"),
        ("car_paper:libriheavy", "car_paper:far_libriheavy"),
        ("car_mtp", "car_mtp:far"),
    ],
)
def test_far_differs_from_car_by_its_heads(car, far):
    car, far = read(car), read(far)
    assert far.model.num_prediction_heads == 1 < car.model.num_prediction_heads
    far.model.num_prediction_heads = car.model.num_prediction_heads
    assert dataclasses.replace(far, out=car.out, head_positions=car.head_positions) == car


@pytest.mark.parametrize("size", ["tiny", "starter", "paper"])
def test_whatever_speaks_a_decoder_prompts_it_as_in_training(size):
    car = read(f"car_{size}")
    assert car.model.num_prediction_heads == 7
    for kind in ("profile", "dcpo", "compare") if car.model.bos else ():
        assert read(f"{kind}_{size}").prompt_tokens == car.prompt_tokens


# --- stage one ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_models(tmp_path_factory) -> dict[int, Path]:
    """Small Qwen2 decoders on disk, by their number of heads, whose text is phonemes."""
    folders = {}
    for heads in (4, 7):
        folders[heads] = tmp_path_factory.mktemp("lm") / str(heads)
        tiny_backbone(
            heads, phonemes=PHONEME_VERSION, architecture=architecture(vocab_size=80)
        ).save_pretrained(folders[heads])
    return folders


@pytest.mark.parametrize("recipe", of("car", "finetune"))
def test_two_updates_of_stage_one(recipe, data, language_models, tmp_path):
    """From nothing or from a decoder; fine-tuning has rows of another corpus in every batch."""
    wanted, start = read(recipe), None
    short = [f"data={data}", f"out={tmp_path}", *TWO_UPDATES]
    if kind_of(recipe) == "finetune":
        short += [f"replay={data}", "spoken.sentences=0"]
    if wanted.codebook_init:
        tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
        write_prepared(
            tmp_path / "data",
            train=18,
            speech=counting,
            checksum=tokenizer.checksum,
            spec=str(tmp_path / "tokenizer"),
        )
        short[0] = f"data={tmp_path / 'data'}"
    if wanted.backbone.path:
        start = language_models[4 if "llasa" in recipe else 7]
        short += [f"backbone.path={start}", "bf16=false"]
    else:
        short += [f"model.{name}={size}" for name, size in SMALL.items()]
    # the same decoder trained further, or new heads on a decoder that there is
    if wanted.init_from:
        start = tmp_path / "start"
        old = (
            {"heads": "independent", "num_prediction_heads": 7, "head_blocks": 2}
            if wanted.freeze_trunk
            else {}
        )
        CARDecoder(dataclasses.replace(wanted.model, **SMALL, **NAMED, **old)).save_pretrained(
            start
        )
        short.append(f"init_from={start}")
    trained = train(read(recipe, *short))
    losses(tmp_path)
    if start:
        assert trained.checksum() != load_decoder(start).checksum()
    if isinstance(trained, CARDecoder):
        assert trained.config.num_prediction_heads == wanted.model.num_prediction_heads
        assert (
            trained.config.head_blocks == wanted.model.head_blocks
            and trained.config.bos == wanted.model.bos
        )
        assert CARDecoder.from_pretrained(tmp_path).checksum() == trained.checksum()


@pytest.mark.parametrize("recipe", of("draft"))
def test_two_updates_of_a_draft(recipe, data, tmp_path):
    wanted = read(recipe)
    if "llasa" in recipe or "cosyvoice2" in recipe:
        layers = wanted.bottom_layers + wanted.top_layers
        target = tiny_backbone(
            4,
            architecture=architecture(vocab_size=80, num_hidden_layers=layers),
            tokenizer="tiny@abc",
            phonemes=PHONEME_VERSION,
        )
    else:
        target = tiny_decoder(**SMALL, **NAMED)
    target.save_pretrained(tmp_path / "target")
    draft = train_draft(
        read(
            recipe,
            f"decoder={tmp_path / 'target'}",
            f"data={data}",
            f"out={tmp_path / 'draft'}",
            *TWO_UPDATES,
        )
    )
    assert draft.config.target_checksum == target.checksum()
    start = build_draft(target, wanted.bottom_layers, wanted.top_layers)
    moved = [n for n, p in draft.named_parameters() if not torch.equal(p, start.get_parameter(n))]
    assert any(n.startswith("heads.") for n in moved) and any("layers.0." in n for n in moved)


@pytest.mark.parametrize("recipe", of("token_recognizer"))
def test_two_updates_of_a_token_recogniser(recipe, data, tmp_path):
    trained = train_token_recognizer(
        read(recipe, f"data={data}", f"out={tmp_path}", *TWO_UPDATES[:4], "model.hidden_size=16")
    )
    assert trained.config.speech_vocab_size == CODES and trained.config.dilations == (
        1,
        2,
        4,
        1,
        2,
        4,
    )
    losses(tmp_path)


@pytest.mark.parametrize("recipe", of("residual"))
def test_two_updates_of_a_residual_model(recipe, tmp_path):
    data = write_residual(tmp_path / "data", train=18, dev=4)
    trained = train_residual(
        read(
            recipe,
            f"data={data}",
            f"out={tmp_path}",
            *TWO_UPDATES,
            *(f"model.{name}={size}" for name, size in SMALL.items()),
        )
    )
    assert trained.config.codec_layers == LAYERS and trained.config.prompt_tokens == 5
    losses(tmp_path)


@pytest.mark.parametrize("recipe", of("chunk_scorer"))
def test_two_updates_of_a_chunk_scorer(recipe, data, tmp_path):
    decoder = tiny_decoder(tokenizer="tiny@abc")
    decoder.save_pretrained(tmp_path / "decoder")
    trained = train_chunk_scorer(
        read(
            recipe,
            f"data={data}",
            f"decoder={tmp_path / 'decoder'}",
            f"out={tmp_path / 'out'}",
            *TWO_UPDATES[:4],
        )
    )
    assert trained.config.base_checksum == decoder.checksum() and trained.config.width == 128
    assert all(0.5 < loss < 1 for loss in losses(tmp_path / "out"))  # chance is 0.69


@pytest.mark.parametrize("recipe", of("vocoder"))
def test_two_updates_of_a_vocoder(recipe, tmp_path):
    toy_data(tmp_path)
    small = [
        *"max_steps=2 eval_steps=2 per_device_train_batch_size=2 renderer_batch_size=2".split()
    ]
    pack = f"data={tmp_path / 'pack.safetensors'}"
    folder = train_vocoder(
        read(recipe, pack, f"out={tmp_path}", "device=cpu", "bf16=false", *small)
    )
    assert TokenVocoder.from_pretrained(folder).config.vocab_size == 2048


# --- profile, DCPO, statistics --------------------------------------------------------------------


@pytest.mark.parametrize("recipe", of("profile"))
def test_a_profile_of_two_utterances(recipe, tmp_path):
    config = read(recipe, f"out={tmp_path}", "device=cpu", "max_tokens=20")
    tools = dataclasses.replace(tiny_tools(count=2), models=Models(tiny_decoder(7)))
    result = profile(dataclasses.replace(config, max_reward_wer=100.0), tools)
    assert [row.k for row in result.rows] == (config.sizes or [1, 2, 3, 4, 5, 6, 7])
    assert len(result.range) == config.range_size


@pytest.mark.parametrize("recipe", of("dcpo"))
def test_two_batches_of_dcpo(recipe, tmp_path):
    config = read(
        recipe,
        f"out={tmp_path}",
        "max_tokens=20",
        "policy_width=16",
        "policy_heads=2",
        "eval_strategy=no",
        "save_strategy='no'",
        "disable_tqdm=true",
        "logging_steps=1",
        "policy=''",
    )
    if config.chunk_scorer:
        config.chunk_scorer = str(tmp_path / "chunk_scorer")
    # more take longer, no other way
    config.gradient_accumulation_steps = min(2, config.gradient_accumulation_steps)
    # two batches of rollouts, each learned from num_iterations times
    config.max_steps = 2 * config.num_iterations
    if not config.chunk_range:
        assert config.guidance or config.forced_rows == "none"
        config.chunk_range = [2, 3]  # a profile would say so
    if "token_likelihood" in config.reward_funcs:
        config.data = str(shipped("prepared"))  # its tokens and phonemes
    heads = max(7, *config.policy_sizes, 0)
    base = tiny_decoder(heads)
    if config.chunk_scorer:  # another recipe trains it
        shape = ChunkScorerConfig(
            base.config.hidden_size,
            heads,
            base.config.output_size,
            4,
            8,
            base_checksum=base.checksum(),
        )
        ChunkScorer(shape).save_pretrained(config.chunk_scorer)
    prompts = 2 * config.prompts_per_step * config.gradient_accumulation_steps
    trainer = DCPOTrainer(
        args=config,
        decoder=base,
        vocoder=ToneVocoder(),
        recognizer=Judge(),
        train_dataset=tiny_items(prompts),
    )
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    log = [line for line in trainer.state.log_history if "reward" in line]
    assert len(log) == 2
    assert (
        sum(name.startswith("action_histogram/") for name in log[0]) == heads
        and log[0]["failed_rewards"] == 0
    )
    assert all(f"rewards/{name}/mean" in log[0] for name in config.reward_funcs)
    assert log[0]["beta"] == 0  # of the first epoch
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("recipe", of("verifiers"))
def test_statistics_of_two_utterances(recipe):
    config = read(recipe)
    items = tiny_items(2)
    found = fit(
        tiny_decoder(7),
        items,
        [i.reference_tokens for i in items],
        dataclasses.replace(config.sampling, max_tokens=10),
        ranks=config.ranks,
        thresholds=2,
    )
    assert found.rank_accuracy.shape[0] == 6 and int(found.bigram_counts.sum()) == 2 * (15 + 1)


# --- comparisons ----------------------------------------------------------------------------------


def models_for(config: CompareConfig, recipe: str) -> Models:
    """Tiny models of the kinds that the recipe names; a language model where the recipe has one."""
    specs = read_methods(config.methods)
    # draws, among which a policy with a chunk scorer chooses, or long chunks
    several = any("num_candidates" in s.settings or s.settings.get("size", 0) > 8 for s in specs)
    heads = (
        8 if "mtp" in recipe else 4 if "pcg" in recipe or "25hz" in recipe else 16 if several else 7
    )
    language = any(word in recipe for word in ("cosyvoice2", "ssd", "pcg"))
    # mtp-viterbi takes up to 25 candidates of a head
    codes = {} if language else {"speech_vocab_size": 32}
    make = tiny_backbone if language else tiny_decoder
    decoder = make(heads, **codes)
    width = decoder.config.hidden_size
    policies = {}
    for item in config.policies:
        name = item.rpartition("=")[0]
        torch.manual_seed(len(policies))
        common = dict(
            hidden_size=width,
            num_actions=heads,
            chunk_range=(2, 3),
            base_checksum=decoder.checksum(),
        )
        if several:
            policy = CandidatePolicy(
                CandidatePolicyConfig(
                    **common,
                    chunk_scorer=ChunkScorerConfig(
                        width, heads, decoder.config.output_size, 4, 8, 2
                    ),
                )
            )
        else:
            policy = HiddenPolicy(HiddenPolicyConfig(**common, width=16, num_attention_heads=2))
        policies[name] = policy.eval()
    items = tiny_items(2)
    sampling = SamplingConfig(min_tokens=30, max_tokens=40)
    statistics = (
        fit(decoder, items, [i.reference_tokens for i in items], sampling, ranks=4, thresholds=3)
        if config.statistics
        else None
    )
    if statistics and "pcg" in recipe:  # how its codes sound
        size = decoder.config.speech_vocab_size
        statistics.mel_means = torch.randn(size, MEL_BANDS)
        statistics.mel_counts = torch.ones(size, dtype=torch.long)
    return Models(
        decoder,
        make(1, seed=5, **codes) if config.far_decoder else None,
        policies,
        build_draft(decoder).eval() if config.draft else None,
        statistics,
        {named_folder(item)[0]: make(heads, seed=6, **codes) for item in config.decoders},
    )


@pytest.mark.parametrize("recipe", of("compare"))
def test_a_comparison_of_two_utterances(recipe, tmp_path):
    config = read(
        recipe,
        f"out={tmp_path}",
        "limit=2",
        "max_tokens=12",
        "timing_utterances=0",
        "audio_utterances=0",
        "resamples=100",
        "device=cpu",
        "seeds=[0]",
        "report=false",
        "references=false",
    )
    tools = tiny_tools(Judge(), count=2)
    tools.models, tools.sets = (
        models_for(config, recipe),
        {n: {0: tools.items} for n in config.limits},
    )
    result = compare(config, tools)
    # methods of a part are in the last comparison
    rows = {row.method for of in result.comparisons for row in of.spoken}
    names = list(map(str, read_methods(config.methods)))
    policies = [p.rpartition("=")[0] for p in config.policies]
    expected = [
        f"{n}@{p}" if p else n
        for n in names
        for p in (policies if n in ("dcar", "dcar-sampled") else [""])
    ]
    assert rows == set(expected)
    assert all(row.n == 2 for of in result.comparisons for row in of.rows)
