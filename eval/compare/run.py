"""Compare decoding methods on the same utterances: one table, one JSON, the plots, one report.

    accelerate launch -m dcar.cli compare --config compare_starter limit=100
    dcar compare --config compare_starter:all out=runs/all

FAR, CAR-k, DCAR and other methods decode the same held-out texts with the same prompts, sampling
and seeds. One vocoder synthesises the tokens, and one recogniser that took no part in training
transcribes them. Two reference rows bound the word errors that the recogniser can measure: the
recordings themselves, and their tokens resynthesised by the same vocoder.

plan     comparisons: these methods × these utterances × these seeds (eval/compare/plan.py)
records  decode, synthesise, transcribe, score (eval/compare/maker.py)
times    batch 1, every process its own utterances (eval/results/timing.py)
measure  rows and tests (eval/results)
show     compare.json, tables, plots, report.html (eval/report)

An interrupted comparison continues where it stopped, with any number of processes and with the same
result.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from dcar.config import load_config, save_config
from dcar.errors import ConfigError, DataError, ProcessError
from dcar.methods import Entry, make_methods
from dcar.model.precision import precision_of
from dcar.process import own_device, run_claimed
from dcar.progress import Progress
from dcar.prompts.items import PromptItem
from dcar.storage import digest, write_text, writing
from dcar.text.languages import normalizers_of
from dcar.tokens.warping import code_distances
from dcar.tracking import provenance
from eval.compare.config import CompareConfig
from eval.compare.maker import Maker, save_opus
from eval.compare.plan import (
    Comparison,
    choose_items,
    name_of,
    plan_comparisons,
    plan_jobs,
)
from eval.compare.processes import Meeting, start, threads_of
from eval.compare.tools import Tools, load_tools
from eval.compare.tuned import Tuned, load_tuned
from eval.report.listen import sample_picture
from eval.report.page import write_report
from eval.report.plots import draw_plots
from eval.report.summary import terminal_text
from eval.report.table import table_text
from eval.results.equal_variety import equal_variety
from eval.results.pareto import equal_speed, speed_axis
from eval.results.rows import by_category, by_length, counts_of, make_rows, power_of
from eval.results.store import RecordStore
from eval.results.timing import chosen_to_time, read_timings, time_methods
from eval.results.training import SHIPPED
from eval.results.types import (
    Measured,
    Record,
    Result,
    Sample,
    ScorerInfo,
    SpokenSample,
    Timing,
    to_json,
    write_result,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compared:
    """Comparisons of a run, with the models and tools that they share."""

    config: CompareConfig
    tools: Tools
    entries: Sequence[Entry]
    comparisons: Sequence[Comparison]
    tuned: Tuned | None
    state: PartialState

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    @property
    def identities(self) -> dict[str, dict[str, str]]:
        """Names and digests of what each method depends on."""
        return {entry.name: dict(entry.identity) for entry in self.entries}

    @property
    def parameters(self) -> int:
        """Number of parameters of the decoder."""
        return sum(p.numel() for p in self.tools.models.decoder.parameters())

    @property
    def training(self) -> str:
        """Sentence on the training of FAR and CAR, if FAR takes part."""
        return self.tools.training if any(e.spec.method == "far" for e in self.entries) else ""


def run(config: CompareConfig, tools: Tools | None = None, more: Sequence[Entry] = ()) -> Result:
    """Run a comparison and return the content of compare.json, on every process. `tools` replaces
    what the config would load; more: methods that have no name to list.

    Raises ConfigError, DataError, CheckpointError. Finished records stay in `out`, and the next run
    uses them.
    """
    state, meeting = start(config)
    if state.is_main_process and tools is None:
        logger.info("loading models (processes: %d)", state.num_processes)
    compared = plan(config, tools or load_tools(config, own_device(config.device)), more, state)
    check_alike(compared, meeting)
    if state.is_main_process and compared.training not in ("", SHIPPED):
        # warn before an hour of decoding; the note is repeated below the table
        logger.warning(compared.training)
    result = None
    with (
        writing(compared.out),
        threads_of(config.threads, compared.parameters, state.num_processes),
    ):
        maker = make_records(compared, meeting)
        meeting.wait("decoding and transcribing")
        take_times(compared)
        meeting.wait("timing")
        if state.is_main_process:
            # other processes have appended to their own shards
            maker.store.read(compared.tools.scorers)
            result = show(compared, maker)
    meeting.wait("writing the table and the report")
    return meeting.share(result)


def check_alike(compared: Compared, meeting: Meeting) -> None:
    """Raise ProcessError if this process has other models, or other code of a method, than the main
    process: it would make records of its own, and the table would be of both."""
    own: dict[str, object] = {**compared.identities, **compared.tools.identity}
    main = meeting.share(own)
    differ = [name for name in own if own[name] != main.get(name)]
    if differ:
        raise ProcessError(
            f"process {compared.state.process_index}: models or code of {', '.join(differ)} differ "
            "from those of process 0; use the same files and the same revision of the code "
            "everywhere, and start again"
        )


# --- plan -----------------------------------------------------------------------------------------


def plan(
    config: CompareConfig, tools: Tools, more: Sequence[Entry], state: PartialState
) -> Compared:
    """Return what is to be compared. Raises ConfigError or DataError for methods, samplings or
    prompts that make no comparison."""
    sets = {
        texts: {s: choose_items(tools.sets[texts][s], config.limit) for s in config.prompt_seeds}
        for texts in config.limits
    }
    first, *others = next(iter(sets.values())).values()
    if not first:
        raise DataError(f"split '{config.split}' of {config.data} has no utterances to compare on")
    for seed, items in zip(config.prompt_seeds[1:], others, strict=True):
        if items == first:
            raise ConfigError(
                f"prompt_seeds: {seed} gives the prompts of {config.prompt_seeds[0]}, because "
                "the corpus names them or has one utterance per speaker; leave prompt_seeds out"
            )
    entries = [*make_methods(config.methods, tools.models, config.sampling), *more]
    tuned = load_tuned(config.tuned) if config.tuned else None
    if tuned:
        entries = tuned.beside(entries)
    comparisons = plan_comparisons(
        sets,
        entries,
        config.seeds,
        config.references,
        tools.recording is not None,
        config.audio_utterances,
    )
    return Compared(config, tools, entries, comparisons, tuned, state)


# --- records and times ----------------------------------------------------------------------------


def make_records(compared: Compared, meeting: Meeting) -> Maker:
    """Make the records that this process has to make, and return their maker."""
    state = compared.state
    store = RecordStore(compared.out / "records", state.process_index)
    store.read(compared.tools.scorers)
    if state.is_main_process:  # partial audio files of a killed run
        for part in (compared.out / "audio").glob(".*"):
            part.unlink()
    # all processes must have read before one writes
    meeting.wait("reading the records of earlier runs")
    store.lines.open()
    maker = Maker(compared.tools, compared.out, store)
    mine = [
        job
        for comparison in compared.comparisons
        for job in plan_jobs(comparison, compared.config.batch_size)
        if job.owner % state.num_processes == state.process_index
    ]
    total = sum(len(job.items) for job in mine)
    with progress(compared, "1/3 decode, transcribe", total) as bar:
        for job in mine:
            bar.set_postfix_str(name_of(job.row))
            maker.run(job, bar.update)
    return maker


def timed(compared: Compared) -> Iterator[tuple[str, list[PromptItem], list[Entry]]]:
    """Iterate over the sets of texts: name, utterances that are timed, and the methods that decode
    any of them."""
    for texts in dict.fromkeys(c.texts for c in compared.comparisons):
        of_texts = [c for c in compared.comparisons if c.texts == texts]
        items = max((c.first_items for c in of_texts), key=len)
        names = {e.name for c in of_texts for e in c.entries}
        entries = [e for e in compared.entries if e.name in names]
        yield texts, chosen_to_time(items, compared.config.timing_utterances), entries


def take_times(compared: Compared) -> None:
    """Time every method on this process' share of the utterances."""
    state = compared.state
    sets = list(timed(compared))
    total = sum(len(items[state.process_index :: state.num_processes]) for _, items, _ in sets)
    with progress(compared, "2/3 time at batch 1", total) as bar:
        for texts, items, entries in sets:
            time_methods(
                items,
                compared.tools.vocoder,
                entries,
                compared.config.seeds[0],
                compared.out / "timings",
                [compared.tools.identity, texts],
                bar.update,
                state.process_index,
                state.num_processes,
            )


