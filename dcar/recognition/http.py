"""Recognisers and scorers behind HTTP, with time-outs, retries and back-off.

Two ways to ask:

- plain: POST of a 16-bit mono WAV (`audio/wav`); the answer is JSON with `text` (recogniser) or `score` (scorer);
- `openai:URL#MODEL`: the multipart form of OpenAI's `/v1/audio/transcriptions`, which vLLM and others serve.

Connections that fail, time-outs, broken answers and the statuses 408, 429, 500, 502, 503 and 504 are tried again after
`backoff` · 2ⁿ seconds (or what `Retry-After` says); any other status is an error at once.
"""

from __future__ import annotations

import http.client
import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcar.errors import AssetError, ServiceError
from dcar.recognition.base import SAMPLE_RATE, to_recognizer_rate

RETRIED = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Retry:
    """How patient a client is; times in seconds."""

    attempts: int = 5
    timeout: float = 60.0  # of one attempt
    backoff: float = 0.5  # before the second attempt; doubles
    longest_wait: float = 30.0


def post(url: str, body: bytes, content_type: str, retry: Retry) -> dict[str, Any]:
    """The JSON object that a service answers. ServiceError after the last attempt, or at once for a refused request."""
    cause = ""
    for attempt in range(retry.attempts):
        wait = min(retry.backoff * 2**attempt, retry.longest_wait)
        request = urllib.request.Request(url, data=body, headers={"Content-Type": content_type}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=retry.timeout) as response:
                answer = json.loads(response.read())
            if isinstance(answer, dict):
                return answer
            cause = f"answered a JSON {type(answer).__name__}, not an object"
        except urllib.error.HTTPError as error:
            cause = f"status {error.code}: {error.read(200).decode(errors='replace').strip()}"
            if error.code not in RETRIED:
                raise ServiceError(f"{url}: refused the request ({cause}); correct address or service") from error
            if (after := error.headers.get("Retry-After", "")).isdigit():
                wait = min(float(after), retry.longest_wait)
        except json.JSONDecodeError as error:
            cause = f"answered something else than JSON ({error})"
        except (OSError, http.client.HTTPException) as error:
            cause = f"{type(error).__name__}: {error}"
        if attempt + 1 < retry.attempts:
            time.sleep(wait)
    raise ServiceError(f"{url}: no usable answer in {retry.attempts} attempts, at last {cause}; is the service up?")


def wav_bytes(wave: np.ndarray, sample_rate: int) -> bytes:
    """A 16-bit mono WAV file at 16 kHz. AudioError for bad audio."""
    import soundfile as sf

    buffer = io.BytesIO()
    audio = np.clip(to_recognizer_rate(wave, sample_rate), -1.0, 1.0)
    sf.write(buffer, audio, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def check_url(url: str) -> str:
    """`url`, or AssetError if it is no http(s) address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise AssetError(f"{url!r}: not an address of a service; write http://HOST:PORT/PATH or openai:URL#MODEL")
    return url


class HTTPRecognizer:
    """A recognition service as a `Recognizer`."""

    def __init__(self, url: str, model: str = "", retry: Retry | None = None) -> None:
        """url: where to POST. model: name for OpenAI's form; empty for the plain way."""
        self.url, self.model, self.retry = check_url(url), model, retry or Retry()
        self.name = f"http:{url}" + (f"#{model}" if model else "")

    @classmethod
    def from_spec(cls, spec: str, retry: Retry | None = None) -> HTTPRecognizer:
        """`http://…`, `https://…` or `openai:URL#MODEL`."""
        if not spec.startswith("openai:"):
            return cls(spec, retry=retry)
        url, _, model = spec.removeprefix("openai:").partition("#")
        if not model:
            raise AssetError(f"{spec}: name the model of the service: openai:URL#MODEL")
        return cls(url, model, retry)

    def transcribe(self, waves: list[np.ndarray], sample_rate: int) -> list[str]:
        """See `Recognizer.transcribe`. Raises ServiceError where the service fails."""
        return [self._transcribe(wav_bytes(wave, sample_rate)) for wave in waves]

    def _transcribe(self, audio: bytes) -> str:
        body, kind = self._form(audio) if self.model else (audio, "audio/wav")
        answer = post(self.url, body, kind, self.retry)
        if not isinstance(answer.get("text"), str):
            raise ServiceError(f"{self.url}: the answer has no string `text` (it has {', '.join(answer) or 'nothing'})")
        return answer["text"].strip()

    def _form(self, audio: bytes) -> tuple[bytes, str]:
        boundary = uuid.uuid4().hex
        fields = {"model": self.model, "language": "en", "temperature": "0", "response_format": "json"}
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in fields.items()
        ]
        head = (f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="audio.wav"\r\n'
                "Content-Type: audio/wav\r\n\r\n")  # fmt: skip
        body = b"".join(parts) + head.encode() + audio + f"\r\n--{boundary}--\r\n".encode()
        return body, f"multipart/form-data; boundary={boundary}"


class HTTPScorer:
    """A service that rates a waveform (predicted naturalness, say): (wave, rate) → number, as metrics are called."""

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        self.url, self.retry = check_url(url), retry or Retry()
        self.name = f"http:{url}"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Score of a float32 mono waveform [samples]; None for an empty one. Raises ServiceError."""
        if len(wave) == 0:
            return None
        answer = post(self.url, wav_bytes(wave, sample_rate), "audio/wav", self.retry)
        score = answer.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not np.isfinite(score):
            raise ServiceError(f"{self.url}: the answer has no finite number `score` (it has {score!r})")
        return float(score)
