"""Scorers by name: speaker similarity (Resemblyzer, WavLM, ERes2Net) and predicted quality (DNSMOS,
UTMOS).

`resemblyzer` compares with the embedding in the prompt's features, `wavlm:FOLDER_OR_NAME` is a
`WavLMForXVector` of transformers, `eres2net:FILE.onnx` a 3D-Speaker model as sherpa-onnx publishes
it. `dnsmos` and `dnsmos-p808` are packaged networks, `utmos:CLONE#WEIGHTS.pt` is the UTMOS22 strong
learner of tarepan/SpeechMOS.

The last two similarities compare recordings, so they need those of the prompts (`PromptAudio`).
Scores of different scorers are not comparable; the name of the scorer is part of every table, and
ends in a digest of its weights, or of the code of a scorer of your own, if these may change. The
setting `scorers` of a comparison takes any of them, each with a column of its own (`load_scorers`).
It also takes a scorer of your own, a class or function of (waveform, sample rate), given by its
dotted path.
"""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, resample
from dcar.errors import AssetError, AudioError, CheckpointError, ConfigError, DataError
from dcar.sources.code import code_digest
from dcar.sources.hub import from_hub, identified, read_weights
from dcar.sources.packages import imported
from dcar.tokens.base import check_waveform
from dcar.vocoder.base import PromptAudio
from eval.scorers.metrics import ListeningQuality, NoiseQuality, SpeakerSimilarity, onnx_session

SIMILARITIES = ("resemblyzer", "wavlm", "eres2net")
Similarity = Callable[[np.ndarray, int, np.ndarray], float | None]
Quality = Callable[[np.ndarray, int], float | None]
PACKAGED: dict[str, Callable[[], Quality]] = {
    "dnsmos": NoiseQuality,
    "dnsmos-p808": ListeningQuality,
}
"""Classes of the scorers that need no file."""


@dataclass(frozen=True)
class Scorer:
    """Column of a comparison; `kind` is similarity (a cosine) or quality (a predicted rating)."""

    name: str
    kind: str
    spec: str
    score: Similarity | Quality

    def __call__(self, wave: np.ndarray, sample_rate: int, speaker: np.ndarray) -> float | None:
        """Score a float32 mono waveform [samples]; speaker: the features of its prompt.

        Returns None if there is nothing to score (no samples, or silence where voices are
        compared). Raises DataError for a score that is not a finite number.
        """
        if len(wave) == 0:
            return None
        voice = (speaker,) if self.kind == "similarity" else ()
        score = self.score(wave, sample_rate, *voice)
        if score is not None and not np.isfinite(score):
            raise DataError(
                f"{self.name}: gave {score} for {len(wave) / sample_rate:.2f} s of audio; its "
                "weights are broken or it cannot read such audio: leave it out of `scorers`"
            )
        return score


class VoiceEncoder(Protocol):
    """Encoder from a waveform to an embedding of unit norm."""

    name: str

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray: ...


def _voice_at_16k(wave: np.ndarray, sample_rate: int, where: str) -> np.ndarray:
    wave = check_waveform(wave, where)
    if not np.abs(wave).max() > 1e-6:
        raise AudioError(f"{where}: the waveform is silent; give speech")
    wave = resample(wave, sample_rate, ENCODER_SAMPLE_RATE)
    shortest = ENCODER_SAMPLE_RATE // 2  # embeddings need at least half a second
    return np.pad(wave, (0, max(0, shortest - len(wave))))


