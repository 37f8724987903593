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

from dcar.decoding import DecodeResult, FixedChunk, Method, PolicyChunk, Prompt, RandomChunk, decode
from dcar.errors import ConfigError
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder, check_draft, check_vocabulary
from dcar.model.load import load_decoder
from dcar.model.precision import matched_policy, precision_identity
from dcar.sampling import SamplingConfig
from eval.methods.controls import BestOfChunk, EndOnConfident, ShuffledChunk
from eval.methods.plugins import find_kind, plugged
from eval.methods.spec import MethodSpec, read_methods, sampling_word
from eval.verifiers import entropy, mtp_viterbi, vadusa
from eval.verifiers.drafters import Drafter, HeadDrafter, ModelDrafter
from eval.verifiers.pcg import GroupVerifier, build_groups, code_vectors
from eval.verifiers.relaxed import TolerantDecoding, TopKVerify, TypicalAcceptance
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.statistics import VerifierStatistics, needed
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
Identity = dict[str, str]  # facts that the tokens of a method depend on
Built = tuple[Method, Identity]


@dataclass(frozen=True)
class Entry:
    """Method that is ready to run. name: its label in tables; settings: the method as a mapping
    (eval/methods/spec.py), as records store it; identity: everything that its tokens depend on
    besides `sampling`, which it contains if the sampling is the method's own and not the
    comparison's; limit: see `MethodSpec`."""

    name: str
    settings: Mapping[str, Any]
    decoder: AnyDecoder
    method: Method
    identity: Identity
    sampling: SamplingConfig = UNCHANGED
    limit: int = 0

    def decode(
        self, prompts: Sequence[Prompt], seed: int, batch_size: int = 32
    ) -> list[DecodeResult]:
        """See `dcar.decoding.decode`."""
        return decode(
            self.decoder, prompts, self.method, self.sampling, seed=seed, batch_size=batch_size
        )

    def sampled(self, own: Mapping[str, Any], sampling: SamplingConfig) -> Entry:
        """Return the same method with its own sampling. own: the settings of it that its name
        contains."""
        text = (
            f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p "
            f"{sampling.top_p:g}"
        )
        return replace(
            self,
            name=f"{self.name}@{sampling_word(own)}",
            settings={**self.settings, **own},
            identity={**self.identity, "sampling": text},
            sampling=sampling,
        )


def _far(name: str, models: Models) -> Built:
    if models.far_decoder is None:
        raise ConfigError(
            "method 'far' needs far_decoder, a checkpoint trained with one head; car-1 is "
            "next-token decoding with the CAR weights"
        )
    return FixedChunk(1, name), {}


def _car(name: str, models: Models, size: int) -> Built:
    _check_sizes(name, models, size)
    return FixedChunk(size, name), {}


def _random(name: str, models: Models, sizes: list[int]) -> Built:
    _check_sizes(name, models, *sizes)
    if sizes != sorted(sizes):
        ordered = "-".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"method '{name}': write sizes in order, and twice if they are drawn twice as often: "
            f"random-{ordered}"
        )
    return RandomChunk(sizes, name), {}


def _end_on_confident(name: str, models: Models, shortest: int, longest: int) -> Built:
    _check_sizes(name, models, longest)
    if shortest >= longest:
        raise ConfigError(
            f"method '{name}': give the shortest and the longest chunk, as in end-on-confident-4-7"
        )
    return EndOnConfident(range(shortest, longest + 1), name), {}


def _best_of(name: str, models: Models, size: int, num_candidates: int) -> Built:
    _check_sizes(name, models, size)
    scorers = (p.chunk_scorer for p in models.policies.values())
    scorer = next((scorer for scorer in scorers if scorer is not None), None)
    if scorer is None:
        raise ConfigError(
            f"method '{name}' needs a chunk scorer: give in `policies` one that was trained with "
            "chunk_scorer"
        )
    rule = BestOfChunk(size, num_candidates, scorer, name)
    return rule, {"chunk_scorer": models.checksum(scorer)}


def _policy(
    name: str,
    models: Models,
    policy: str | None,
    num_candidates: int,
    dial: float,
    mode: Literal["greedy", "sample"] = "greedy",
    shuffled: bool = False,
) -> Built:
    own = models.policies.get(policy or "")
    if own is None:
        known = ", ".join(f"dcar@{n}" for n in models.policies if n) or "only 'dcar' itself"
        raise ConfigError(
            f"method '{name}': no such policy; known: {known} (after it the number of candidates, "
            "as in @n4, and a dial, as in @d0.3)"
        )
    rule = PolicyChunk(own, mode, name, dial=dial, num_candidates=num_candidates)
    identity = {"policy": models.checksum(own)}
    if dial:
        identity["dial"] = repr(dial)
    if num_candidates > 1:
        identity["num_candidates"] = str(num_candidates)
    return ShuffledChunk(rule, name) if shuffled else rule, identity


def _check_sizes(name: str, models: Models, *sizes: int) -> None:
    heads = models.decoder.config.num_prediction_heads
    if max(sizes) > heads:
        raise ConfigError(
            f"method '{name}': chunk sizes of this decoder are 1..{heads}; write car-3 or "
            "random-2-3"
        )


def _measured(from_settings: Callable[..., Built], name: str, models: Models, **own: Any) -> Built:
    """Build a method that needs the decoder, and perhaps the statistics measured on it."""
    return from_settings(name, models.decoder, models.statistics, **own)


