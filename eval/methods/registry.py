"""The methods that a comparison can run, by name. A method is one entry here: a `MethodKind`.

What ships stands in METHODS. A class of your own comes in by an entry point of the group "dcar.methods", or by its
dotted path in the list of methods (eval/methods/plugins.py).

An entry says how its names begin and what they stand for, how they are written, and how tables, plots and the report
call and draw them. Behind every name may stand a sampling of its own (`car-5@t0.4`, eval/methods/samplings.py);
`make_methods` takes it off before a kind sees the name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from dcar.decoding import (
    BestOfChunk,
    ChunkMethod,
    ChunkRule,
    DecodeResult,
    EndOnConfident,
    Engine,
    FixedChunk,
    Method,
    PolicyChunk,
    Prompt,
    RandomChunk,
    ShuffledChunk,
)
from heads.checkpoint import weights_signature
from dcar.errors import ConfigError
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder, check_draft, check_vocabulary
from dcar.model.load import load_decoder
from dcar.sampling import SamplingConfig
from eval.methods.chains import chain_method
from eval.methods.plugins import find_class, installed, rule_from_name
from eval.methods.samplings import TUNED, names_sampling, split_sampling
from eval.verifiers import entropy, mtp_viterbi, vadusa
from eval.verifiers.chain import ChainVerifier
from eval.verifiers.pcg import GroupVerifier
from eval.verifiers.relaxed import TolerantDecoding, TopKVerify, TypicalAcceptance
from eval.verifiers.sd import SpeculativeDecoding
from eval.verifiers.statistics import VerifierStatistics
from heads.checkpoint import Checkpoint
from heads.policy import ChunkPolicy


@dataclass
class Models:
    """The decoders and policies of a comparison; a policy's key is its name, "" for the only one. `draft` is the
    draft model of the methods that are called …@draft."""

    decoder: AnyDecoder
    far_decoder: AnyDecoder | None = None
    policies: dict[str, ChunkPolicy] = field(default_factory=dict)
    draft: AnyDecoder | None = None
    statistics: VerifierStatistics | None = None  # of the decoder, for vadusa, mtp-viterbi and entropy@
    _checksums: WeakKeyDictionary[Checkpoint, tuple[Hashable, str]] = field(default_factory=WeakKeyDictionary,
                                                                             init=False, repr=False)

    def __post_init__(self) -> None:
        for policy in self.policies.values():
            policy.check_base(self.checksum(self.decoder))
        if self.statistics is not None:
            self.statistics.check_decoder(self.checksum(self.decoder), self.decoder.config)
        if self.draft is not None:
            check_draft(self.draft, self.decoder, lambda: self.checksum(self.decoder))
        if self.far_decoder is not None:
            check_vocabulary(self.far_decoder.config, self.decoder.config, "FAR decoder",
                             "train both on the same prepared corpus with the same layout")

    def checksum(self, model: Checkpoint) -> str:
        """The checksum of one of these models. It reads all weights, so it is computed once for them, and again where
        they were replaced or trained (but not where one was written through `.data`)."""
        signature = weights_signature(model)
        if model not in self._checksums or self._checksums[model][0] != signature:
            self._checksums[model] = signature, model.checksum()
        return self._checksums[model][1]


UNCHANGED = SamplingConfig()  # the decoder's own probabilities


@dataclass(frozen=True)
class Entry:
    """One method, ready to run: `build` makes a fresh decoding object; `identity` is all that its tokens depend on,
    besides `sampling`, which it names where the sampling is the method's own and not the comparison's."""

    name: str
    decoder: AnyDecoder
    build: Callable[[], Method]
    identity: dict[str, str]
    sampling: SamplingConfig = UNCHANGED
    _engines: dict[int, Engine] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def method(self) -> Method:
        """The method, which any number of batches share."""
        return self.build()

    def decode(self, prompts: Sequence[Prompt], seed: int, batch_size: int = 32) -> list[DecodeResult]:
        """See `dcar.decoding.decode`. Buffers and CUDA graphs are kept for the next call with as many rows."""
        rows = min(batch_size, len(prompts))
        if rows not in self._engines:
            self._engines[rows] = Engine(self.decoder, self.method, self.sampling, rows)
        return self._engines[rows].decode(prompts, seed=seed)

    def sampled(self, word: str, sampling: SamplingConfig) -> Entry:
        """The same method with a sampling of its own, which stands in its name as `word`."""
        own = f"temperature {sampling.temperature:g}, top_k {sampling.top_k}, top_p {sampling.top_p:g}"
        return replace(self, name=f"{self.name}@{word}", identity={**self.identity, "sampling": own},
                       sampling=sampling)


Factory = Callable[[str, str, Models], list[Entry]]
"""(the whole name, what follows the prefix, models) -> the rows that it stands for."""


def _far(name: str, rest: str, models: Models) -> list[Entry]:
    if rest:
        raise ConfigError(f"method '{name}': write 'far' alone")
    if models.far_decoder is None:
        raise ConfigError("method 'far' needs far_decoder, a checkpoint trained with one head; car-1 is next-token "
                          "decoding with the CAR weights")
    return [Entry(name, models.far_decoder, lambda: ChunkMethod(FixedChunk(1, name)),
                  {"decoder": models.checksum(models.far_decoder)})]


def _entry(name: str, models: Models, build: Callable[[], Method], identity: dict[str, str]) -> list[Entry]:
    return [Entry(name, models.decoder, build, {"decoder": models.checksum(models.decoder), **identity})]


def _chunks(name: str, models: Models, schedule: Callable[[], ChunkRule], **identity: str) -> list[Entry]:
    """The row of a chunk schedule. One that is impossible is refused now, before anything is spoken."""
    schedule()
    return _entry(name, models, lambda: ChunkMethod(schedule()), identity)


def _car(name: str, rest: str, models: Models) -> list[Entry]:
    (size,) = _sizes(name, rest, models, most=1)
    return _chunks(name, models, lambda: FixedChunk(size, name))


def _random(name: str, rest: str, models: Models) -> list[Entry]:
    sizes = _sizes(name, rest, models)
    if sizes != sorted(sizes):
        ordered = "-".join(map(str, sorted(sizes)))
        raise ConfigError(f"method '{name}': sizes stand in order, twice where they are drawn twice as often: write "
                          f"random-{ordered}")
    return _chunks(name, models, lambda: RandomChunk(sizes, name))


def _end_on_confident(name: str, rest: str, models: Models) -> list[Entry]:
    ends = _sizes(name, rest, models)
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise ConfigError(f"method '{name}': write the shortest and the longest chunk at its end, as in "
                          "end-on-confident-4-7")
    return _chunks(name, models, lambda: EndOnConfident(range(ends[0], ends[1] + 1), name))


TURNED = re.compile(r"(?P<before>.*?)(@n(?P<num_candidates>[1-9]\d*))?(@d(?P<dial>-?\d+(?:\.\d+)?))?")
"""What ends the name of a method that asks a policy: how many chunks are drawn side by side, and its dial, turned to
longer or shorter chunks: dcar@n4, dcar@d0.3, dcar@name@n4@d-0.5."""


def turned(rest: str) -> re.Match[str]:
    """What stands behind the kind of a method that asks a policy, taken apart as `TURNED` says."""
    found = TURNED.fullmatch(rest)
    assert found is not None  # everything in it may be missing
    return found


def _policy(mode: Literal["greedy", "sample"], shuffled: bool = False) -> Factory:
    def factory(name: str, rest: str, models: Models) -> list[Entry]:
        if not models.policies:
            raise ConfigError(f"method '{name}' needs a policy: give its folder in `policies`")
        parts, base = turned(rest), name.removesuffix(rest)
        which = parts["before"]
        if which and not (which.startswith("@") and which[1:] in models.policies):
            known = ", ".join(f"{base}@{n}" for n in models.policies if n) or "only 'dcar' itself"
            raise ConfigError(f"method '{name}': no such policy; known: {known} (behind it how many chunks are drawn, "
                              "as in @n4, and a dial, as in @d0.3)")
        dial, num_candidates = float(parts["dial"] or 0), int(parts["num_candidates"] or 1)
        identity = {"dial": repr(dial)} if dial else {}
        if num_candidates > 1:
            identity["num_candidates"] = str(num_candidates)

        def row(policy: str) -> list[Entry]:
            own, full = models.policies[policy], (f"{base}@{policy}" if policy else base) + rest[len(which):]

            def schedule() -> PolicyChunk | ShuffledChunk:
                asked = PolicyChunk(own, mode, full, dial=dial, num_candidates=num_candidates)
                return ShuffledChunk(asked, full) if shuffled else asked

            return _chunks(full, models, schedule, policy=models.checksum(own), **identity)

        return [entry for policy in ([which[1:]] if which else models.policies) for entry in row(policy)]

    return factory


def _best_of(name: str, rest: str, models: Models) -> list[Entry]:
    size, _, num_candidates = rest.removeprefix("-").partition("-")
    if not num_candidates.isdigit():
        raise ConfigError(f"method '{name}': write the size of its chunks and how many are drawn at its end, as in "
                          "best-of-10-4")
    (chunk,) = _sizes(name, size, models, most=1)
    scorer = next((p.chunk_scorer for p in models.policies.values() if p.chunk_scorer is not None), None)
    if scorer is None:
        raise ConfigError(f"method '{name}' asks how well tokens go together: give in `policies` one that was trained "
                          "with chunk_scorer")
    return _chunks(name, models, partial(BestOfChunk, chunk, int(num_candidates), scorer, name),
                   chunk_scorer=models.checksum(scorer))


def _by_heads(from_name: Callable[..., tuple[Callable[[], Method], dict[str, str]]]) -> Factory:
    """A method that needs the decoder, and perhaps the statistics fitted to it."""

    def factory(name: str, rest: str, models: Models) -> list[Entry]:
        return _entry(name, models, *from_name(name, rest, models.decoder, models.statistics))

    return factory


@dataclass(frozen=True)
class Style:
    """How a kind of method is called and drawn. `symbol`: its setting; `marker`: a shape of matplotlib."""

    label: str
    color: str
    marker: str | tuple[int, int, int]
    symbol: str = ""

    def of_candidates(self, num_candidates: int) -> Style:
        """Of the method that chooses among so many candidates: the same hue, darker, and a star of as many points."""
        if num_candidates == 1:
            return self
        strength = max(0.3, 1 - 0.15 * math.log2(num_candidates))
        shade = "".join(f"{round(strength * part):02x}" for part in bytes.fromhex(self.color[1:]))
        return replace(self, color=f"#{shade}", marker=(num_candidates, 1, 0))


@dataclass(frozen=True)
class MethodKind:
    """All that the project knows of a kind of method. Its names are the prefix alone or with -…, @… or :… behind it;
    numbers in them are settings of one family (a line of the plots), words make families of their own."""

    prefix: str
    make: Factory
    example: str  # a name, as it is written
    style: Style
    verifies: bool = False  # a pass checks drafted tokens
    policies: bool = False  # what stands behind @ names a policy, which is a setting of one family


def verifier_kind(prefix: str, example: str, verifier: type[ChainVerifier], style: Style) -> MethodKind:
    """A method that verifies a chain of drafts."""

    def factory(name: str, rest: str, models: Models) -> list[Entry]:
        build, identity = chain_method(name, prefix, example, verifier, models.decoder, models.draft)
        if models.draft is not None and identity["draft"].startswith("draft:"):
            identity["draft_model"] = models.checksum(models.draft)
        return _entry(name, models, build, identity)

    return MethodKind(prefix, factory, example, style, verifies=True)


METHODS: dict[str, MethodKind] = {kind.prefix: kind for kind in (  # in the order of tables and plots
    # next-token decoding on the FAR checkpoint (trained with one head)
    MethodKind("far", _far, "far", Style("FAR", "#222222", "s")),
    # always three tokens a step; car-1 is next-token decoding with the CAR weights
    MethodKind("car", _car, "car-3", Style("CAR-k", "#1f5fa8", "o", "k")),
    # a size drawn from these at every step
    MethodKind("random", _random, "random-2-3-4", Style("random size", "#8a8f98", "v")),
    # rule-based, after drawing: of the chunks of 4 to 7 tokens the one that ends on the likeliest
    MethodKind("end-on-confident", _end_on_confident, "end-on-confident-4-7",
               Style("end on confident", "#6b8e23", "H")),
    # of chunks of 10 tokens the one of 4 candidates that goes together best
    MethodKind("best-of", _best_of, "best-of-10-4", Style("best of several chunks", "#7a4b12", r"$\clubsuit$")),
    # the policy, greedy or sampled; dcar@name where several policies are compared, dcar@n4: 4 chunks are drawn side by
    # side, dcar@d0.3: turned to longer chunks
    MethodKind("dcar", _policy("greedy"), "dcar", Style("DCAR", "#d1361c", "D"), policies=True),
    MethodKind("dcar-sampled", _policy("sample"), "dcar-sampled", Style("DCAR sampled", "#ee8866", "d"), policies=True),
    # the sizes that dcar chose, in an order drawn at random: a control
    MethodKind("dcar-shuffled", _policy("greedy", shuffled=True), "dcar-shuffled",
               Style("DCAR shuffled in time", "#b9a394", "|"), policies=True),
    # heads are kept up to that entropy; entropy@3.0: the threshold fitted for 3 tokens a pass
    MethodKind("entropy", _by_heads(entropy.from_name), "entropy-0.8", Style("entropy", "#c98a00", "h", "h")),
    # 4 heads, 5 candidates of each
    MethodKind("mtp-viterbi", _by_heads(mtp_viterbi.from_name), "mtp-viterbi-4-5",
               Style("MTP-Viterbi", "#2a8f4e", "p", "n")),
    # a chain of drafts verified by the decoder; @draft for the draft model, :4 for its length (eval/methods/chains.py)
    verifier_kind("sd", "sd", SpeculativeDecoding, Style("SD", "#5b2a86", "X")),
    verifier_kind("ssd", "ssd-0.4", TolerantDecoding, Style("SSD", "#8d5fc0", ">", "β")),
    verifier_kind("pcg", "pcg-0.42", GroupVerifier, Style("PCG", "#c4318c", "<", "θ")),
    # a tree of the heads' candidates, tolerance 2; vadusa-2-n32: 32 nodes; vadusa-2-chain: the best id of each head
    MethodKind("vadusa", _by_heads(vadusa.from_name), "vadusa-2", Style("VADUSA", "#008b8b", "^", "τ"), verifies=True),
    verifier_kind("typical", "typical", TypicalAcceptance, Style("typical", "#8a5a2b", "P")),
    verifier_kind("topk-verify", "topk-verify-50", TopKVerify, Style("top-k verify", "#74820a", "*", "k")),
)}


def prefix_of(name: str) -> str:
    """What a method's name begins with: the longest prefix of METHODS and of installed methods, else nothing."""
    known = (p for p in (*METHODS, *installed()) if name == p or name.startswith((f"{p}-", f"{p}@", f"{p}:")))
    return max(known, key=len, default="")


