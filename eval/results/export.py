"""`dcar report format=versa`: a comparison in the formats of other toolkits, so that they can score the same audio.

    dcar report format=versa run=runs/compare out=runs/export

For every method `out/<method>/` holds, with the id of an utterance as its name,

- `wavs/<id>.wav`: the audio that the comparison kept (set `audio_samples` high enough when comparing);
- VERSA: `pred.scp` and `text` (and `gt.scp` where recordings were kept) to score with `--io soundfile`, and
  `versa.jsonl`, our own scores under VERSA's names;
- seed-tts-eval: `wav_res_ref_text` (`wav|prompt wav|text`), which its scripts read, and `wav_res_ref_text.wer`, our own
  transcripts in the format that its `average_wer.py` reads.

The comparison keeps Ogg Opus, so scores of the wavs are of speech that was coded once more.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dcar.audio import load_audio, save_audio
from dcar.config import load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import DataError
from dcar.text.wer import normalize_transcript
from eval.results.store import RECORDING, Record, by_method, read_jsonl


@dataclass
class ExportConfig:
    """Settings of `dcar report format=versa`."""

    run: str = setting("runs/compare", "Folder of a comparison.", place="folder")
    out: str = setting("runs/export", "Folder to write.", place="folder")
    methods: list[str] = setting([], "Methods to export; empty = all.")
    seed: int = seed_setting(0, "Of the speech that is exported.")


def run(config: ExportConfig) -> list[Path]:
    """Write the files; returns the folder of each method. DataError for no comparison, or one that kept no audio."""
    source, out = Path(config.run), Path(config.out)
    try:
        header = json.loads((source / "compare.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{source}: no finished comparison ({error}); run `dcar compare out={source}`") from error
    try:
        return _export(config, source, out, header)
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise DataError(f"{source}: its compare.json or records.jsonl are not as a comparison writes them "
                        f"({type(error).__name__}: {error}); run the comparison again, finished records are kept"
                        ) from error


def _export(config: ExportConfig, source: Path, out: Path, header: dict[str, Any]) -> list[Path]:
    records = by_method(r for r in read_jsonl(source / "records.jsonl")  # audio is kept with the first prompts only
                        if r["seed"] == config.seed and "prompt_seed" not in r)
    absent = [m for m in config.methods if m not in records]
    if absent or not records:
        raise DataError(f"{source}: no records of {', '.join(absent) or f'seed {config.seed}'}; it has {[*records]}")
    audio = {(v["method"], s["id"]): v["audio"] for s in header["samples"] for v in s["voices"] if v["audio"]}
    prompts = {s["id"]: s["prompt_audio"] for s in header["samples"] if s.get("prompt_audio")}
    if not audio:
        raise DataError(f"{source}: no audio was kept; compare again with audio_samples=N (records are reused)")
    folders = []
    for method in tqdm(config.methods or list(records), desc="export", unit="method", disable=None):
        folder = out / re.sub(r"[^\w.@-]+", "-", method)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [(r, audio[method, r["id"]]) for r in records[method] if (method, r["id"]) in audio]
        wavs = {r["id"]: _wav(source / file, folder / "wavs" / f"{file_name(r['id'])}.wav") for r, file in kept}
        spoken = [r for r, _ in kept]
        write_versa(folder, records[method], spoken, wavs, header.get("asr") or header["judge"])
        truth = {r["id"]: source / audio[RECORDING, r["id"]] for r in spoken if (RECORDING, r["id"]) in audio}
        if truth and method != RECORDING:
            places = {i: _wav(file, folder / "gt" / f"{file_name(i)}.wav") for i, file in truth.items()}
            _lines(folder / "gt.scp", (f"{i} {place}" for i, place in places.items()))
        voices = out / "prompts"
        heard = {i: _wav(source / f, voices / f"{file_name(i)}.wav") for i, f in prompts.items() if i in wavs}
        write_seed_tts_eval(folder, spoken, wavs, heard)
        folders.append(folder)
    return folders


def file_name(utterance_id: str) -> str:
    """An id as the name of a file; ids that need no change keep it, others end in a digest: no two are alike."""
    plain = re.sub(r"[^\w.@-]+", "_", utterance_id)
    if plain == utterance_id and len(plain.encode()) <= 200:  # bytes; file systems take 255, with the suffix
        return plain
    short = plain.encode()[:150].decode(errors="ignore")
    return f"{short}-{hashlib.blake2b(utterance_id.encode(), digest_size=4).hexdigest()}"


def _wav(source: Path, target: Path) -> Path:
    if not target.exists():
        save_audio(target, *load_audio(source))
    return target.resolve()


def _lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_versa(folder: Path, records: list[Record], spoken: list[Record], wavs: dict[str, Path], asr: str) -> None:
    """`pred.scp`, `text` (of what has audio) and `versa.jsonl` (of every record): one JSON object an utterance with its
    `key`, WER and CER counts as VERSA's recognisers name them, `spk_similarity`, `dns_overall` and `utmos`."""
    _lines(folder / "pred.scp", (f"{r['id']} {wavs[r['id']]}" for r in spoken))
    _lines(folder / "text", (f"{r['id']} {' '.join(r['text'].split())}" for r in spoken))
    _lines(folder / "versa.jsonl", (json.dumps(_versa_row(r, asr), ensure_ascii=False) for r in records))


def _versa_row(record: Record, asr: str) -> dict[str, Any]:
    prefix = re.split(r"[-:]", asr)[0]
    row = {"key": record["id"], f"{prefix}_hyp_text": record["hypothesis"], "ref_text": record["text"]}
    for unit, name in (("words", "wer"), ("characters", "cer")):
        replaced, deleted, inserted, total = record[unit]
        row |= {f"{prefix}_{name}_delete": deleted, f"{prefix}_{name}_insert": inserted,
                f"{prefix}_{name}_replace": replaced, f"{prefix}_{name}_equal": total - replaced - deleted}  # fmt: skip
    if record.get("speaker_similarity") is not None:
        row["spk_similarity"] = record["speaker_similarity"]
    for ours, theirs in (("dnsmos", "dns_overall"), ("utmos", "utmos")):
        scores = (score for name, score in record.get("scores", {}).items() if name.startswith(ours))
        if (score := next(scores, None)) is not None:
            row[theirs] = score
    return row


def write_seed_tts_eval(folder: Path, spoken: list[Record], wavs: dict[str, Path], prompts: dict[str, Path]) -> None:
    """`wav_res_ref_text` and `.wer`: wav, WER, reference, hypothesis, insertions, deletions, substitutions by tabs, the
    last three as shares of the reference words. Texts are normalised as in our tables."""
    lines, scores = [], []
    for r in spoken:
        text = " ".join(r["text"].split()).replace("|", " ")
        middle = [str(prompts[r["id"]])] if r["id"] in prompts else []
        lines.append("|".join([str(wavs[r["id"]]), *middle, text]))
        replaced, deleted, inserted, total = r["words"]
        truth, heard = normalize_transcript(r["text"]), normalize_transcript(r["hypothesis"])
        rates = [n / total for n in (replaced + deleted + inserted, inserted, deleted, replaced)]
        scores.append("\t".join([str(wavs[r["id"]]), str(rates[0]), truth, heard, *map(str, rates[1:])]))
    _lines(folder / "wav_res_ref_text", lines)
    _lines(folder / "wav_res_ref_text.wer", scores)


def main(arguments: list[str] | None = None) -> None:
    """The command: prints the folders that it wrote."""
    for folder in run(load_config(ExportConfig, arguments)):
        print(folder)
