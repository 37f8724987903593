"""The models that methods decode with, and how a method takes those that it needs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from dcar.errors import ConfigError
from dcar.model.draft import AnyDecoder, check_draft, check_vocabulary
from dcar.model.statistics import VerifierStatistics
from heads.checkpoint import Checkpoint, weights_signature
from heads.chunk_scorer import ChunkScorer
from heads.policy import ChunkPolicy


@dataclass
class Models:
    """Decoders and policies that belong together. A policy's key is its name, "" for the only one.
    `draft` is the draft model of methods named …@draft; `statistics` are those of the decoder;
    `decoders` are others of the same ids, by name, for methods named car-k:name."""

    decoder: AnyDecoder
    far_decoder: AnyDecoder | None = None
    policies: dict[str, ChunkPolicy] = field(default_factory=dict)
    draft: AnyDecoder | None = None
    statistics: VerifierStatistics | None = None
    decoders: dict[str, AnyDecoder] = field(default_factory=dict)
    _checksums: WeakKeyDictionary[Checkpoint, tuple[Hashable, str]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        for policy in self.policies.values():
            policy.check_base(self.checksum(self.decoder))
        if self.statistics is not None:
            self.statistics.check_decoder(self.checksum(self.decoder), self.decoder.config)
        if self.draft is not None:
            check_draft(self.draft, self.decoder, lambda: self.checksum(self.decoder))
        others = {f"decoder '{name}'": decoder for name, decoder in self.decoders.items()}
        if self.far_decoder is not None:
            others["FAR decoder"] = self.far_decoder
        for name, decoder in others.items():
            check_vocabulary(
                decoder.config,
                self.decoder.config,
                name,
                "train both on the same prepared corpus with the same layout",
            )

    def checksum(self, model: Checkpoint) -> str:
        """Return the checksum of one of these models. It reads all weights, so it is computed
        once, and again if they were replaced or trained (but not if one was written through
        `.data`)."""
        signature = weights_signature(model)
        if model not in self._checksums or self._checksums[model][0] != signature:
            self._checksums[model] = signature, model.checksum()
        return self._checksums[model][1]


class Borrowed:
    """Models as one method takes them (`Method.bind`).

    decoder: the one that it decodes with; identity: checksums of the decoder and of everything
    that was taken.
    """

    def __init__(self, models: Models):
        self.models, self.decoder = models, models.decoder
        self._taken: dict[str, str] = {}

    @property
    def identity(self) -> dict[str, str]:
        return {"decoder": self.models.checksum(self.decoder), **self._taken}

    @property
    def heads(self) -> int:
        """Number of prediction heads of the decoder."""
        return self.decoder.config.num_prediction_heads

    def decode_by_far(self) -> None:
        """Decode with the FAR decoder. Raises ConfigError without one."""
        if self.models.far_decoder is None:
            raise ConfigError(
                "needs far_decoder, a checkpoint trained with one head; car-1 is next-token "
                "decoding with the CAR weights"
            )
        self.decoder = self.models.far_decoder

    def decode_by(self, name: str) -> None:
        """Decode with another decoder. Raises ConfigError if there is none of this name."""
        if name not in self.models.decoders:
            known = ", ".join(self.models.decoders) or "none"
            raise ConfigError(f"no decoder '{name}' among `decoders`, name=folder; known: {known}")
        self.decoder = self.models.decoders[name]

    def policy(self, name: str) -> ChunkPolicy:
        """Take the policy with this name. Raises ConfigError if there is none."""
        policies = self.models.policies
        if name not in policies:
            names = ", ".join(f"dcar@{n}" for n in policies if n) or "only 'dcar' itself"
            raise ConfigError(
                f"no such policy; known: {names} (after it the number of candidates, as in @n4, "
                "and a dial, as in @d0.3)"
            )
        self._taken["policy"] = self.models.checksum(policies[name])
        return policies[name]

    def chunk_scorer(self) -> ChunkScorer:
        """Take the chunk scorer of the first policy that has one. Raises ConfigError if none
        has."""
        for policy in self.models.policies.values():
            if policy.chunk_scorer is not None:
                self._taken["chunk_scorer"] = self.models.checksum(policy.chunk_scorer)
                return policy.chunk_scorer
        raise ConfigError(
            "needs a chunk scorer: give in `policies` one that was trained with chunk_scorer"
        )

    def draft(self) -> AnyDecoder:
        """Take the draft model. Raises ConfigError without one."""
        if self.models.draft is None:
            raise ConfigError(
                "needs a draft model: give its folder in `draft` (made by `dcar train-draft`, or a "
                "smaller decoder of the same ids), or draft by the heads"
            )
        self._taken["draft"] = self.models.checksum(self.models.draft)
        return self.models.draft

    def statistics(self, *names: str) -> VerifierStatistics:
        """Take the statistics of the decoder. names: its tensors that the method reads. Raises
        ConfigError, with the command that makes them, if there are none."""
        if self.models.statistics is None:
            raise ConfigError(
                "needs statistics of the decoder: make them with `dcar fit-verifiers` and give "
                "their folder as `statistics`"
            )
        self._taken["statistics"] = self.models.statistics.checksum(*names)
        return self.models.statistics
