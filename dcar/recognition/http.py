"""Recognisers and scorers behind HTTP, with time-outs, retries and back-off.

Two ways to ask:

- plain: POST of a 16-bit mono WAV (`audio/wav`); the answer is JSON with `text` (recogniser) or `score` (scorer);
- `openai:URL#MODEL`: the multipart form of OpenAI's `/v1/audio/transcriptions`, which vLLM and others serve.

Connections that fail, time-outs, broken answers and the statuses 408, 429, 500, 502, 503 and 504 are tried again after
`backoff` · 2ⁿ seconds (or what `Retry-After` says); any other status is an error at once.
"""

from __future__ import annotations

import logging
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from dcar.audio import ENCODER_SAMPLE_RATE, audio_bytes
from dcar.errors import AssetError, ServiceError
from dcar.recognition.base import to_recognizer_rate

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
WAV = {"Content-Type": "audio/wav"}
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line a request


@dataclass(frozen=True)
class Retry:
    """Attempts, time limit and waits, in seconds, of one request or batch."""

    attempts: int = 5
    timeout: float = 60.0  # of one attempt
    backoff: float = 0.5  # before the second attempt; doubles
    longest_wait: float = 30.0


def post(url: str, retry: Retry, **request: Any) -> dict[str, Any]:
    """The JSON object that a service answers to a POST; ServiceError after the last attempt, or at once for a refused
    request. request: content, headers, data, files as httpx takes them."""
    cause = ""
    for attempt in range(retry.attempts):
        wait = min(retry.backoff * 2**attempt, retry.longest_wait)
        try:
            response = httpx.post(url, timeout=retry.timeout, follow_redirects=True, **request)
            if response.is_success:
                answer = response.json()
                if isinstance(answer, dict):
                    return answer
                cause = f"answered a JSON {type(answer).__name__}, not an object"
            else:
                cause = f"status {response.status_code}: {response.text[:200].strip()}"
                if response.status_code not in RETRIED:
                    raise ServiceError(f"{url}: refused the request ({cause}); correct address or service")
                if (after := response.headers.get("Retry-After", "")).isdigit():
                    wait = min(float(after), retry.longest_wait)
        except ValueError as error:  # json.JSONDecodeError, UnicodeDecodeError
            cause = f"answered something else than JSON ({error})"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause = f"{type(error).__name__}: {error}"
        if attempt + 1 < retry.attempts:
            time.sleep(wait)
    raise ServiceError(f"{url}: no usable answer in {retry.attempts} attempts, at last {cause}; is the service up?")


def wav_bytes(wave: np.ndarray, sample_rate: int) -> bytes:
    """A 16-bit mono WAV file at 16 kHz. AudioError for bad audio."""
    return audio_bytes(to_recognizer_rate(wave, sample_rate), ENCODER_SAMPLE_RATE)


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
        request: dict[str, Any] = {"content": audio, "headers": WAV}
        if self.model:
            form = {"model": self.model, "language": "en", "temperature": "0", "response_format": "json"}
            request = {"data": form, "files": {"file": ("audio.wav", audio, "audio/wav")}}
        answer = post(self.url, self.retry, **request)
        if not isinstance(answer.get("text"), str):
            raise ServiceError(f"{self.url}: the answer has no string `text` (it has {', '.join(answer) or 'nothing'})")
        return answer["text"].strip()


class HTTPScorer:
    """A service that rates a waveform (predicted naturalness, say): (wave, rate) → number, as metrics are called."""

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        self.url, self.retry = check_url(url), retry or Retry()
        self.name = f"http:{url}"

    def __call__(self, wave: np.ndarray, sample_rate: int) -> float | None:
        """Score of a float32 mono waveform [samples]; None for an empty one. Raises ServiceError."""
        if len(wave) == 0:
            return None
        answer = post(self.url, self.retry, content=wav_bytes(wave, sample_rate), headers=WAV)
        score = answer.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not np.isfinite(score):
            raise ServiceError(f"{self.url}: the answer has no finite number `score` (it has {score!r})")
        return float(score)
