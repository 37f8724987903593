"""The one decoding loop, and the chunk-wise methods that need no verification."""

from dcar.decoding.chunks import (
    AfterDraw,
    Choice,
    ChunkMethod,
    ChunkSchedule,
    CoherentChunk,
    Confidence,
    FixedChunk,
    PolicyChunk,
    RandomChunk,
    ShuffledChunk,
    SureLast,
)
from dcar.decoding.loop import Draft, Kept, Method, Session, decode
from dcar.decoding.records import DecodeResult, Prompt

__all__ = [
    "AfterDraw", "Choice", "ChunkMethod", "ChunkSchedule", "CoherentChunk", "Confidence", "DecodeResult", "Draft",
    "FixedChunk", "Kept", "Method", "PolicyChunk", "Prompt", "RandomChunk", "Session",
    "ShuffledChunk", "SureLast", "decode",
]
