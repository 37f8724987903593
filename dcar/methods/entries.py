"""Methods that are ready to run: built from their names or mappings, with the models that they
need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcar.decoding import DecodeResult, Method, Prompt, decode
from dcar.decoding.declare import has_setting
from dcar.errors import ConfigError
from dcar.methods.names import MethodSpec, read_methods
from dcar.model.companions import load_policy
from dcar.model.draft import AnyDecoder
from dcar.model.load import load_decoder
from dcar.model.models import Borrowed, Models
from dcar.model.precision import matched_policy, precision_identity
from dcar.model.statistics import VerifierStatistics
from dcar.sampling import SamplingConfig
from dcar.sources.code import code_digest
from heads.policy import ChunkPolicy

UNCHANGED = SamplingConfig()  # the decoder's own probabilities


@dataclass(frozen=True, eq=False)
class Entry:
    """Method that is ready to run. identity: everything that its tokens depend on besides its
    settings and `sampling`, by name: checksums of models, precision, digest of its code."""

    spec: MethodSpec
    decoder: AnyDecoder
    method: Method
    identity: Mapping[str, str]
    sampling: SamplingConfig = UNCHANGED

    @property
    def name(self) -> str:
        """Label in tables, and the key of its records."""
        return str(self.spec)

    @property
    def settings(self) -> dict[str, Any]:
        """The method as a mapping, as records store it."""
        return replace(self.spec, limit=0).to_mapping()

    def decode(
        self, prompts: Sequence[Prompt], seed: int, batch_size: int = 32
    ) -> list[DecodeResult]:
        """See `dcar.decoding.decode`."""
        return decode(
            self.decoder, prompts, self.method, self.sampling, seed=seed, batch_size=batch_size
        )


def make_entry(spec: MethodSpec, models: Models, common: SamplingConfig) -> Entry:
    """Build a method and bind it to its models; its sampling is the common one where the method
    has none of its own. Raises ConfigError, which names the method, if it does not fit them."""
    borrowed = Borrowed(models)
    try:
        method = spec.bound(borrowed)
        sampling = replace(common, **spec.sampling)
    except ConfigError as error:
        raise ConfigError(f"method '{spec}': {error}") from error
    identity = {
        **borrowed.identity,
        "code": code_digest(type(method), Method)[:16],
        **precision_identity(borrowed.decoder),
    }
    return Entry(spec, borrowed.decoder, method, identity, sampling)


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
        entries += [make_entry(row, models, sampling) for row in _for_policies(spec, models)]
    names = Counter(e.name for e in entries)
    if repeated := sorted(name for name, times in names.items() if times > 1):
        raise ConfigError(f"methods listed twice: {', '.join(repeated)}")
    return entries


def _for_policies(spec: MethodSpec, models: Models) -> list[MethodSpec]:
    """Return one method for each policy if the method needs one and does not name it."""
    if not has_setting(spec.of, "policy") or "policy" in spec.settings:
        return [spec]
    if not models.policies:
        raise ConfigError(f"method '{spec}' needs a policy: give its folder in `policies`")
    return [
        replace(spec, settings={**spec.settings, "policy": name}) if name else spec
        for name in models.policies
    ]


def _check_name(name: str, what: str, spec: MethodSpec) -> None:
    """Raise ConfigError for the name of a policy or decoder (called `what`) that reads otherwise
    in the name of its method, `spec`."""
    try:
        same = MethodSpec.parse(str(spec)) == spec
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(
            f"{what} '{name}': {spec} would read as another setting, such as a sampling; name it "
            f"otherwise, as {what}-{name}=FOLDER"
        )


def named_folder(item: str) -> tuple[str, str]:
    """Return name and folder of a model given as name=folder, or as a folder: then no name."""
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
    decoders: Sequence[str] = (),
) -> Models:
    """Load checkpoints, "starter" being the shipped one of each kind; `policies` are folders, or
    name=folder where there are several; `draft` is a folder of `dcar train-draft` or another
    decoder of the same ids, `statistics` one of `dcar fit-verifiers`, or nothing; `dtype` is
    that of `load_decoder`; `decoders` are further ones, as name=folder."""
    loaded: dict[str, ChunkPolicy] = {}
    target = load_decoder(decoder, device, dtype=dtype)
    for item in policies:
        name, folder = named_folder(item)
        if not name and len(policies) > 1:
            name = Path(folder).name
        if name in loaded:
            raise ConfigError(f"two policies are called '{name}'; name them as name=folder")
        if name:
            _check_name(name, "policy", MethodSpec("dcar", {"policy": name}))
        loaded[name] = matched_policy(load_policy(folder, device), target)
    far = load_decoder(far_decoder, device, starter="far", dtype=dtype) if far_decoder else None
    others: dict[str, AnyDecoder] = {}
    for name, folder in map(named_folder, decoders):
        if not name or name in others:
            raise ConfigError(
                f"decoders: give each as name=folder, with names that differ, not {decoders}"
            )
        _check_name(name, "decoder", MethodSpec("car", {"size": 1, "decoder": name}))
        others[name] = load_decoder(folder, device, dtype=dtype)
    return Models(
        target,
        far,
        loaded,
        load_decoder(draft, device, dtype=dtype) if draft else None,
        VerifierStatistics.from_pretrained(statistics) if statistics else None,
        others,
    )
