"""DCAR: chunk-wise autoregressive text-to-speech with a learned chunk policy.

model = dcar.load("starter")
model.generate("The tide came in.").save("out.wav")
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "load": "dcar.speak.speaker",
    "Speaker": "dcar.speak.speaker",
    "Spoken": "dcar.speak.speaker",
    "ChunkRule": "dcar.decoding",
    "Choice": "dcar.decoding",
    "decoding_method": "dcar.decoding.declare",
    "SamplingConfig": "dcar.sampling",
}


def __getattr__(name: str) -> Any:
    """Import the most used names on first access: `import dcar` alone loads no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'dcar' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