def _chain(
    verifier: Callable[..., Method],
    name: str,
    models: Models,
    draft: str,
    length: int | None,
    eos: bool | None = None,
    **numbers: float | None,
) -> Built:
    """Build a verifier of drafted chains. Without a length, it drafts as many tokens as there
    are heads to draft with, at most 3. eos: None for a rule that has no exception for it."""
    most = models.decoder.config.num_prediction_heads - 1
    length = length or (DEFAULT_LENGTH if draft == "draft" else min(DEFAULT_LENGTH, most))
    identity = {"draft": f"{draft}:{length}"}
    drafter: Drafter = HeadDrafter(length)
    if draft == "draft":
        if models.draft is None:
            raise ConfigError(
                f"method '{name}' needs a draft model: give its folder in `draft` (made by `dcar "
                "train-draft`, or a smaller decoder of the same ids), or draft by the heads"
            )
        drafter = ModelDrafter(models.draft, length)
        identity["draft_model"] = models.checksum(models.draft)
    elif not 1 <= length <= most:
        raise ConfigError(
            f"method '{name}': this decoder has {most} additional heads to draft with; draft at "
            "most that many tokens, or use a draft model: @draft"
        )
    exception = {} if eos is None else {"eos_strict": not eos}
    given = [n for n in numbers.values() if n is not None]
    identity |= {key: str(value) for key, value in exception.items()}
    return verifier(name, drafter, *given, **exception), identity


def _pcg(
    name: str, models: Models, theta: float, draft: str, length: int | None, by_mel: bool = False
) -> Built:
    vectors = code_vectors(models.decoder, needed(models.statistics, name) if by_mel else None)
    groups = build_groups(vectors, theta, models.decoder.config.output_size - len(vectors))
    verifier, identity = _chain(
        partial(GroupVerifier, groups=groups), name, models, draft=draft, length=length
    )
    return verifier, {**identity, "groups": f"{theta!r} of {groups.embedding_checksum}"}


BUILDERS: dict[str, Callable[..., Built]] = {
    "far": _far,
    "car": _car,
    "random": _random,
    "end-on-confident": _end_on_confident,
    "best-of": _best_of,
    "dcar": _policy,
    "dcar-sampled": partial(_policy, mode="sample"),
    "dcar-shuffled": partial(_policy, shuffled=True),
    "entropy": partial(_measured, entropy.from_settings),
    "mtp-viterbi": partial(_measured, mtp_viterbi.from_settings),
    "sd": partial(_chain, SpeculativeDecoding),
    "ssd": partial(_chain, TolerantDecoding),
    "pcg": _pcg,
    "pcg-mel": partial(_pcg, by_mel=True),
    "vadusa": partial(_measured, vadusa.from_settings),
    "typical": partial(_chain, TypicalAcceptance),
    "topk-verify": partial(_chain, TopKVerify),
}
"""Functions (name, models, the settings of KINDS by keyword) -> method and identity."""


def _entry(spec: MethodSpec, models: Models, common: SamplingConfig) -> Entry:
    plain, kind = replace(spec, sampling={}, limit=0), find_kind(spec.method)
    name = str(plain)
    if kind.plugin is None:
        method, identity = BUILDERS[spec.method](name, models, **plain.arguments)
    elif kind.verifies:
        method, identity = _chain(kind.plugin, name, models, **plain.arguments)
    else:
        method, identity = plugged(kind.plugin, name, plain.arguments.values())
    decoder = models.decoder
    if spec.method == "far":
        assert models.far_decoder is not None
        decoder = models.far_decoder
    identity = {"decoder": models.checksum(decoder), **identity, **precision_identity(decoder)}
    entry = Entry(name, plain.to_mapping(), decoder, method, identity, common, spec.limit)
    if not spec.sampling:
        return entry
    try:
        return entry.sampled(spec.sampling, replace(common, **spec.sampling))
    except ConfigError as error:
        raise ConfigError(f"method '{spec}': {error}") from error


def _for_policies(spec: MethodSpec, models: Models) -> list[MethodSpec]:
    """Return one method for each policy if the method needs one and does not name it."""
    if not find_kind(spec.method).policies or "policy" in spec.settings:
        return [spec]
    if not models.policies:
        raise ConfigError(f"method '{spec}' needs a policy: give its folder in `policies`")
    return [
        replace(spec, settings={**spec.settings, "policy": name}) if name else spec
        for name in models.policies
    ]


def make_methods(
    methods: Sequence[str | Mapping[str, Any]], models: Models, sampling: SamplingConfig = UNCHANGED
) -> list[Entry]:
    """Return the entries of these names and mappings, in order. Raises ConfigError for an unknown,
    impossible or repeated method.

    sampling: used by methods without their own, and for the settings that those omit.
    """
    entries: list[Entry] = []
    for spec in read_methods(methods):
        if "tuned" in spec.sampling:
            raise ConfigError(
                f"method '{spec}': rows at a method's own best sampling are added by the setting "
                "tuned=FOLDER/tuned.json of a comparison; list the method without a sampling"
            )
        entries += [_entry(row, models, sampling) for row in _for_policies(spec, models)]
    names = Counter(e.name for e in entries)
    if repeated := sorted(name for name, times in names.items() if times > 1):
        raise ConfigError(f"methods listed twice: {', '.join(repeated)}")
    return entries


def _names_a_policy(name: str) -> bool:
    try:
        return MethodSpec.parse(f"dcar@{name}") == MethodSpec("dcar", {"policy": name})
    except ConfigError:
        return False


def named_folder(item: str) -> tuple[str, str]:
    """Return name and folder of a policy given as name=folder, or as a folder: then no name."""
    name, equals, folder = item.partition("=")
    return ("", item) if not equals or "/" in name or Path(item).exists() else (name, folder)


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
        name, folder = named_folder(item)
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
