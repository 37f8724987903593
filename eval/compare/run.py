"""Compare decoding methods on the same utterances: one table, one JSON, the plots, one report.

    accelerate launch -m eval.compare --config launch/recipes/compare_starter.yaml limit=100
    dcar compare --config compare_starter:all out=runs/all

FAR, CAR-k, DCAR and other methods decode the same held-out texts with the same prompts, sampling
and seeds. One vocoder synthesises the tokens, and one recogniser that took no part in training
transcribes them. Two reference rows bound the word errors that the recogniser can measure: the
recordings themselves, and their tokens resynthesised by the same vocoder.

An interrupted comparison continues where it stopped, with any number of processes and with the same
result.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm

from dcar.config import check, load_config, save_config, setting
from dcar.config.commands import (
    DecoderSettings,
    PromptSettings,
    RunSettings,
    SpeechSettings,
    WaitSettings,
)
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError, DataError
from dcar.model.companions import text_encoder
from dcar.model.precision import precision_of
from dcar.prepare.prepared import prepared_info
from dcar.process import own_device, run_claimed
from dcar.prompts.choose import by_digest, in_turns
from dcar.prompts.chooser import PromptChooser, with_prompts
from dcar.prompts.items import PromptItem, make_prompts
from dcar.prompts.load import corpus_recordings, split_for, vocoder_for
from dcar.prompts.texts import SPLIT, name_and_limit, read_texts, text_list, text_prompts, title_of
from dcar.recognition.load import load_recognizer
from dcar.sampling import SamplingConfig
from dcar.storage import digest, write_text, writing
from dcar.text.wer import NORMALIZER
from dcar.tokens.alignment import ENOUGH, PhonemeAligner
from dcar.tokens.codebook import codebook_of
from dcar.tokens.warping import code_distances
from dcar.tracking import provenance, write_json
from dcar.vocoder.base import PromptAudio
from dcar.vocoder.load import vocoder_identity
from eval.compare.processes import Meeting, start, threads_of
from eval.compare.tuned import load_tuned
from eval.methods.registry import Entry, load_models, make_methods
from eval.methods.spec import read_methods
from eval.report.listen import sample_picture
from eval.report.page import FORMAT_VERSION, write_report
from eval.report.plots import draw_plots
from eval.report.summary import terminal_text
from eval.report.table import table_text
from eval.results.pareto import equal_speed, speed_axis
from eval.results.rows import by_category, by_length, by_utterance, make_rows, power_statement
from eval.results.store import (
    RECORDING,
    RESYNTHESIS,
    Job,
    Maker,
    Record,
    RecordStore,
    Tools,
    by_method,
    choose_items,
    chosen_of,
    plan,
    save_opus,
)
from eval.results.timing import time_methods
from eval.results.training import SHIPPED, training_note
from eval.scorers.load import load_scorers

logger = logging.getLogger(__name__)

Group = tuple[str, int]
"""Set of texts and prompt seed: utterances that are decoded with every sampling seed."""


@dataclass
class CompareConfig(RunSettings, WaitSettings, SpeechSettings, DecoderSettings, PromptSettings):
    """Settings of a comparison."""

    out: str = "runs/compare"
    texts: list[str] = setting(
        [SPLIT],
        "Sets of texts, each with its own rows and tests; NAME:N = N texts of it. split = the "
        "sentences of the split. Texts without recordings are synthesised with the prompts of the "
        "split in turn: hard, short = the shipped ones, else a file with one text per line. The "
        "first set is used for references, audio and pictures.",
    )
    far_decoder: str | None = setting(None, "FAR checkpoint (one head); needed by method far.")
    policies: list[str] = setting([], "Policy folders, as name=folder if there are several.")
    draft: str | None = setting(None, "Draft model of this decoder, for sd, ssd and pcg.")
    statistics: str | None = setting(
        None, "Measured statistics that some methods need (docs/methods.md)."
    )
    methods: list[str | dict[str, Any]] = setting(
        ["car-1", "car-2", "car-3"],
        "Method names from docs/methods.md, or mappings such as {method: ssd, beta: 0.4}; "
        '"ssd-{0,0.4}" is a sweep, car-5@t0.4 has its own sampling.',
    )
    tuned: str | None = setting(
        None, "tuned.json of `dcar tune`: adds a row for each method at its own best sampling."
    )
    seeds: list[int] = seed_setting(
        [0], "Sampling seeds; every utterance is decoded once with each."
    )
    prompt_seeds: list[int] = seed_setting(
        [0],
        "Seeds of the choice of prompts, the same for all methods; several = replicates. The "
        "first one is used for references, audio and timings.",
    )
    scorers: list[str] = setting(
        ["resemblyzer"],
        "Columns of similarity to the voice of the prompt (resemblyzer, wavlm:…, eres2net:…) and "
        "of quality (utmos:…, dnsmos, …), see eval/scorers/load.py.",
    )
    timing_utterances: int = setting(
        10, "Utterances timed at batch 1 for every method; 0 = no timings.", minimum=0
    )
    audio_utterances: int = setting(4, "Utterances whose audio is kept for the report.", minimum=0)
    references: bool = setting(True, "Rows for the recordings and their resynthesis.")
    resamples: int = setting(4000, "Number of bootstrap resamples.", minimum=100)
    threads: int = setting(
        0,
        "Torch threads per process; 0 = one for decoders below 100 M parameters, otherwise the "
        "idle cores.",
        minimum=0,
    )
    training_log: str | None = setting(
        None, "log.jsonl of a DCPO run, for the training curves in the report."
    )
    report: bool = setting(True, "Write report.html.")
    sampling: SamplingConfig = setting(
        SamplingConfig, "Sampling of methods that do not have their own."
    )

    def __post_init__(self) -> None:
        check(self)
        if not (self.methods and self.texts and self.seeds and self.prompt_seeds):
            raise ConfigError(
                "methods, texts, seeds and prompt_seeds: a comparison needs at least one of each"
            )
        for name in ("seeds", "prompt_seeds", "scorers"):
            if len(set(given := getattr(self, name))) != len(given):
                raise ConfigError(f"{name} must differ: {given}")
        if len(self.limits) != len(self.texts):
            raise ConfigError(f"texts must differ: {self.texts}")
        read_methods(self.methods)  # raises for an unknown method before anything is loaded

    @property
    def limits(self) -> dict[str, int]:
        """Number of texts of every set by its name; 0 = all."""
        return dict(map(name_and_limit, self.texts))


SHOWN = "hypothesis words duration emitted sizes truncated".split()
"""Fields of a record that the report shows next to its audio."""


def load_tools(config: CompareConfig, device: str) -> Tools:
    """Load models, vocoder, recogniser, scorers and the utterances of a comparison; of the
    split, no other rows are read. Raises ConfigError, CheckpointError or DataError if parts do
    not belong together."""
    info = prepared_info(config.data)
    models = load_models(
        config.decoder,
        config.far_decoder or "",
        config.policies,
        device,
        config.draft or "",
        config.statistics or "",
        dtype=config.dtype,
    )
    whole = split = split_for(models.decoder, config.data, config.split)
    if SPLIT in config.limits:
        split = with_prompts(whole, f"{config.data}: split {config.split}")
    bos = models.decoder.config.bos

    def spoken(name: str, limit: int) -> dict[int, list[PromptItem]]:
        """Return the utterances of a set of texts by prompt seed."""
        texts = [] if name == SPLIT else read_texts(name, text_encoder(config.decoder))
        rows, source = in_turns(whole, len(texts)), whole
        if name == SPLIT:
            fewest = min(filter(None, (limit, config.limit)), default=0)
            columns, source = split.columns, split
            rows = by_digest(columns["digest_rank"], columns["id_rank"], fewest)
        chooser = PromptChooser(source, config.prompt_tokens)
        made = {
            seed: make_prompts(source, config.prompt_tokens, seed, bos, rows, chooser)
            for seed in config.prompt_seeds
        }
        if name == SPLIT:
            return made
        # a text has the same prompt whatever the limit
        return {s: choose_items(text_prompts(texts, items), limit) for s, items in made.items()}

    sets = {name: spoken(name, limit) for name, limit in config.limits.items()}
    every_item = [i for by_seed in sets.values() for made in by_seed.values() for i in made]
    recordings = corpus_recordings(config.data)
    # raise now, not at the end, if the corpus is missing
    if config.audio_utterances and every_item:
        recordings(every_item[0].prompt_utterance_id)
    recorded = split.rows[:ENOUGH]
    prompts = PromptAudio.of_items(every_item, recordings)
    vocoder = vocoder_for(models.decoder, config.data, every_item, config.vocoder, device, prompts)
    recognizer = load_recognizer(config.recognizer, device=device)
    return Tools(
        sets,
        models,
        vocoder,
        recognizer,
        recordings,
        {"vocoder": vocoder_identity(vocoder, config.vocoder)},
        {
            "corpus": info.corpus,
            "tokenizer": info.tokenizer.identity,
            "split": config.split,
            **({"own_prompt": left_out} if (left_out := len(whole) - len(split)) else {}),
            "texts": [{"name": name, **digest(text_list(name))} for name in sets if name != SPLIT],
        },
        load_scorers(config.scorers, prompts, device),
        codebook_of(info.tokenizer, config.data)
        if len(config.prompt_seeds) * len(config.seeds) > 1
        else None,
        PhonemeAligner.fit(
            recorded["speech"], recorded["text"], models.decoder.config.speech_vocab_size
        )
        if config.audio_utterances
        else None,
        training_note(config.decoder, config.far_decoder) if config.far_decoder else "",
    )


def run(
    config: CompareConfig, tools: Tools | None = None, more: Sequence[Entry] = ()
) -> dict[str, Any]:
    """Run a comparison and return the content of compare.json (on every process). `tools` replaces
    what the config would load; more: methods that have no name to list.

    Raises ConfigError, DataError, CheckpointError. Finished records stay in `out`, and the next run
    uses them.
    """
    state, meeting = start(config)
    out = Path(config.out)
    if state.is_main_process and tools is None:
        logger.info("loading models")
    tools = tools or load_tools(config, own_device(config.device))
    comparison = Comparison(config, tools, state, meeting, more)
    if state.is_main_process and comparison.training not in ("", SHIPPED):
        # warn before an hour of decoding; the note is repeated below the table
        logger.warning(comparison.training)
    with writing(out), threads_of(config.threads, comparison.parameters, state.num_processes):
        makers = comparison.make_records()
        meeting.wait("decoding and transcribing")
        result: dict[str, Any] = {}
        if state.is_main_process:
            result = comparison.finish(makers)
    meeting.wait("writing the table and the report")
    return result or json.loads((out / "compare.json").read_text())


class Comparison:
    """Comparison in progress: the methods, the records they make, and the files written from
    these."""

    def __init__(
        self,
        config: CompareConfig,
        tools: Tools,
        state: PartialState,
        meeting: Meeting,
        more: Sequence[Entry],
    ):
        self.config, self.tools, self.state, self.meeting = config, tools, state, meeting
        self.out = Path(config.out)
        # the set of texts and the prompt seed with references, audio and pictures
        self.first: Group = next(iter(config.limits)), config.prompt_seeds[0]
        self.groups: dict[Group, list[PromptItem]] = {
            (texts, seed): choose_items(tools.sets[texts][seed], config.limit)
            for texts in config.limits
            for seed in config.prompt_seeds
        }
        self.items = self.groups[self.first]
        if not self.items:
            raise DataError(
                f"split '{config.split}' of {config.data} has no utterances to compare on"
            )
        for seed in config.prompt_seeds[1:]:
            if self.groups[self.first[0], seed] == self.items:
                raise ConfigError(
                    f"prompt_seeds: {seed} gives the prompts of {config.prompt_seeds[0]}, because "
                    "the corpus names them or has one utterance per speaker; leave prompt_seeds out"
                )
        self.entries = [*make_methods(config.methods, tools.models, config.sampling), *more]
        self.tuned = load_tuned(config.tuned) if config.tuned else None
        if self.tuned:
            self.entries = self.tuned.beside(self.entries)
        # texts of a list have no recordings
        bounded = config.references and self.first[0] == SPLIT
        self.references = [RECORDING] if bounded and tools.recording is not None else []
        self.references += [RESYNTHESIS] if bounded else []
        self.names = [*self.references, *(e.name for e in self.entries)]
        # sentence on the training of FAR and CAR, if FAR takes part
        with_far = any(e.settings["method"] == "far" for e in self.entries)
        self.training = tools.training if with_far else ""
        self.parameters = sum(p.numel() for p in tools.models.decoder.parameters())

    def entries_of(self, texts: str) -> list[Entry]:
        """Return the methods that decode a set of texts: all of them if it is the first, else
        those without a limit."""
        return [e for e in self.entries if texts == self.first[0] or not e.limit]

    def _jobs(self, group: Group) -> list[Job]:
        """Return the jobs of all processes for a group."""
        return plan(
            self.groups[group],
            self.entries_of(group[0]),
            self.config.seeds,
            self.config.batch_size,
            self.references if group == self.first else (),
        )

    def make_records(self) -> dict[Group, Maker]:
        """Make the records of this process and return the makers by group. Only the first group
        has references and audio."""
        config, tools, state = self.config, self.tools, self.state
        store = RecordStore(self.out / "records", state.process_index)
        done = store.read()
        if state.is_main_process:  # partial audio files of a killed run
            for part in (self.out / "audio").glob(".*"):
                part.unlink()
        # all processes must have read before one writes
        self.meeting.wait("reading the records of earlier runs")
        store.open()
        # audio of utterances that every method decodes
        shared = chosen_of(self.items, min((e.limit for e in self.entries if e.limit), default=0))
        kept = [shared[i] for i in spread(len(shared), config.audio_utterances)]
        makers = {
            group: Maker(
                tools,
                items,
                self.entries,
                config.seeds,
                kept if group == self.first else (),
                self.out,
                store,
                done,
            )
            for group, items in self.groups.items()
        }
        mine = [
            [
                job
                for job in self._jobs(group)
                if job.owner % state.num_processes == state.process_index
            ]
            for group in makers
        ]
        total = sum(len(job.indices) for jobs in mine for job in jobs)
        earlier: list[Record] = []  # an utterance may have the same prompt with several seeds
        # disable=None: no bar without a terminal
        with tqdm(
            total=total,
            desc="1/3 decode, transcribe",
            unit="utt",
            mininterval=1,
            disable=None if state.is_main_process else True,
        ) as bar:
            for maker, jobs in zip(makers.values(), mine, strict=True):
                maker.adopt(earlier)
                for job in jobs:
                    bar.set_postfix_str(job.method)
                    maker.run(job, bar.update)
                earlier += maker.done.values()
        return makers

    def finish(self, makers: dict[Group, Maker]) -> dict[str, Any]:
        """Time the methods, write tables, pictures and the report, and return the content of
        compare.json."""
        config, out = self.config, self.out
        records = self._gather(makers)
        save_config(config, out / "config.yaml")
        sets = list(dict.fromkeys(texts for texts, _ in self.groups))
        timings = self._time(sets)
        with tqdm(
            total=3 + len(sets), desc="3/3 tables, pictures", unit="part", disable=None
        ) as bar:
            measured = []
            for texts in sets:
                measured.append(self._measured(texts, records[texts], timings[texts]))
                bar.update()
            first, *more = measured
            result = {
                **self._header(),
                **first,
                "by_length": by_length(
                    records[sets[0]], [r["method"] for r in first["rows"]], config.resamples
                ),
                "more_texts": more,
            }
            result["samples"] = self._samples(makers[self.first])
            bar.update()
            samples = [
                voice["audio"]
                for sample in result["samples"]
                for voice in sample["voices"]
                if voice["audio"]
            ]
            result["files"] = {
                name: digest(out / name) for name in ("records.jsonl", "config.yaml", *samples)
            }
            write_json(out / "compare.json", result)
            write_text(out / "compare.txt", table_text(result) + "\n")
            bar.update()
            draw_plots(first["rows"], out)
            if config.report:
                write_report(out, training_log=config.training_log)
            bar.update()
            return result

    def _time(self, sets: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the timings by set of texts."""
        config, tools = self.config, self.tools
        chosen = {texts: self.groups[texts, self.first[1]] for texts in sets}
        total = sum(min(config.timing_utterances, len(items)) for items in chosen.values())
        with tqdm(
            total=total, desc="2/3 time at batch 1", unit="utt", disable=None if total else True
        ) as bar:
            return {
                texts: time_methods(
                    items,
                    tools.vocoder,
                    self.entries_of(texts),
                    config.seeds[0],
                    config.timing_utterances,
                    self.out,
                    [tools.identity, texts],
                    bar.update,
                )
                for texts, items in chosen.items()
            }

    def _measured(
        self, texts: str, records: Sequence[Record], timings: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the part of compare.json that each set of texts has."""
        config, tools = self.config, self.tools
        names = list(by_method(records))
        distances = None if tools.codebook is None else code_distances(tools.codebook)
        rows = make_rows(records, names, timings, config.resamples, list(tools.scorers), distances)
        samplings = {e.name: e.sampling for e in self.entries}
        for row in rows:
            if sampling := samplings.get(row["method"]):
                row |= {
                    "temperature": sampling.temperature,
                    "top_k": sampling.top_k,
                    "top_p": sampling.top_p,
                }
        counts = {name: by_utterance(spoken) for name, spoken in by_method(records).items()}
        axes = [axis for axis in (speed_axis(rows), "tokens_per_pass") if axis]
        items = self.groups[texts, self.first[1]]
        categories = {i.utterance_id: i.category for i in items}
        return {
            "texts": texts,
            "title": title_of(texts),
            "utterances": len(items),
            "rows": rows,
            "equal_speed": [
                p for axis in axes for p in equal_speed(rows, counts, axis, config.resamples)
            ],
            "by_category": by_category(records, names, categories, config.resamples),
            "power": power_statement(rows),
        }

    def _gather(self, makers: dict[Group, Maker]) -> dict[str, list[Record]]:
        """Collect the records of this comparison from all shards, one per (method, seed,
        prompts, utterance), sorted, by set of texts, and write records.jsonl. Records of further
        sets have a field `texts`, those of further prompt seeds a field `prompt_seed`."""
        config, names = self.config, self.names
        records: dict[str, list[Record]] = {}
        for (texts, prompt_seed), maker in makers.items():
            maker.adopt(maker.store.read())
            further: Record = {"texts": texts} if texts != self.first[0] else {}
            if prompt_seed != self.first[1]:
                further["prompt_seed"] = prompt_seed
            wanted = [
                (names.index(job.method), config.seeds.index(job.seed), i)
                for job in self._jobs((texts, prompt_seed))
                for i in job.indices
            ]
            for name, seed, i in sorted(wanted):
                key = names[name], config.seeds[seed], maker.items[i].utterance_id
                if not maker.finished(*key[:2], i):
                    raise DataError(
                        f"{self.out}: no record of {key[0]}, seed {key[1]}, {key[2]}; a process "
                        "stopped early; run the comparison again, it continues"
                    )
                records.setdefault(texts, []).append({**maker.done[key], **further})
        every = (record for of_texts in records.values() for record in of_texts)
        write_text(self.out / "records.jsonl", "".join(json.dumps(r) + "\n" for r in every))
        return records

    def _header(self) -> dict[str, Any]:
        config, tools, decoder = self.config, self.tools, self.tools.models.decoder
        return {
            "format_version": FORMAT_VERSION,
            "recognizer": tools.recognizer.name,
            "recognizer_note": "one waveform at a time; the length of a transcript is "
            "capped by the duration of the audio",
            "normalizer": NORMALIZER,
            "scorers": {
                name: {"kind": s.kind, "setting": s.spec} for name, s in tools.scorers.items()
            },
            "sampling": asdict(config.sampling),
            "seeds": list(config.seeds),
            "prompt_seeds": config.prompt_seeds,
            "corpus": tools.corpus,
            "methods": {e.name: e.identity for e in self.entries},
            "parameters": self.parameters,
            "heads": decoder.config.num_prediction_heads,
            "codes": decoder.config.speech_vocab_size,
            "models": tools.identity,
            "training": self.training,
            "threads": torch.get_num_threads(),
            "processes": self.state.num_processes,
            "device": str(self.state.device),
            "provenance": provenance(precision=precision_of(decoder)),
            "config": asdict(config),
            "tuned": self.tuned.about(self.entries, config.split) if self.tuned else None,
        }

    def _samples(self, maker: Maker) -> list[dict[str, Any]]:
        """Return the utterances whose audio was kept: text, and per method the file, the
        transcript and the chunks."""
        tools, samples = self.tools, list[dict[str, Any]]()
        for i in maker.audio:
            item = self.items[i]
            voices = []
            for name in self.names:
                record = maker.done[name, maker.first_seed, item.utterance_id]
                audio = maker.audio_path(name, i)
                # pictures are large, and one sentence is enough as an example
                picture = None if samples else sample_picture(tools, record, item.text, audio)
                voices.append(
                    {
                        "method": name,
                        "audio": str(audio.relative_to(maker.out)) if record["duration"] else None,
                        "picture": picture and str(picture.relative_to(maker.out)),
                        **{k: record.get(k) for k in SHOWN},
                    }
                )
            prompt_audio = None
            if tools.recording is not None:
                prompt_audio = maker.audio_path("prompt", i)
                save_opus(prompt_audio, *tools.recording(item.prompt_utterance_id))
            samples.append(
                {
                    "id": item.utterance_id,
                    "text": item.text,
                    "speaker": item.speaker,
                    "prompt_audio": prompt_audio and str(prompt_audio.relative_to(maker.out)),
                    "voices": voices,
                }
            )
        return samples


def spread(size: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices below `size`, or all of them if there are fewer.
    Utterances are sorted by id, so this covers the speakers as well."""
    return np.linspace(0, size - 1, min(count, size)).round().astype(int).tolist()


CONFIG = CompareConfig


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # one logs a line per utterance, the other a line about fonts
    for verbose in ("faster_whisper", "matplotlib"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    config = load_config(CONFIG, arguments)
    result = run_claimed(run, config)
    state = PartialState()
    if state.is_main_process:
        print(f"\n{terminal_text(result, Path(config.out))}")
    state.destroy_process_group()
