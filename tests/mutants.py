"""Mutation sampling: the share of random faults in the source that the tests notice.

    python tests/mutants.py source=heads,dcar/decoding,rl,eval/verifiers \
        tests=tests/heads,tests/dcar/decoding,tests/rl,tests/eval/verifiers count=200 out=mutants.jsonl

A mutant is one changed operator, comparison, number, condition or dropped statement in a function. The tests
are collected once; every mutant runs in a forked process, in which the code of the function is replaced, and
only the tests that call the function are run, the fastest first, until one fails. Mutants are chosen by `seed`
and named by file, function and change, so that two sets of tests can be compared on the same ones: give
`only=mutants.jsonl` to run those of an earlier file. Code that runs in other processes is not changed there.
"""

import ast
import contextlib
import copy
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
BUDGET = 120.0  # seconds of tests that are run for a mutant; one that takes over four times as long is killed


def changed(node):
    """Return changed copies of a node, each with a word for the change."""
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        new = copy.deepcopy(node)
        new.op = SWAPS[type(node.op)]()
        yield new, f"{type(node.op).__name__} -> {type(new.op).__name__}"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new = copy.deepcopy(node)
        new.ops[0] = SWAPS[type(node.ops[0])]()
        yield new, f"{type(node.ops[0]).__name__} -> {type(new.ops[0]).__name__}"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = not node.value if type(node.value) is bool else node.value + 1
        yield ast.copy_location(ast.Constant(value), node), f"{node.value} -> {value}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand, f"without {type(node.op).__name__}"
    if isinstance(node, ast.If | ast.IfExp):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), node.test)
        yield new, "condition negated"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass(), "call dropped"
    if isinstance(node, ast.AugAssign):
        yield ast.Pass(), "assignment dropped"


