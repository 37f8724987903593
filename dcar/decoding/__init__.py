"""Decoding: one step for every method, and the chunk-wise methods that need no verification."""

from dcar.decoding.chunks import ChunkRule, FixedChunk, RandomChunk
from dcar.decoding.engine import Engine, Progress
from dcar.decoding.policy_chunk import PolicyChunk
from dcar.decoding.pool import decode
from dcar.decoding.records import Choice, Decision, DecodeResult, Prompt
from dcar.decoding.state import BatchState
from dcar.decoding.step import Draft, Method

__all__ = [
    "BatchState",
    "Choice",
    "ChunkRule",
    "Decision",
    "DecodeResult",
    "Draft",
    "Engine",
    "FixedChunk",
    "Method",
    "PolicyChunk",
    "Progress",
    "Prompt",
    "RandomChunk",
    "decode",
]
