"""`dcar speak`: text and a prompt voice in, a waveform and the timeline of its chunks out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dcar.audio import check_suffix
from dcar.config import load_config, setting
from dcar.config.schema import seed_setting
from dcar.errors import ConfigError
from dcar.process import run_command
from dcar.sampling import SamplingConfig
from dcar.speak.defaults import METHOD, NUM_CANDIDATES, POLICY, SAMPLING
from dcar.speak.phrases import phrases
from dcar.speak.speaker import Piece, Speaker


@dataclass
class SpeakConfig:
    """`dcar speak`: text and a prompt voice in, a waveform and the timeline of its chunks out."""

    text: str = setting(meaning="What is said; several sentences are spoken one by one.", positional=True)
    prompt: str | None = setting(None, "Recording of the voice to speak with, 1 s or more; null = a starter voice.",
                                 place="file")
    out: str = setting("out.wav", "File to write; the suffix chooses the format.", old=("output",), short="-o",
                       place="file")
    method: str = setting("", "dcar, dcar-sampled, car-K, or far; empty = dcar with a policy, a dial or draws, "
                              f"else {METHOD}.")
    decoder: str = setting("starter", "Directory of a decoder (far: of a FAR decoder).")
    policy: str = setting(POLICY, "Directory of an exported policy, or starter, which was trained at temperature 1.",
                          names=("starter", POLICY))
    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")
    tokenizer: str = setting("starter", "Folder, or a name that dcar.tokens.load lists.")
    dial: float = setting(0.0, "Turns the policy: above 0 to longer chunks and less time, below 0 to shorter ones; "
                               "nats a token, -2 to 2 is far.")
    num_candidates: int = setting(0, "Chunks drawn side by side, of which the best-scored is spoken, for a "
                            f"policy that can tell; 0 = {NUM_CANDIDATES} for such a policy, else 1.",
                                  minimum=0, old=("draws",))
    seed: int = seed_setting(0, "Of the draws.")
    stream: bool = setting(False, "Also write 16-bit mono samples to standard output while speaking (… | aplay "
                                  "-r 24000 -f S16_LE); the timeline goes to standard error.")
    sampling: SamplingConfig = setting(lambda: SAMPLING, "How tokens are drawn.", flat=True)


def main(arguments: list[str] | None = None) -> None:
    options = load_config(SpeakConfig, arguments)
    if options.stream and sys.stdout.isatty():
        raise ConfigError("--stream writes raw samples, and standard output is a terminal; pipe them into a player "
                          "(… --stream | aplay -r 24000 -f S16_LE) or a file (… --stream > out.raw), or leave --stream "
                          "out")
    phrases(options.text)  # what cannot be spoken or written is refused before models are loaded
    check_suffix(options.out)
    speaker = Speaker.load(options.decoder, policy=options.policy, tokenizer=options.tokenizer, vocoder=options.vocoder,
                           method=options.method, sampling=options.sampling, seed=options.seed,
                           dial=options.dial, num_candidates=options.num_candidates)
    voice = speaker.voice(options.prompt)
    started = time.perf_counter()
    if options.stream:
        spoken = speaker.join(options.text, write_samples(speaker.stream(options.text, voice)))
    else:
        spoken = speaker.say(options.text, voice)
    seconds = time.perf_counter() - started
    spoken.save(options.out)
    notes = sys.stderr if options.stream else sys.stdout
    print(spoken.timeline(), file=notes)
    print(f"{options.out}: {spoken.seconds:.2f} s by {speaker.method.name}, in {seconds:.2f} s "
          f"({seconds / spoken.seconds:.2f} of real time)", file=notes)


def write_samples(pieces: Iterable[Piece]) -> list[Piece]:
    """Write the samples of a stream to standard output as they come; returns the pieces."""
    started = time.perf_counter()
    heard: list[Piece] = []
    for piece in pieces:
        if not heard:
            print(f"first audio after {time.perf_counter() - started:.3f} s", file=sys.stderr)
        heard.append(piece)
        sys.stdout.buffer.write((piece.samples * 32767).astype("<i2").tobytes())
        sys.stdout.buffer.flush()
    return heard


if __name__ == "__main__":
    sys.exit(run_command("dcar.speak.speak", main))