def find_kind(name: str) -> MethodKind | None:
    """The kind of a method by its name without a sampling: what ships, an installed one, or a class by its path.

    ConfigError for a class that cannot be imported or is no method; None for an unknown name.
    """
    prefix = prefix_of(name)
    if prefix in METHODS:
        return METHODS[prefix]
    found = find_class(name, prefix)
    if found is None:
        return None
    prefix, made = found
    style = getattr(made, "style", Style("", "#4d4d4d", "x"))
    if issubclass(made, ChainVerifier):
        return verifier_kind(prefix, prefix, made, style)
    return MethodKind(prefix, _by_heads(partial(rule_from_name, made)), prefix, style)


def _sizes(name: str, rest: str, models: Models, most: int | None = None) -> list[int]:
    parts = rest.removeprefix("-").split("-")
    heads = models.decoder.config.num_prediction_heads
    if not all(p.isdigit() and 1 <= int(p) <= heads for p in parts) or (most and len(parts) > most):
        if "@" in rest:
            raise ConfigError(f"method '{name}': only methods that ask a policy take a dial, candidates or a policy's "
                              f"name (@d1, @n4, @policy); a sampling of its own is {name.partition('@')[0]}@t0.8")
        raise ConfigError(f"method '{name}': chunk sizes of this decoder are 1..{heads}; write car-3 or random-2-3")
    return [int(p) for p in parts]