@contextmanager
def progress(compared: Compared, title: str, total: int) -> Iterator[Progress]:
    """Show a bar on the main process, if there is something to do."""
    off = not compared.state.is_main_process or not total
    with Progress(total=total, desc=title, unit="utt", mininterval=1, disable=off) as bar:
        yield bar


# --- measure --------------------------------------------------------------------------------------


def records_of(compared: Compared, comparison: Comparison, maker: Maker) -> list[Record]:
    """Return the records of a comparison by row, seed, prompts and utterance. Raises DataError if
    one is missing."""
    records = []
    for row in comparison.rows:
        for seed, prompt_seed, items in comparison.places(row):
            for item in items:
                record = maker.record(row, seed, item)
                if record is None:
                    raise DataError(
                        f"{compared.out}: no record of {name_of(row)}, seed {seed}, "
                        f"{item.utterance_id}; a process stopped early; run the comparison again, "
                        "it continues"
                    )
                records.append(replace(record, texts=comparison.texts, prompt_seed=prompt_seed))
    return records


def measure(
    compared: Compared, comparison: Comparison, records: Sequence[Record], times: Sequence[Timing]
) -> Measured:
    """Return the rows of a comparison, and its tests."""
    tools, resamples = compared.tools, compared.config.resamples
    distances = None if tools.codebook is None else code_distances(tools.codebook)
    samplings = {e.name: e.sampling for e in comparison.entries}
    names = list(map(name_of, comparison.rows))
    rows = make_rows(records, names, times, resamples, list(tools.scorers), distances, samplings)
    spoken = [row for row in rows if row.decodes]
    counts = counts_of(records)
    axes = [axis for axis in (speed_axis(spoken), "tokens_per_pass") if axis]
    categories = {item.utterance_id: item.category for item in comparison.first_items}
    return Measured(
        texts=comparison.texts,
        title=comparison.title,
        limit=comparison.limit,
        utterances=len(comparison.first_items),
        rows=rows,
        pairs=[pair for axis in axes for pair in equal_speed(spoken, counts, axis, resamples)],
        equal_variety=[
            of for axis in axes[::-1] for of in equal_variety(spoken, counts, axis, resamples)
        ],
        by_length=by_length(records, names, resamples),
        by_category=by_category(records, names, categories, resamples),
        power=power_of(spoken),
    )


