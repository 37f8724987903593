"""Decoding: one step for every method, and the chunk-wise methods that need no verification."""

from dcar.decoding.chunks import (
    BestOfChunk,
    Choice,
    ChunkMethod,
    ChunkRule,
    EndOnConfident,
    FixedChunk,
    RandomChunk,
)
from dcar.decoding.engine import Engine, Progress, decode
from dcar.decoding.policy_chunk import PolicyChunk, ShuffledChunk
from dcar.decoding.records import DecodeResult, Prompt
from dcar.decoding.state import BatchState
from dcar.decoding.step import Draft, Kept, Method

__all__ = [
    "BatchState",
    "BestOfChunk",
    "Choice",
    "ChunkMethod",
    "ChunkRule",
    "DecodeResult",
    "Draft",
    "EndOnConfident",
    "Engine",
    "FixedChunk",
    "Kept",
    "Method",
    "PolicyChunk",
    "Progress",
    "Prompt",
    "RandomChunk",
    "ShuffledChunk",
    "decode",
]