class WavLMEncoder:
    """X-vectors of a WavLM that was fine-tuned for speaker verification, loaded by transformers."""

    def __init__(self, source: str | Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoFeatureExtractor, WavLMForXVector

        self.device = device
        self._extractor: Any = from_hub(
            AutoFeatureExtractor.from_pretrained, source, "a WavLM feature extractor"
        )
        model: Any = from_hub(
            WavLMForXVector.from_pretrained, source, "a WavLM x-vector model", dtype=torch.float32
        )
        self.name = identified(f"wavlm:{Path(source).resolve().name}", source)
        self._model = model.to(device).eval()

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the embedding [D] float32, of unit norm. Raises AudioError for invalid or
        silent audio."""
        import torch

        wave = _voice_at_16k(wave, sample_rate, self.name)
        inputs = self._extractor(
            wave, sampling_rate=ENCODER_SAMPLE_RATE, return_tensors="pt"
        ).input_values
        with torch.inference_mode():
            embedding = self._model(inputs.to(self.device)).embeddings[0]
        return torch.nn.functional.normalize(embedding, dim=0).cpu().numpy()


def kaldi_fbank(wave: np.ndarray, mels: int = 80) -> np.ndarray:
    """Return Kaldi's log mel filter bank [frames, mels] of a 16 kHz waveform in −1…1: 25 ms
    Povey windows every 10 ms, snipped edges, no dither."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(
        257,
        mels,
        20.0,
        8000.0,
        ENCODER_SAMPLE_RATE,
        norm=None,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    return spectrogram(
        wave.astype(np.float64),
        window_function(400, "povey", periodic=False),
        frame_length=400,
        hop_length=160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=filters,
        log_mel="log",
        mel_floor=float(np.finfo(np.float32).eps),
        remove_dc_offset=True,
    ).T.astype(np.float32)


class ERes2NetEncoder:
    """3D-Speaker model (ERes2Net, CAM++) in ONNX: filter bank [1, T, 80] minus its mean →
    embedding."""

    def __init__(self, file: str | Path) -> None:
        path = Path(file)
        if not path.is_file():
            raise AssetError(
                f"{path}: no such file; get a 3dspeaker_*eres2net*.onnx from the sherpa-onnx "
                "releases (speaker-recongition-models) and give eres2net:FILE"
            )
        try:
            self._session = onnx_session(path)
        except Exception as error:  # onnxruntime has its own family of errors
            raise CheckpointError(
                f"{path}: not an ONNX model ({str(error)[:120]}); download it again"
            ) from error
        facts = self._session.get_modelmeta().custom_metadata_map
        expected = {"sample_rate": "16000", "feature_normalize_type": "global-mean"}
        wrong = {k: facts.get(k) for k, v in expected.items() if facts.get(k) != v}
        if wrong:
            raise CheckpointError(
                f"{path}: its metadata are {wrong}, a 3D-Speaker export has {expected}; download "
                "one from the sherpa-onnx releases"
            )
        self._scale = 1.0 if facts.get("normalize_samples", "1") == "1" else 32768.0
        self._input = self._session.get_inputs()[0].name
        self.name = identified(f"eres2net:{path.stem}", path)

    def embed(self, wave: np.ndarray, sample_rate: int) -> np.ndarray:
        """Return the embedding [D] float32, of unit norm. Raises AudioError for invalid or
        silent audio."""
        features = kaldi_fbank(_voice_at_16k(wave, sample_rate, self.name) * self._scale)
        features -= features.mean(0, keepdims=True)
        embedding = np.asarray(self._session.run(None, {self._input: features[None]})[0]).reshape(
            -1
        )
        return (embedding / np.linalg.norm(embedding)).astype(np.float32)


class PromptSimilarity:
    """Cosine between the voices of a waveform and of the recording of its prompt."""

    def __init__(self, encoder: VoiceEncoder, prompts: PromptAudio) -> None:
        self.encoder, self.prompts, self.name = encoder, prompts, encoder.name
        self._known: dict[bytes, np.ndarray] = {}

    def __call__(self, wave: np.ndarray, sample_rate: int, speaker: np.ndarray) -> float | None:
        """Score a waveform [samples]; None if it is silent. speaker: the prompt's features, by
        which its recording is found."""
        key = np.ascontiguousarray(speaker, np.float32).tobytes()
        if key not in self._known:
            self._known[key] = self.encoder.embed(*self.prompts(speaker))
        try:
            return float(self.encoder.embed(wave, sample_rate) @ self._known[key])
        except AudioError:
            return None


class UTMOS:
    """UTMOS22 strong learner (Saeki et al. 2022) as ported by tarepan/SpeechMOS: predicted
    naturalness, 1 to 5."""

    def __init__(self, clone: str | Path, weights: str | Path, device: str = "cpu") -> None:
        """Load the network. clone: folder of a clone of tarepan/SpeechMOS (v1.2.0); weights: its
        utmos22_strong_step7459_v1.pt. Raises AssetError or CheckpointError if either is not what
        it should be."""
        folder = Path(clone)
        if not (folder / "speechmos" / "utmos22" / "strong" / "model.py").is_file():
            raise AssetError(
                f"{folder}: not a clone of SpeechMOS; run `git clone -b v1.2.0 "
                "https://github.com/tarepan/SpeechMOS FOLDER` and give utmos:FOLDER#FILE.pt"
            )
        state = read_weights(
            Path(weights), "UTMOS' state dict, from the releases of tarepan/SpeechMOS,"
        )
        # the clone's package has the name of the one with DNSMOS, so that one is set aside during
        # the import and restored after it
        hidden = {
            n: sys.modules.pop(n)
            for n in list(sys.modules)
            if n == "speechmos" or n.startswith("speechmos.")
        }
        sys.path.insert(0, str(folder))
        try:
            model = importlib.import_module("speechmos.utmos22.strong.model").UTMOS22Strong()
            model.load_state_dict(state)
        except ImportError as error:
            raise AssetError(f"{folder}: SpeechMOS cannot be imported ({error})") from error
        except RuntimeError as error:
            raise CheckpointError(
                f"{weights}: not the weights of UTMOS22 strong ({str(error)[:99]})"
            ) from error
        finally:
            sys.path.remove(str(folder))
            for name in [n for n in sys.modules if n == "speechmos" or n.startswith("speechmos.")]:
                del sys.modules[name]
            sys.modules.update(hidden)
        self._model, self.device = model.to(device).eval(), device
        self.name = identified("utmos22-strong", weights)

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Return the score of a float32 mono waveform [samples]."""
        import torch

        audio = torch.from_numpy(resample(wave, sample_rate, ENCODER_SAMPLE_RATE))[None].to(
            self.device
        )
        with torch.inference_mode():
            return float(self._model(audio, ENCODER_SAMPLE_RATE).reshape(-1)[0])


def load_similarity(
    spec: str, prompts: PromptAudio | None = None, device: str = "cpu"
) -> Similarity:
    """Load a speaker similarity by name (see the module). Raises AssetError,
    CheckpointError or ConfigError."""
    kind, _, rest = spec.partition(":")
    if spec == "resemblyzer":
        return SpeakerSimilarity()
    if not rest or kind not in ("wavlm", "eres2net"):
        raise ConfigError(
            f"similarity {spec!r}: choose resemblyzer, wavlm:FOLDER_OR_NAME or eres2net:FILE.onnx"
        )
    if prompts is None:
        raise ConfigError(f"{spec}: compares with recordings; give those of the prompts")
    encoder: VoiceEncoder = WavLMEncoder(rest, device) if kind == "wavlm" else ERes2NetEncoder(rest)
    return PromptSimilarity(encoder, prompts)


def load_scorers(
    specs: Sequence[str], prompts: PromptAudio | None = None, device: str = "cpu"
) -> dict[str, Scorer]:
    """Load scorers by the names in the module's docstring, in the order of `specs`.

    Raises AssetError or CheckpointError if a file is missing or wrong, and ConfigError for an
    unknown name and for two scorers of one name, which a table could not distinguish.
    """
    loaded: dict[str, Scorer] = {}
    for spec in specs:
        prefix, _, files = spec.partition(":")
        score: Any
        version = ""
        if prefix in SIMILARITIES:
            score = load_similarity(spec, prompts, device)
        elif spec in PACKAGED:
            score = PACKAGED[spec]()
        elif prefix == "utmos" and "#" in files:
            score = UTMOS(*_clone_and_weights(files), device)
        elif (score := _own_scorer(spec)) is not None:
            version = f"@{code_digest(score)[:8]}"
        else:
            raise ConfigError(
                f"scorer {spec!r}: choose {', '.join(PACKAGED)}, utmos:CLONE#WEIGHTS.pt, "
                "resemblyzer, wavlm:FOLDER_OR_NAME or eres2net:FILE.onnx"
            )
        name = getattr(score, "name", getattr(score, "__name__", spec)) + version
        if name in loaded:
            raise ConfigError(
                f"scorers: {loaded[name].spec!r} and {spec!r} are both called {name!r}; rename the "
                "folder or file of one, or leave it out"
            )
        kind = "similarity" if prefix in SIMILARITIES else "quality"
        loaded[name] = Scorer(name, kind, spec, score)
    return loaded


def _clone_and_weights(files: str) -> tuple[str, str]:
    """Split CLONE#WEIGHTS.pt, in whose paths there may be further `#`."""
    places = [i for i, character in enumerate(files) if character == "#"]
    at = next((i for i in places if Path(files[:i]).is_dir()), places[0])
    return files[:at], files[at + 1 :]


def _own_scorer(spec: str) -> Quality | None:
    """Return the scorer that a dotted path names, a class or a function; None if `spec` is no
    such path."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", spec):
        return None
    named = imported(f"scorer {spec!r}", spec)
    score = named() if isinstance(named, type) else named
    if not callable(score):
        raise ConfigError(
            f"scorer {spec!r}: {named!r} cannot be called; give a function of a waveform [samples] "
            "and its sample rate"
        )
    return score
