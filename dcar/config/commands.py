"""Settings that several commands share, declared once.

A command whose defaults differ repeats the field with its default alone (`split: str = "dev"`);
help text and bounds are those declared here.
"""

from dataclasses import dataclass

from dcar.config.schema import seed_setting, setting

DTYPES = ("auto", "float32", "bfloat16")


@dataclass
class OutSettings:
    """Place of the results."""

    out: str = setting("runs/out", "Folder to write.", place="folder")


@dataclass
class DeviceSettings:
    """Device of a run."""

    device: str = setting(
        "auto",
        "Device: cpu, cuda, or auto = a GPU if there is one. Process n of a machine uses GPU n.",
    )


@dataclass
class RunSettings(OutSettings, DeviceSettings):
    """Results, device and batches of a run."""

    batch_size: int = setting(16, "Number of utterances computed at once.", minimum=1)


@dataclass
class DecoderSettings:
    """Decoder, and the precision in which it decodes."""

    decoder: str = setting("runs/car", "Folder of the decoder; starter = the shipped one.")
    dtype: str = setting(
        "auto",
        "Type of the decoder's weights: float32, bfloat16, or auto = bfloat16 on a GPU, float32 on "
        "a CPU.",
        choices=DTYPES,
    )


@dataclass
class DataSettings:
    """Prepared corpus."""

    data: str = setting(
        "runs/prepared",
        "Folder written by `dcar prepare`; starter = the shipped one.",
        place="folder",
    )


@dataclass
class UtteranceSettings(DataSettings):
    """Utterances of a prepared corpus."""

    split: str = setting("test", "Split of the corpus.")
    limit: int = setting(0, "Number of utterances; 0 = the whole split.", minimum=0)


@dataclass
class PromptSettings(UtteranceSettings):
    """Utterances of a prepared corpus, with prompts."""

    prompt_tokens: int = setting(
        50, "Length of the speaker prompt in tokens, as in training.", minimum=1
    )


@dataclass
class VocoderSettings:
    """Vocoder."""

    vocoder: str = setting("starter", "Folder, or a name that dcar.vocoder.load lists.")


@dataclass
class SpeechSettings(VocoderSettings):
    """Vocoder, and the recogniser that transcribes its speech."""

    recognizer: str = setting(
        "moonshine", "Recogniser, by a name that dcar.recognition.load lists."
    )


@dataclass
class WaitSettings:
    """Patience of processes that share a job."""

    wait_minutes: float = setting(
        180.0, "Longest wait of processes for each other, in minutes.", above=0
    )


@dataclass
class SeedSettings:
    """Random numbers of a run."""

    seed: int = seed_setting(0, "Random seed for every choice and draw.")