def make_methods(names: Sequence[str], models: Models, sampling: SamplingConfig = UNCHANGED) -> list[Entry]:
    """The entries that the names stand for, in order. ConfigError for an unknown, impossible or repeated method.

    sampling: of the methods whose names say none, and what the names leave open.
    """
    entries: list[Entry] = []
    for written in names:
        name, own = split_sampling(written)
        if name.endswith(f"@{TUNED}"):
            raise ConfigError(f"method '{written}': rows at a method's own best sampling are added by the setting "
                              f"tuned=FOLDER/tuned.json of a comparison; list '{name.removesuffix(f'@{TUNED}')}'")
        kind = find_kind(name)
        if kind is None:
            known = ", ".join([*(kind.example for kind in METHODS.values()), *installed()])
            raise ConfigError(f"unknown method '{name}'; methods are written {known} (see docs/methods.md); a class of "
                              "your own is written package.module.Class")
        made = kind.make(name, name.removeprefix(kind.prefix), models)
        made = [replace(e, sampling=sampling) for e in made]
        entries += [e.sampled(own.word, own.of(sampling, written)) for e in made] if own else made
    if repeated := sorted(name for name, times in Counter(e.name for e in entries).items() if times > 1):
        raise ConfigError(f"methods listed twice: {', '.join(repeated)}")
    return entries


def load_models(decoder: str, far_decoder: str, policies: Sequence[str], device: str = "cpu",
                draft: str = "", statistics: str = "") -> Models:
    """Load checkpoints, "starter" being the shipped one of each kind; `policies` are folders, or name=folder where
    there are several; `draft` is a folder of `dcar train-draft` or another decoder of the same ids, `statistics` one of
    `dcar fit-verifiers`, or nothing."""
    loaded: dict[str, ChunkPolicy] = {}
    for item in policies:
        name, _, folder = item.rpartition("=")
        if not name and len(policies) > 1:
            name = Path(folder).name
        if name in loaded:
            raise ConfigError(f"two policies are called '{name}'; name them as name=folder")
        if names_sampling(name) or turned(f"@{name}")["before"] != f"@{name}":
            raise ConfigError(f"policy '{name}': dcar@{name} would read as a sampling, a number of candidates or a "
                              f"dial; name it otherwise, as policy-{name}={folder}")
        loaded[name] = load_policy(folder, device)
    far = load_decoder(far_decoder, device, starter="far") if far_decoder else None
    return Models(load_decoder(decoder, device), far, loaded,
                  load_decoder(draft, device) if draft else None,
                  VerifierStatistics.from_pretrained(statistics) if statistics else None)
