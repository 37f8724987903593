"""Every field of every settings class acts, or is refused by name."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers import TrainingArguments, trainer_callback, trainer_optimizer
from transformers.integrations import integration_utils
from trl import GRPOConfig

from dcar.config import setting
from dcar.config.schema import meaning_of, settings_of
from dcar.config.training import TrainerSettings
from dcar.errors import ConfigError
from dcar.model.backbones.lora import LoraSettings
from dcar.train.bucketed import BucketedTrainer
from dcar.train.settings import TrainConfig
from rl.config import ACTING, DCPOConfig
from rl.natural import NaturalGradient
from rl.trainer import DCPOTrainer

ROOT = Path(__file__).parents[1]
SOURCES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for package in ("dcar", "heads", "rl", "eval", "launch")
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def schemas() -> list[type]:
    """Return all dataclasses of the project that declare settings."""
    found = []
    for name, path in SOURCES.items():
        if "setting(" in path.read_text():
            found += [
                value
                for value in vars(importlib.import_module(name)).values()
                if isinstance(value, type)
                and value.__module__ == name
                and dataclasses.is_dataclass(value)
                and any(meaning_of(f).declared for f in dataclasses.fields(value))
            ]
    return list(dict.fromkeys(found))


SCHEMAS = schemas()


def own(schema: type) -> list[str]:
    """Fields that a class itself declares as settings."""
    declared = {f.name for f in dataclasses.fields(schema) if meaning_of(f).declared}
    return [name for name in vars(schema).get("__annotations__", {}) if name in declared]


# --- settings that are declared here --------------------------------------------------------------


def reads_of(node: ast.AST) -> set[str]:
    """Attributes that are read below a node, other than in checks of a schema (`__post_init__`)."""
    reads = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            reads.add(node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            reads.add(node.slice.value)  # of a settings group that a model's folder stores
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            reads |= set(re.findall(r"{(\w+)}", node.value))  # templates of commands
        waiting += ast.iter_child_nodes(node)
    return reads


@cache
def imports_of(name: str) -> frozenset[str]:
    """Modules of the project that a module imports, wherever it does."""
    found = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # named and imported later
    return frozenset(found & SOURCES.keys())


def readers(schema: type) -> set[str]:
    """Modules that may read a schema: those that name it or a relative, and what these import."""
    related = (c for c in SCHEMAS if issubclass(c, schema) or issubclass(schema, c))
    names = {c.__name__ for c in related}
    waiting = [
        module for module, path in SOURCES.items() if any(n in path.read_text() for n in names)
    ]
    seen: set[str] = set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imports_of(name)
    return seen


@cache
def module_reads(name: str) -> frozenset[str]:
    return frozenset(reads_of(tree_of(name)))


# --- settings that transformers, TRL and peft read ------------------------------------------------


@cache
def body(function) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def attribute_of(cls: type, name: str):
    value = inspect.getattr_static(cls, name, None)
    if isinstance(value, property):
        return value.fget
    value = getattr(value, "func", getattr(value, "__func__", value))  # cached, class, static
    return inspect.unwrap(value) if inspect.isfunction(value) else None


def arguments_read(trainer: type, arguments: type) -> set[str]:
    """Names of the arguments that a trainer reads in methods that `__init__` and `train` reach:
    an override is followed in place of what it overrides, and `super()` from it."""
    reads: set[str] = set()
    seen = set()
    waiting = [(trainer, trainer, name) for name in ("__init__", "train")]
    while waiting:
        top, first, name = waiting.pop()
        order = top.__mro__[top.__mro__.index(first) :]
        owner = next((c for c in order if name in vars(c)), None)
        function = attribute_of(owner, name) if owner else None
        if function is None or (owner, name) in seen:
            continue
        seen.add((owner, name))
        for node in ast.walk(body(function)):
            if not isinstance(node, ast.Attribute):
                continue
            of = ast.unparse(node.value)
            if top is trainer and of in ("args", "self.args"):
                reads.add(node.attr)
                waiting.append((arguments, arguments, node.attr))  # a property or method
            elif of == "super()":
                after = top.__mro__[top.__mro__.index(owner) + 1]
                waiting.append((top, after, node.attr))
            elif of in ("self", "cls"):
                waiting.append((top, top, node.attr))
                if top is arguments:
                    reads.add(node.attr)
    return reads


def arguments_that_act(trainer: type, arguments: type) -> set[str]:
    """Names of arguments that the trainer, its callbacks, or the optimisers of transformers (if
    the trainer uses them) read."""
    reads = arguments_read(trainer, arguments)
    modules = [trainer_callback, integration_utils]
    if "optim_args" in reads:  # passed to these by `create_optimizer` of transformers
        modules.append(trainer_optimizer)
    for module in modules:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("args"):
                reads.add(node.attr)
    return reads


ELSEWHERE = {"eval_steps", "logging_steps", "save_steps", "tf32"}
"""Read by TrainerState.compute_steps as f"{kind}_steps", and by TrainingArguments itself."""
PASSED_ON = {
    LoraSettings: lambda: set(inspect.signature(LoraConfig).parameters),
    TrainerSettings: lambda: arguments_that_act(BucketedTrainer, TrainingArguments) | ELSEWHERE,
}
"""Groups that are passed on whole, by name, and the names that act where they arrive."""


def unread(schema: type) -> list[str]:
    """Settings that a class declares, and no module that may have it reads."""
    reads = set().union(*map(module_reads, readers(schema)))
    inherited = set().union(*(inspect.get_annotations(base) for base in schema.__mro__[1:]))
    acting = PASSED_ON.get(schema, set)()
    return [name for name in own(schema) if name not in reads | inherited | acting]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_declared_setting_is_read(schema):
    assert unread(schema) == []


def test_every_inherited_setting_of_stage_two_acts_or_is_refused(tmp_path):
    inherited = {f.name: f for f in dataclasses.fields(GRPOConfig)}
    acting = arguments_that_act(DCPOTrainer, DCPOConfig) | module_reads("rl.advantages") | ELSEWHERE
    assert acting & inherited.keys() >= ACTING
    for name in inherited.keys() - ACTING:
        default = settings_of(DCPOConfig)[name].default
        other = not default if isinstance(default, bool) else "other"
        with pytest.raises(ConfigError, match=f"^{name} has no effect in DCPO"):
            DCPOConfig(str(tmp_path), use_cpu=True, **{name: other})


def test_settings_without_effect_are_found():
    """Those of an earlier version: `optim` and the processes that load data were accepted, but the
    trainer made its own optimiser and loader."""

    class Earlier(DCPOTrainer):
        def create_optimizer(self, model=None):
            return NaturalGradient(self.policy.parameters(), self._curvature, 0.1)

    @dataclasses.dataclass
    class Ignored(TrainConfig):
        width: int = setting(1, "Width.")
        never_read_anywhere: int = setting(1, "Unused.")

        def __post_init__(self):
            assert self.never_read_anywhere

    before, now = (arguments_that_act(t, DCPOConfig) for t in (Earlier, DCPOTrainer))
    assert now - before >= {"optim_args", "optim_target_modules", "weight_decay"}
    assert not {"dataloader_num_workers", "remove_unused_columns", "num_generations_eval"} & now
    assert unread(Ignored) == ["never_read_anywhere"]
