"""Chunk rules that a comparison uses as controls of policies; none is from a paper."""

import torch
from torch import Tensor

from dcar.decoding import BatchState, Choice, ChunkRule, Engine, PolicyChunk
from dcar.decoding.declare import Style, decoding_method, option, unlisted
from dcar.decoding.step import Admitted
from dcar.errors import ConfigError
from dcar.model.batch import pad
from dcar.model.models import Borrowed
from heads.candidates import FEATURES, resampling_log_weights
from heads.chunk_scorer import ChunkScorer, scored_features
from heads.policy import ChunkPolicy


@decoding_method(
    "end-on-confident", Style("end on confident", "#6b8e23", "H"), example="end-on-confident-4-7"
)
class EndOnConfident(ChunkRule):
    """Rule that ends the chunk on the most likely of the drawn tokens: argmax over the sizes a
    of log p_a(x_a)."""

    shortest: int = option(minimum=1)
    longest: int = option(minimum=1)
    after_draw = True

    def __post_init__(self) -> None:
        if self.shortest >= self.longest:
            raise ConfigError("give the shortest and the longest chunk, as in end-on-confident-4-7")

    def start(self, state: BatchState) -> None:
        super().start(state)
        state.shared["sizes"] = torch.arange(
            self.shortest, self.longest + 1, device=state.generated.device
        )

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        assert features is not None
        sizes = state.shared["sizes"]
        return Choice(sizes[features[:, 0, sizes - 1, 0].argmax(-1)])


@decoding_method(
    "best-of", Style("best of several chunks", "#7a4b12", r"$\clubsuit$"), example="best-of-10-4"
)
class BestOfChunk(ChunkRule):
    """Rule that always keeps k tokens, of the candidate with the highest joint score: argmax
    over candidates of r_k. A control of policies with as many candidates."""

    size: int = option(minimum=1)
    num_candidates: int = option(minimum=2)
    chunk_scorer: ChunkScorer = unlisted()
    logged = ("sizes", "chosen")
    after_draw = True
    num_features = len(FEATURES) + 1

    def __post_init__(self) -> None:
        self.longest = self.size

    def bind(self, models: Borrowed) -> None:
        self.chunk_scorer = models.chunk_scorer()

    def width(self, heads: int) -> int:
        width = super().width(heads)
        if self.chunk_scorer.config.num_heads < self.longest:
            raise ConfigError(
                f"{self.name}: this chunk scorer reads chunks of at most "
                f"{self.chunk_scorer.config.num_heads} tokens"
            )
        return width

    def candidate_features(self, state: BatchState, logits: Tensor, tokens: Tensor) -> Tensor:
        return scored_features(self.chunk_scorer, state.last_hidden, logits, tokens)

    def choose(self, state: BatchState, features: Tensor | None) -> Choice:
        assert features is not None
        chosen = resampling_log_weights(features)[..., -1].argmax(1)
        return Choice(torch.full_like(chosen, self.longest), chosen=chosen)


@decoding_method("dcar-shuffled", Style("DCAR shuffled in time", "#b9a394", "|"))
class ShuffledChunk(PolicyChunk):
    """Rule that uses the sizes chosen by a policy in random order: a control that preserves how
    often chunks are long, but not when.

    Every utterance is decoded with the policy, then again with the same sizes shuffled (starting
    over if it has become longer); the policy still chooses among several candidates, given the
    size. This takes twice the passes that are counted.
    """

    def use(self, policy: ChunkPolicy) -> None:
        super().use(policy)
        self.rule = PolicyChunk(
            policy, self.mode, num_candidates=self.num_candidates, dial=self.dial
        )
        self.streams = (*self.streams, "shuffle")

    def start(self, state: BatchState) -> None:
        super().start(state)
        # kept, as utterances are admitted one by one when rows are replaced
        state.shared["unshuffled"] = Engine(state.reader, self.rule, state.sampling, state.rows)
        most = state.log.shape[1]
        state.own["sizes"] = torch.zeros(
            state.rows, most, dtype=torch.long, device=state.log.device
        )
        state.own["chunks"] = torch.ones_like(state.generated)
        state.own["forced"] = torch.zeros_like(state.generated)

    def admit(self, state: BatchState, rows: Tensor, admitted: Admitted) -> None:
        super().admit(state, rows, admitted)
        if any(admitted.members):
            raise ConfigError(f"{self.name}: decodes every utterance once; groups are for policies")
        results = state.shared["unshuffled"].decode(admitted.prompts, seed=admitted.seed)
        sizes, counts = pad([result.sizes for result in results], rows.device)
        place = torch.arange(sizes.shape[1], device=rows.device).expand_as(sizes)
        order = state.numbers["shuffle"][rows, : sizes.shape[1]]
        order = order.masked_fill(place >= counts[:, None], 2.0)  # padding stays last
        state.own["sizes"][rows, : sizes.shape[1]] = sizes.gather(1, order.argsort(-1))
        state.own["chunks"][rows] = counts

    def end(self, state: BatchState, log_probs: Tensor) -> Choice:
        turn = (state.passes % state.own["chunks"])[:, None]
        state.own["forced"].copy_(state.own["sizes"].gather(1, turn)[:, 0])
        return super().end(state, log_probs)
