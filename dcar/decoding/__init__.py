"""The one decoding loop, and the chunk-wise methods that need no verification."""

from dcar.decoding.chunks import (
    BestOfChunk,
    Choice,
    ChunkMethod,
    ChunkRule,
    EndOnConfident,
    FixedChunk,
    PolicyChunk,
    RandomChunk,
    ShuffledChunk,
)
from dcar.decoding.loop import Draft, Kept, Method, Session, decode
from dcar.decoding.records import DecodeResult, Prompt

__all__ = [
    "BestOfChunk", "Choice", "ChunkMethod", "ChunkRule", "DecodeResult", "Draft", "EndOnConfident", "FixedChunk",
    "Kept", "Method", "PolicyChunk", "Prompt", "RandomChunk", "Session", "ShuffledChunk", "decode",
]