def samples_of(compared: Compared, comparison: Comparison, maker: Maker) -> list[Sample]:
    """Return the utterances whose audio was kept: text, and per method the file, the transcript and
    the chunks. Pictures are large, and one sentence is enough as an example."""
    tools, samples = compared.tools, list[Sample]()
    heard = comparison.heard if comparison.samples else ()
    for item in comparison.first_items:
        if item.utterance_id not in heard:
            continue
        voices = []
        for row in comparison.rows:
            record = maker.record(row, comparison.seeds[0], item)
            assert record is not None
            audio = maker.audio_path(record.method, item, record.fingerprint)
            picture = None if samples else sample_picture(tools.aligner, record, audio)
            voices.append(
                SpokenSample(
                    record.method,
                    _within(audio, compared.out) if record.duration else None,
                    _within(picture, compared.out),
                    record.hypothesis,
                    record.words,
                    record.duration,
                    record.decoded,
                )
            )
        prompt_audio = None
        if tools.recording is not None:
            prompt_audio = maker.audio_path("prompt", item, maker.fingerprint("prompt", item))
            save_opus(prompt_audio, *tools.recording(item.prompt_utterance_id))
        samples.append(
            Sample(
                item.utterance_id,
                item.text,
                item.speaker,
                _within(prompt_audio, compared.out),
                voices,
                item.language,
            )
        )
    return samples


def _within(path: Path | None, folder: Path) -> str | None:
    return str(path.relative_to(folder)) if path else None


# --- show -----------------------------------------------------------------------------------------


def show(compared: Compared, maker: Maker) -> Result:
    """Measure every comparison, write tables, pictures and the report, and return the content of
    compare.json."""
    config, out = compared.config, compared.out
    times = {
        texts: read_timings(
            items,
            entries,
            config.seeds[0],
            out / "timings",
            [compared.tools.identity, texts],
            compared.state.num_processes,
        )
        for texts, items, entries in timed(compared)
    }
    every: dict[tuple[Any, ...], Record] = {}
    measured = []
    for comparison in Progress(compared.comparisons, desc="3/3 tables, pictures", unit="table"):
        records = records_of(compared, comparison, maker)
        every |= {(r.texts, r.method, r.seed, r.prompt_seed, r.id): r for r in records}
        of = measure(compared, comparison, records, times[comparison.texts])
        of.samples = samples_of(compared, comparison, maker)
        measured.append(of)
    write_text(out / "records.jsonl", "".join(to_json(r) + "\n" for r in every.values()))
    save_config(config, out / "config.yaml")
    result = described(compared, measured)
    voices = [v for of in measured for sample in of.samples for v in sample.voices]
    sounds = [voice.audio for voice in voices if voice.audio]
    result.files = {name: digest(out / name) for name in ("records.jsonl", "config.yaml", *sounds)}
    write_result(out / "compare.json", result)
    write_text(out / "compare.txt", table_text(result) + "\n")
    draw_plots(result.first.rows, out)
    if config.report:
        write_report(out, training_logs=config.training_logs)
    return result


def described(compared: Compared, measured: list[Measured]) -> Result:
    """Return the comparisons with what they share."""
    config, tools, decoder = compared.config, compared.tools, compared.tools.models.decoder
    return Result(
        recognizer=tools.recognizer.name,
        recognizer_note="one waveform at a time; the length of a transcript is capped by the "
        "duration of the audio",
        normalizer=normalizers_of(tools.languages),
        scorers={name: ScorerInfo(s.kind, s.spec) for name, s in tools.scorers.items()},
        sampling=config.sampling,
        seeds=list(config.seeds),
        prompt_seeds=list(config.prompt_seeds),
        corpus=tools.corpus,
        methods=compared.identities,
        models=tools.identity,
        parameters=compared.parameters,
        heads=decoder.config.num_prediction_heads,
        codes=decoder.config.speech_vocab_size,
        training=compared.training,
        tuned=compared.tuned.about(compared.entries, config.split) if compared.tuned else None,
        threads=torch.get_num_threads(),
        processes=compared.state.num_processes,
        device=str(compared.state.device),
        provenance=provenance(precision=precision_of(decoder)),
        config=asdict(config),
        comparisons=measured,
    )


CONFIG = CompareConfig


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # one logs a line per utterance, the other a line about fonts
    for verbose in ("faster_whisper", "matplotlib"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    config = load_config(CONFIG, arguments)
    result = run_claimed(run, config, resumes=True)
    if PartialState().is_main_process:
        print(f"\n{terminal_text(result, Path(config.out))}")
