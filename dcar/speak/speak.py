"""`dcar speak`: text and a voice in, a waveform and the timeline of its chunks out, written
while it is decoded."""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcar.audio import audio_writer, check_suffix
from dcar.config import load_config, setting
from dcar.config.commands import DecoderSettings, SeedSettings, VocoderSettings
from dcar.decoding import DecodeResult
from dcar.errors import ConfigError, TextError
from dcar.model.companions import language_for, text_units
from dcar.model.load import Shipped, load_decoder_config
from dcar.process import claimed
from dcar.progress import Progress
from dcar.sampling import SamplingConfig
from dcar.speak.defaults import DIALS, FIXED_SIZE, NUM_CANDIDATES, POLICY, SAMPLING
from dcar.speak.phrases import MAX_TEXT, Phrase, phrases
from dcar.speak.speaker import Speaker, timeline_of
from dcar.speak.voice import voices_text
from dcar.text.languages import language_of

SHOWN = 20  # phrases whose chunks are printed; of more only the sums


@dataclass
class SpeakConfig(SeedSettings, VocoderSettings, DecoderSettings):
    """`dcar speak`: text and a voice in, a waveform and the timeline of its chunks out."""

    decoder: str = "starter"
    text: str = setting(
        "",
        "Text to speak; several sentences are decoded one by one. - = standard input.",
        positional=True,
        prose=True,
    )
    file: str = setting("", "Text file to read aloud instead (UTF-8).", place="file")
    voice: str = setting(
        "",
        "Name of a shipped voice, or a recording of 1 s or more; empty = the first shipped voice.",
    )
    voices: bool = setting(False, "Whether to list the shipped voices and exit.")
    out: str = setting(
        "",
        "File to write; the suffix chooses the format. Empty = out.wav, and none with stream.",
        short="-o",
        place="file",
    )
    method: str = setting(
        "",
        "dcar, dcar-sampled, car-K, or far; empty = dcar with the shipped decoder, a "
        f"policy, a dial or num_candidates, else car-{FIXED_SIZE}.",
    )
    policy: str = setting(
        POLICY, "Folder of an exported policy; starter-t1.0 and starter-t0.4 ship."
    )
    tokenizer: str = setting("starter", "Folder, or a name that dcar.tokens.load lists.")
    language: str = setting(
        "",
        "Language of the text, a code of ISO 639; empty = the only one that the decoder speaks.",
    )
    device: str = setting("cpu", "Device: cpu, cuda, or auto = a GPU if there is one.")
    dial: float = setting(
        0.0,
        "Shift of the policy in nats per token: above 0 to longer chunks and less time, below 0 "
        "to shorter ones.",
        minimum=DIALS[0],
        maximum=DIALS[1],
    )
    num_candidates: int = setting(
        0,
        "Chunks drawn side by side, of which the best-scored is spoken, for a "
        f"policy that can tell; 0 = {NUM_CANDIDATES} for such a policy, else 1.",
        minimum=0,
    )
    stream: bool = setting(
        False,
        "Whether to write 16-bit mono samples to standard output during decoding (… | aplay -r "
        "24000 -f S16_LE); the timeline goes to standard error.",
    )
    sampling: SamplingConfig = setting(lambda: SAMPLING, "Sampling of tokens.", bare=True)


def read_text(options: SpeakConfig) -> str:
    """Return the text to speak. Raises ConfigError if it is given twice or not at all, TextError
    if it cannot be read."""
    if bool(options.text) == bool(options.file):
        raise ConfigError(
            'give a text in one of these ways: dcar speak "a text", dcar speak --file FILE.txt, '
            "or … | dcar speak -"
        )
    if not options.file and options.text != "-":
        return options.text
    name = f"file {options.file}" if options.file else "standard input"
    try:
        with (
            open(options.file, "rb")
            if options.file
            else contextlib.nullcontext(sys.stdin.buffer) as source
        ):
            return source.read(4 * MAX_TEXT + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}: not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise TextError(f"{name}: cannot be read ({error.strerror}); check the path") from None


CONFIG = SpeakConfig


def main(arguments: list[str] | None = None) -> None:
    options = load_config(CONFIG, arguments)
    if options.voices:
        print(voices_text())
        return
    if options.stream and sys.stdout.isatty():
        raise ConfigError(
            "--stream writes raw samples, but standard output is a terminal; pipe them into a "
            "player (… --stream | aplay -r 24000 -f S16_LE) or a file (… --stream > out.raw), or "
            "omit --stream"
        )
    text = read_text(options)
    which: Shipped = "far" if options.method == "far" else "decoder"
    units = text_units(options.decoder, which)
    config = load_decoder_config(options.decoder, which)
    language = language_of(language_for(units, config, options.language))
    # what cannot be spoken or written is refused before models are loaded
    parts = phrases(text, units, language)
    out = options.out or ("" if options.stream else "out.wav")
    if out:
        check_suffix(out)
    folder = Path(out).parent
    is_new = not folder.exists()
    with claimed(out):
        if is_new:
            print(f"made the folder {folder}", file=sys.stderr)
        speak(options, text, parts, out)


def speak(options: SpeakConfig, text: str, parts: Sequence[Phrase], out: str) -> None:
    """Speak a text, which has these phrases, into the file `out` (empty = none) and to standard
    output."""
    speaker = Speaker.load(
        options.decoder,
        policy=options.policy,
        tokenizer=options.tokenizer,
        vocoder=options.vocoder,
        method=options.method,
        sampling=options.sampling,
        seed=options.seed,
        dial=options.dial,
        num_candidates=options.num_candidates,
        dtype=options.dtype,
        device=options.device,
    ).using(language=options.language)
    voice = speaker.voice(options.voice or None)
    notes, started = sys.stderr if options.stream else sys.stdout, time.perf_counter()
    pieces = speaker.stream(text, voice) if options.stream else speaker.sentences(text, voice)
    results: list[DecodeResult] = []
    samples = 0
    gone: BrokenPipeError | None = None
    with (
        audio_writer(out, speaker.vocoder.sample_rate)
        if out
        else contextlib.nullcontext(lambda _: None) as write,
        Progress(
            total=len(parts),
            desc="speaking",
            unit="phrase",
            disable=len(parts) <= 3,
        ) as bar,
    ):
        for piece in pieces:
            if options.stream and gone is None:
                if not samples and len(piece.samples):
                    print(
                        f"first audio after {time.perf_counter() - started:.3f} s", file=sys.stderr
                    )
                try:
                    sys.stdout.buffer.write((piece.samples * 32767).astype("<i2").tobytes())
                    sys.stdout.buffer.flush()
                except BrokenPipeError as error:
                    gone = error  # the player has ended; a file is completed
                    if not out:
                        break
            write(piece.samples)
            samples += len(piece.samples)
            if piece.result is not None:
                results.append(piece.result)
                bar.update()
    if gone is not None:
        raise gone
    seconds, spoken = time.perf_counter() - started, samples / speaker.vocoder.sample_rate
    if len(parts) <= SHOWN:
        print(timeline_of([p.text for p in parts], results, speaker.tokenizer.rate_hz), file=notes)
    else:
        tokens, passes = sum(len(r.tokens) for r in results), sum(r.passes for r in results)
        print(
            f"{len(parts)} phrases, {tokens} tokens in {passes} passes ({tokens / passes:.2f} a "
            f"pass), {sum(r.truncated for r in results)} cut by the length guard",
            file=notes,
        )
    print(
        f"{out or 'spoken'}: {spoken:.2f} s by {speaker.method.name}, in {seconds:.2f} s "
        f"({seconds / spoken:.2f} of real time)",
        file=notes,
    )