def sites(tree):
    """Yield (function, parent, field, index, node) for the nodes of the outermost functions of a
    module, without annotations, defaults, decorators and messages of errors."""

    def inside(function, parent):
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "args") and isinstance(
                parent, ast.FunctionDef | ast.AnnAssign | ast.arg | ast.Lambda
            ):
                continue
            if isinstance(parent, ast.Raise):
                continue
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.AST):
                    yield function, parent, field, index if isinstance(value, list) else None, node
                    yield from inside(function, node)

    def functions(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from functions(child, f"{prefix}{child.name}.")

    for name, function in functions(tree, ""):
        yield from inside((name, function), function)


def mutants_of(path):
    """Return the mutants of a file: for each a name and a function that compiles it."""
    text = Path(path).read_text(encoding="utf-8")
    count: dict[str, int] = defaultdict(int)
    found = []
    for place, ((name, _), _, _, _, node) in enumerate(sites(ast.parse(text))):
        for variant, (_, word) in enumerate(changed(node)):
            key = f"{path}::{name} {ast.unparse(node)[:60]!r} {word}"
            count[key] += 1
            found.append((f"{key} #{count[key]}", path, name, place, variant))
    return found


def code_of(path, name, place, variant):
    """Compile the mutant and return (first line of the function, its code)."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    (_, function), parent, field, index, node = list(sites(tree))[place]
    new = ast.copy_location(list(changed(node))[variant][0], node)
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
    module = compile(ast.fix_missing_locations(tree), str(Path(path).resolve()), "exec")
    line = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    pending = [module]
    while pending:
        code = pending.pop()
        if code.co_name == function.name and code.co_firstlineno == line:
            return line, code
        pending += [c for c in code.co_consts if isinstance(c, CodeType)]
    raise ValueError(f"{path}: no code of {name}")


def replace(path, line, code):
    """Give every function made of this code the changed one. Return how many there are."""
    path, count = str(Path(path).resolve()), 0
    gc.unfreeze()  # a library may have frozen what was there when it was imported
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType):
            old = thing.__code__
            if (
                old.co_firstlineno == line
                and old.co_name == code.co_name
                and old.co_filename == path
            ):
                thing.__code__ = code
                count += 1
    return count


class Sampler:
    """Plug-in of pytest that runs mutants in place of the tests."""

    def __init__(self, settings):
        self.settings = settings
        self.failed = False
        self.called: set[tuple[str, int]] = set()
        self.called_in_setup: set[tuple[str, int]] = set()

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed
        if report.when == "setup":
            self.called_in_setup = set(self.called)

    def pytest_runtestloop(self, session):
        covering = self.covering(session.items)
        mutants = [
            mutant
            for folder in self.settings["source"].split(",")
            for path in sorted(Path(folder).rglob("*.py"))
            for mutant in mutants_of(path)
        ]
        if only := self.settings.get("only"):
            names = {json.loads(line)["mutant"] for line in Path(only).read_text().splitlines()}
            mutants = [m for m in mutants if m[0] in names]
            print(f"{len(mutants)} of {len(names)} mutants exist here")
        else:
            random.Random(int(self.settings.get("seed", 0))).shuffle(mutants)
            mutants = mutants[: int(self.settings.get("count", 200))]
        killed = 0
        with open(self.settings["out"], "w", encoding="utf-8") as out:
            for number, (name, *where) in enumerate(mutants, 1):
                how = self.run(session, covering, *where)
                killed += how.startswith("killed")
                out.write(json.dumps({"mutant": name, "outcome": how}) + "\n")
                out.flush()
                print(f"{number:4} {killed:4} {how:20.60} {name}", flush=True)
        print(f"killed {killed} of {len(mutants)}")
        return True

    def covering(self, items):
        """Run all tests once, in a forked process. Return, for every (file, first line of a
        function), the tests that call it with their seconds; what a fixture calls counts for all
        tests of its module."""
        roots = tuple(str(Path(f).resolve()) for f in self.settings["source"].split(","))

        def profile(frame, event, _):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(roots):
                self.called.add((code.co_filename, code.co_firstlineno))

        def look():
            rows, of_fixtures = [], defaultdict(set)
            for item, following in zip(items, [*items[1:], None], strict=True):
                self.called, self.called_in_setup = set(), set()
                began = time.perf_counter()
                threading.setprofile(profile)
                sys.setprofile(profile)
                runtestprotocol(item, nextitem=following, log=True)
                sys.setprofile(None)
                threading.setprofile(None)
                of_fixtures[item.path] |= self.called_in_setup
                rows.append((item, time.perf_counter() - began, self.called))
            return [
                [item.nodeid, seconds, sorted(called | of_fixtures[item.path])]
                for item, seconds, called in rows
            ], self.failed

        rows, failed = forked(look, None)
        if failed:
            sys.exit("the tests fail without a mutant: mend them first")
        covering = defaultdict(list)
        for nodeid, seconds, functions in rows:
            for path, line in functions:
                covering[path, line].append((seconds, nodeid))
        print(f"{len(rows)} tests call {len(covering)} functions, {sum(r[1] for r in rows):.0f} s")
        return covering

    def run(self, session, covering, path, name, place, variant):
        line, code = code_of(path, name, place, variant)
        tests = sorted(covering.get((str(Path(path).resolve()), line), []))
        if not tests:
            return "survived: not called"
        chosen, total = [], 0.0
        for seconds, nodeid in tests:
            if total + seconds > BUDGET and chosen:
                break
            chosen.append(nodeid)
            total += seconds
        wanted = {nodeid: order for order, nodeid in enumerate(chosen)}
        items = sorted(
            (i for i in session.items if i.nodeid in wanted), key=lambda i: wanted[i.nodeid]
        )

        def look():
            if not replace(path, line, code):
                return "survived: no function"
            for item, following in zip(items, [*items[1:], None], strict=True):
                runtestprotocol(item, nextitem=following, log=True)
                if self.failed:
                    return f"killed by {item.nodeid}"
            return "survived"

        return forked(look, 4 * min(total, BUDGET) + 20) or "killed: it did not end"


def forked(function, seconds):
    """Return what a function returns in a forked process; None if it takes longer or dies."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            answer = json.dumps(function()).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write)
    answer = []
    reader = threading.Thread(target=lambda: answer.append(os.fdopen(read, "rb").read()))
    reader.start()
    reader.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    reader.join()
    return json.loads(answer[0]) if answer and answer[0] else None


if __name__ == "__main__":
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    sys.exit(
        pytest.main(
            [*settings["tests"].split(","), "-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider"],
            plugins=[Sampler(settings)],
        )
    )
