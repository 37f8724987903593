"""Every method, on a tiny decoder and the models that it asks."""

import torch
from tiny_decoders import policy_of, tiny_decoder

from dcar.decoding import (
    BestOfChunk,
    ChunkMethod,
    ChunkRule,
    EndOnConfident,
    FixedChunk,
    Method,
    PolicyChunk,
    Prompt,
    RandomChunk,
    ShuffledChunk,
)
from dcar.model.car import CARDecoder
from dcar.model.draft import build_draft
from dcar.sampling import SamplingConfig
from eval.verifiers.drafters import HeadDrafter, ModelDrafter
from eval.verifiers.entropy import EntropyChunk
from eval.verifiers.mtp_viterbi import MTPViterbi, Transitions, count_bigrams
from eval.verifiers.pcg import GroupVerifier, build_groups
from eval.verifiers.relaxed import TolerantDecoding, TopKVerify, TypicalAcceptance
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.vadusa import Vadusa, build_tree, chain
from heads.chunk_scorer import ChunkScorer, ChunkScorerConfig
from heads.policy import ChunkPolicy, ChunkPolicyConfig, shape_of

PROMPTS = [
    Prompt("a", (1, 2, 3, 4, 5, 6), ()),
    Prompt("b", (4, 5, 6, 7), (1, 2, 3, 4)),
    Prompt("c", (7, 8, 9, 1, 2, 3, 4, 5), (5, 6)),
    Prompt("d", (3,), (1,)),
    Prompt("e", (3, 2, 5, 6, 1, 2, 3, 4, 5, 3, 2, 1), (1,)),
]
SAMPLINGS = {
    "plain": SamplingConfig(temperature=0.9, max_tokens=30),
    "greedy": SamplingConfig(temperature=0, max_tokens=20),
    "top-k": SamplingConfig(temperature=0.8, top_k=5, min_tokens=5, max_tokens=20),
}


def policy_after_draw() -> ChunkPolicy:
    """A random policy that reads candidates and holds a chunk scorer."""
    torch.manual_seed(5)
    scorer = ChunkScorer(ChunkScorerConfig(32, 4, 13, 8, 16))
    policy = ChunkPolicy(ChunkPolicyConfig(32, 4, reads="candidates", **shape_of(scorer))).eval()
    assert policy.scores is not None and policy.chunk_scorer is not None
    torch.nn.init.normal_(policy.scores.linear.weight)
    policy.chunk_scorer.load_state_dict(scorer.state_dict())
    return policy


def every_method(device: torch.device | str = "cpu") -> tuple[CARDecoder, dict[str, Method]]:
    """A decoder on a device, and one method of every kind by name."""
    model = tiny_decoder()
    groups = build_groups(model.speech_embedding.weight[:12], 0.1)
    draft = build_draft(model).eval()
    torch.manual_seed(1)
    with torch.no_grad():  # so that some drafts are refused
        draft.heads.base.weight += 0.4 * torch.randn_like(draft.heads.base.weight)
    before, after = policy_of(16).to(device), policy_after_draw().to(device)
    assert after.chunk_scorer is not None
    heads, models = HeadDrafter(3), ModelDrafter(draft.to(device), 3)
    rules: list[ChunkRule] = [
        FixedChunk(1),
        FixedChunk(4),
        RandomChunk([1, 2, 4]),
        EndOnConfident([2, 3, 4]),
        BestOfChunk(3, 2, after.chunk_scorer),
        EntropyChunk(1.0),
        PolicyChunk(before, name="dcar, before the draw"),
        PolicyChunk(before, "sample"),
        PolicyChunk(after, name="dcar, after the draw"),
        PolicyChunk(after, "sample", "dcar, of three chunks", num_candidates=3),
        ShuffledChunk(PolicyChunk(after)),
    ]
    transitions = Transitions(*count_bigrams([[1, 2, 3], [4, 5, 1, 2]], 12), 14)
    verifiers: list[Method] = [
        SpeculativeDecoding("sd", heads),
        SpeculativeDecoding("sd@draft", models),
        TolerantDecoding("ssd", heads, 0.4),
        TolerantDecoding("ssd@draft", models, 0.2, eos_strict=False),
        GroupVerifier("pcg", heads, groups),
        GroupVerifier("pcg@draft", models, groups),
        TypicalAcceptance("typical", heads),
        TopKVerify("top-k", heads, 2),
        Vadusa(1, build_tree(torch.full((3, 4), 0.2), 6), "vadusa, a tree"),
        Vadusa(3, chain(3), "vadusa, a chain"),
    ]
    methods = [*map(ChunkMethod, rules), MTPViterbi(3, transitions, 2), *verifiers]
    return model.to(device), {method.name: method for method in methods}
