"""One strict schema per entry point: a dataclass, a YAML file, and `key=value` overrides on the command line.

An unknown key or a wrong type is an error that names the nearest valid key; the resolved configuration is saved
beside what the run produces, and running it again needs nothing else.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from dcar.errors import ConfigError, DCARError
from dcar.storage import write_text

T = TypeVar("T")


def load_config(schema: type[T], arguments: Sequence[str] | None = None) -> T:
    """Build `schema` (a dataclass) from `[--config FILE.yaml] [key=value …]`; nested keys are written a.b=value.

    Raises ConfigError for an unreadable file, an unknown key (naming the nearest one), a wrong type, or a value
    that the schema's own `__post_init__` refuses.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in arguments or "--help" in arguments:
        print(describe(schema))
        raise SystemExit(0)
    config = _unlocked(OmegaConf.structured(schema))
    overrides: list[str] = []
    while arguments:
        argument = arguments.pop(0)
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or (arguments.pop(0) if arguments else "")
            config = _merge(config, _read(Path(path)), path, schema)
        elif "=" in argument:
            overrides.append(argument.removeprefix("--"))
        else:
            raise ConfigError(f"'{argument}': write options as key=value, or --config FILE.yaml; --help lists the keys")
    config = _merge(config, OmegaConf.from_dotlist(overrides), "the command line", schema)
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        raise ConfigError(f"a required setting has no value: {error}".split("\n")[0]) from error


def exit_status(command: Callable[[], object]) -> int:
    """Run a command; 0, or 1 after a DCARError, which is printed without a traceback."""
    try:
        command()
    except DCARError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _unlocked(config: DictConfig) -> DictConfig:
    """Frozen dataclasses inside a schema (SamplingConfig) may be set here all the same; the object made is frozen."""
    OmegaConf.set_readonly(config, False)
    for key in config:
        if not OmegaConf.is_missing(config, key) and isinstance(config[key], DictConfig):
            _unlocked(config[key])
    return config


def _read(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; recipes are in launch/recipes/") from error
    except Exception as error:  # the YAML parser raises its own family of errors
        raise ConfigError(f"{path}: not valid YAML ({error})") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of settings, one `key: value` a line")
    return loaded


def _merge(config: DictConfig, values: DictConfig, where: str, schema: type) -> DictConfig:
    try:
        return OmegaConf.merge(config, values)  # type: ignore[return-value]
    except ConfigKeyError as error:
        key = str(error.full_key or "")
        names = [name for name, _, _ in _fields(schema)]
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
        hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(names)}"
        raise ConfigError(f"{where}: unknown setting '{key}'{hint}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def _fields(schema: type, prefix: str = "") -> list[tuple[str, str, Any]]:
    found = []
    for field in dataclasses.fields(schema):
        default = field.default if field.default is not dataclasses.MISSING else (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else "(required)"
        )
        if dataclasses.is_dataclass(default):
            found += _fields(type(default), f"{prefix}{field.name}.")
        else:
            found.append((prefix + field.name, str(field.type), default))
    return found


def describe(schema: type) -> str:
    """The keys of a schema with types and defaults, for --help."""
    rows = [f"  {name}: {kind} = {default!r}" for name, kind, default in _fields(schema)]
    return "\n".join([(schema.__doc__ or "").strip(), "", "[--config FILE.yaml] [key=value …], with the keys", *rows])


def save_config(config: Any, path: str | Path) -> None:
    """Write the resolved configuration as YAML, whole or not at all."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config)))
