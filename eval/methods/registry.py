"""Methods that a comparison can run: the functions that build each from its settings
(eval/methods/kinds.py), and its models.

A class of your own is given by its dotted path (eval/methods/plugins.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from dcar.decoding import (
    ChunkRule,
    DecodeResult,
    Engine,
    FixedChunk,
    Method,
    PolicyChunk,
    Prompt,
    RandomChunk,
)
from dcar.errors import ConfigError
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder, check_draft, check_vocabulary
from dcar.model.load import load_decoder
from dcar.model.precision import matched_policy, precision_identity
from dcar.sampling import SamplingConfig
from eval.methods.controls import BestOfChunk, EndOnConfident, ShuffledChunk
from eval.methods.plugins import find_kind, plugged
from eval.methods.spec import MethodSpec
from eval.methods.sweeps import read_methods
from eval.verifiers import entropy, mtp_viterbi, vadusa
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.drafters import Drafter, HeadDrafter, ModelDrafter
from eval.verifiers.statistics import VerifierStatistics
from heads.checkpoint import Checkpoint, weights_signature
from heads.policy import ChunkPolicy


@dataclass
class Models:
    """Decoders and policies of a comparison. A policy's key is its name, "" for the only one.
    `draft` is the draft model of methods named …@draft."""

    decoder: AnyDecoder
    far_decoder: AnyDecoder | None = None
    policies: dict[str, ChunkPolicy] = field(default_factory=dict)
    draft: AnyDecoder | None = None
    # of the decoder, for vadusa, mtp-viterbi, entropy@, pcg-mel
    statistics: VerifierStatistics | None = None
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
        if self.far_decoder is not None:
            check_vocabulary(
                self.far_decoder.config,
                self.decoder.config,
                "FAR decoder",
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


UNCHANGED = SamplingConfig()  # the decoder's own probabilities
DEFAULT_LENGTH = 3  # of a draft, the best in both papers


@dataclass(frozen=True)
class Entry:
    """Method that is ready to run. `identity` is everything that its tokens depend on besides
    `sampling`, which it contains if the sampling is the method's own and not the comparison's."""

    name: str
    decoder: AnyDecoder
    method: Method
    identity: dict[str, str]
    sampling: SamplingConfig = UNCHANGED
    _engines: dict[int, Engine] = field(default_factory=dict, init=False, repr=False, compare=False)

    def decode(
        self, prompts: Sequence[Prompt], seed: int, batch_size: int = 32
    ) -> list[DecodeResult]:
        """See `dcar.decoding.decode`. Buffers and CUDA graphs are kept for the next call with as
        many rows; on a CPU only those of a single row, because those of a batch save no time
        there and a comparison has many methods."""
        rows = min(batch_size, len(prompts))
        engine = self._engines.get(rows) or Engine(self.decoder, self.method, self.sampling, rows)
        if rows == 1 or not engine.exact:
            self._engines[rows] = engine
        return engine.decode(prompts, seed=seed)

    def sampled(self, word: str, sampling: SamplingConfig) -> Entry:
        """Return the same method with its own sampling, which its name contains as `word`."""
        own = (
            f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p "
            f"{sampling.top_p:g}"
        )
        return replace(
            self,
            name=f"{self.name}@{word}",
            identity={**self.identity, "sampling": own},
            sampling=sampling,
        )


def _far(name: str, models: Models) -> Entry:
    if models.far_decoder is None:
        raise ConfigError(
            "method 'far' needs far_decoder, a checkpoint trained with one head; car-1 is "
            "next-token decoding with the CAR weights"
        )
    return Entry(
        name,
        models.far_decoder,
        FixedChunk(1, name),
        {"decoder": models.checksum(models.far_decoder)},
    )


def _entry(name: str, models: Models, method: Method, identity: dict[str, str]) -> Entry:
    return Entry(
        name, models.decoder, method, {"decoder": models.checksum(models.decoder), **identity}
    )


def _chunks(name: str, models: Models, rule: ChunkRule, **identity: str) -> Entry:
    return _entry(name, models, rule, identity)


def _car(name: str, models: Models, size: int) -> Entry:
    _check_sizes(name, models, size)
    return _chunks(name, models, FixedChunk(size, name))


def _random(name: str, models: Models, sizes: list[int]) -> Entry:
    _check_sizes(name, models, *sizes)
    if sizes != sorted(sizes):
        ordered = "-".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"method '{name}': write sizes in order, and twice if they are drawn twice as often: "
            f"random-{ordered}"
        )
    return _chunks(name, models, RandomChunk(sizes, name))


def _end_on_confident(name: str, models: Models, shortest: int, longest: int) -> Entry:
    _check_sizes(name, models, longest)
    if shortest >= longest:
        raise ConfigError(
            f"method '{name}': give the shortest and the longest chunk, as in end-on-confident-4-7"
        )
    return _chunks(name, models, EndOnConfident(range(shortest, longest + 1), name))


def _best_of(name: str, models: Models, size: int, num_candidates: int) -> Entry:
    _check_sizes(name, models, size)
    scorer = next(
        (p.chunk_scorer for p in models.policies.values() if p.chunk_scorer is not None), None
    )
    if scorer is None:
        raise ConfigError(
            f"method '{name}' needs a chunk scorer: give in `policies` one that was trained with "
            "chunk_scorer"
        )
    return _chunks(
        name,
        models,
        BestOfChunk(size, num_candidates, scorer, name),
        chunk_scorer=models.checksum(scorer),
    )


def _policy(
    name: str,
    models: Models,
    policy: str | None,
    num_candidates: int,
    dial: float,
    mode: Literal["greedy", "sample"] = "greedy",
    shuffled: bool = False,
) -> Entry:
    own = models.policies.get(policy or "")
    if own is None:
        known = ", ".join(f"dcar@{n}" for n in models.policies if n) or "only 'dcar' itself"
        raise ConfigError(
            f"method '{name}': no such policy; known: {known} (after it the number of candidates, "
            "as in @n4, and a dial, as in @d0.3)"
        )
    asked = PolicyChunk(own, mode, name, dial=dial, num_candidates=num_candidates)
    turned = {"dial": repr(dial)} if dial else {}
    drawn = {"num_candidates": str(num_candidates)} if num_candidates > 1 else {}
    return _chunks(
        name,
        models,
        ShuffledChunk(asked, name) if shuffled else asked,
        policy=models.checksum(own),
        **turned,
        **drawn,
    )


def _check_sizes(name: str, models: Models, *sizes: int) -> None:
    heads = models.decoder.config.num_prediction_heads
    if max(sizes) > heads:
        raise ConfigError(
            f"method '{name}': chunk sizes of this decoder are 1..{heads}; write car-3 or "
            "random-2-3"
        )


def _by_heads(
    name: str,
    models: Models,
    from_settings: Callable[..., tuple[Method, dict[str, str]]],
    **settings: Any,
) -> Entry:
    """Build a method that needs the decoder, and perhaps the statistics fitted to it."""
    return _entry(name, models, *from_settings(name, models.decoder, models.statistics, **settings))


def _chain(
    verifier: type[ChainVerifier],
    name: str,
    models: Models,
    /,
    draft: str,
    length: int | None,
    eos: bool = False,
    **numbers: float | None,
) -> Entry:
    """Build a verifier of drafted chains. Without a length, it drafts as many tokens as there
    are heads to draft with, at most 3."""
    most = models.decoder.config.num_prediction_heads - 1
    length = length or (DEFAULT_LENGTH if draft == "draft" else min(DEFAULT_LENGTH, most))
    about = {"draft": f"{draft}:{length}", "eos_strict": str(not eos)}
    drafter: Drafter = HeadDrafter(length)
    if draft == "draft":
        if models.draft is None:
            raise ConfigError(
                f"method '{name}' needs a draft model: give its folder in `draft` (made by `dcar "
                "train-draft`, or a smaller decoder of the same ids), or draft by the heads: @heads"
            )
        drafter = ModelDrafter(models.draft, length)
        about["draft_model"] = models.checksum(models.draft)
    elif not 1 <= length <= most:
        raise ConfigError(
            f"method '{name}': this decoder has {most} additional heads to draft with; draft at "
            "most that many tokens, or use a draft model: @draft"
        )
    given = tuple(n for n in numbers.values() if n is not None)
    arguments = verifier.arguments(models.decoder, models.statistics, given)
    loose = {"eos_strict": False} if eos else {}
    made = verifier(name, drafter, *arguments, **loose)
    return _entry(name, models, made, {**about, **made.identity})


def _plugged(made: type[Any], name: str, models: Models, /, **numbers: Any) -> Entry:
    """Build a chunk rule or another method from outside this project."""
    return _entry(name, models, *plugged(made, name, numbers.values()))


BUILDERS: dict[str, Callable[..., Entry]] = {
    "far": _far,
    "car": _car,
    "random": _random,
    "end-on-confident": _end_on_confident,
    "best-of": _best_of,
    "dcar": _policy,
    "dcar-sampled": partial(_policy, mode="sample"),
    "dcar-shuffled": partial(_policy, shuffled=True),
    "entropy": partial(_by_heads, from_settings=entropy.from_settings),
    "mtp-viterbi": partial(_by_heads, from_settings=mtp_viterbi.from_settings),
    "vadusa": partial(_by_heads, from_settings=vadusa.from_settings),
}
"""Functions (name, models, the settings of KINDS by keyword) -> row. Classes of verifiers and
plug-ins need none."""


def _build(spec: MethodSpec, models: Models) -> Entry:
    kind = find_kind(spec.method)
    build = BUILDERS.get(spec.method)
    if kind.made is not None:
        build = partial(_chain if kind.verifies else _plugged, kind.made)
    assert build is not None
    return build(str(spec), models, **spec.arguments)


def _rows(spec: MethodSpec, models: Models) -> list[MethodSpec]:
    """Return one method for each policy if the method needs one and does not name it."""
    if not find_kind(spec.method).policies or "policy" in spec.settings:
        return [spec]
    if not models.policies:
        raise ConfigError(f"method '{spec}' needs a policy: give its folder in `policies`")
    return [
        replace(spec, settings={**spec.settings, "policy": name}) if name else spec
        for name in models.policies
    ]


def _own(spec: MethodSpec, common: SamplingConfig) -> SamplingConfig:
    try:
        return replace(common, **spec.sampling)
    except ConfigError as error:
        raise ConfigError(f"method '{spec}': {error}") from error


def make_methods(
    methods: Sequence[str | Mapping[str, Any]], models: Models, sampling: SamplingConfig = UNCHANGED
) -> list[Entry]:
    """Return the entries of these names and mappings, in order. Raises ConfigError for an unknown,
    impossible or repeated method.

    sampling: used by methods without their own, and for the settings that those omit.
    """
    entries: list[Entry] = []
    for spec in read_methods(methods):
        plain = replace(spec, sampling={})
        if "tuned" in spec.sampling:
            raise ConfigError(
                f"method '{spec}': rows at a method's own best sampling are added by the setting "
                f"tuned=FOLDER/tuned.json of a comparison; list '{plain}'"
            )
        made = [_build(row, models) for row in _rows(plain, models)]
        made = [
            replace(e, sampling=sampling, identity={**e.identity, **precision_identity(e.decoder)})
            for e in made
        ]
        entries += (
            [e.sampled(spec.word, _own(spec, sampling)) for e in made] if spec.sampling else made
        )
    if repeated := sorted(
        name for name, times in Counter(e.name for e in entries).items() if times > 1
    ):
        raise ConfigError(f"methods listed twice: {', '.join(repeated)}")
    return entries


def _names_a_policy(name: str) -> bool:
    try:
        return MethodSpec.parse(f"dcar@{name}") == MethodSpec("dcar", {"policy": name})
    except ConfigError:
        return False


def load_models(
    decoder: str,
    far_decoder: str,
    policies: Sequence[str],
    device: str = "cpu",
    draft: str = "",
    statistics: str = "",
    dtype: str | None = None,
) -> Models:
    """Load checkpoints, "starter" being the shipped one of each kind; `policies` are folders, or
    name=folder where there are several; `draft` is a folder of `dcar train-draft` or another
    decoder of the same ids, `statistics` one of `dcar fit-verifiers`, or nothing; `dtype` is
    that of `load_decoder`."""
    loaded: dict[str, ChunkPolicy] = {}
    target = load_decoder(decoder, device, dtype=dtype)
    for item in policies:
        name, _, folder = item.rpartition("=")
        if not name and len(policies) > 1:
            name = Path(folder).name
        if name in loaded:
            raise ConfigError(f"two policies are called '{name}'; name them as name=folder")
        if name and not _names_a_policy(name):
            raise ConfigError(
                f"policy '{name}': dcar@{name} would read as a sampling, a number of candidates or "
                f"a dial; name it otherwise, as policy-{name}={folder}"
            )
        loaded[name] = matched_policy(load_policy(folder, device), target)
    far = load_decoder(far_decoder, device, starter="far", dtype=dtype) if far_decoder else None
    return Models(
        target,
        far,
        loaded,
        load_decoder(draft, device, dtype=dtype) if draft else None,
        VerifierStatistics.from_pretrained(statistics) if statistics else None,
    )
