"""The one decoding loop, and the chunk-wise methods that need no verification."""

from dcar.decoding.chunks import (
    AfterDraw,
    BestOfChunk,
    Choice,
    ChunkMethod,
    ChunkSchedule,
    EndOnConfident,
    FixedChunk,
    PolicyChunk,
    RandomChunk,
    ShuffledChunk,
)
from dcar.decoding.loop import Draft, Kept, Method, Session, decode
from dcar.decoding.records import DecodeResult, Prompt

__all__ = [
    "AfterDraw", "Choice", "ChunkMethod", "ChunkSchedule", "BestOfChunk", "DecodeResult", "Draft",
    "FixedChunk", "Kept", "Method", "PolicyChunk", "Prompt", "RandomChunk", "Session",
    "ShuffledChunk", "EndOnConfident", "decode",
]
