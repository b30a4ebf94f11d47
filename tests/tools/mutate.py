"""Changes one place of a module at a time and counts how many of the changes the tests notice.

    python tests/tools/mutate.py gear_loader/storage/limiters.py tests/storage/test_limiters.py [-n 15] [--seed 0]
    python tests/tools/mutate.py gear_loader/storage/index.py tests/storage --before main

The second form is for tests that have become fewer: a change that survives is tried again with the tests as they were
at that revision of git. They must notice no more than the tests do now.

Of all places where the module could be changed, a random sample of N is tried, always the same for a seed:

    condition   the test of an if, a while or a conditional expression is negated
    comparison  < becomes <=, == becomes !=, is becomes is not, in becomes not in, and the other way round
    logic       and becomes or, or becomes and
    number      an integer constant becomes one larger or one smaller
    statement   a call whose value is not used, an augmented assignment, a store into an attribute or an element, or
                a raise is removed

The tests run in a temporary copy of the working tree (what git tracks, and new files that it does not ignore), with
``-x -m "not long"``: killed means that a test failed, survived that all passed, timeout that they took five times as
long as without a change, and more than a minute. A module that names numba gets an empty cache of machine code for each
change, because numba looks only at the file of the function that it loads, not at those of the functions it calls.

A change that survives is a question, not always a defect: some changes make no difference that anyone can see.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
}
SWAPPED |= {new: old for old, new in SWAPPED.items()}


class Change(NamedTuple):
    """One change of a module.

    Attributes:
        line: the line it is in.
        before: the source of the expression or statement.
        after: what becomes of it.
        source: the whole module with the change.
    """

    line: int
    before: str
    after: str
    source: str


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes to put in the place of this one."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        other = copy.copy(node)
        other.test = ast.UnaryOp(ast.Not(), node.test)
        yield other
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
        yield ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif (
        isinstance(node, (ast.AugAssign, ast.Raise))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)))
    ):
        yield ast.Pass()


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every node that may be replaced: its parent, the field, and the index in a field that is a list."""
    for parent in ast.walk(tree):
        if isinstance(parent, ast.JoinedStr):
            continue
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "format_spec"):
                continue
            if isinstance(value, ast.AST):
                yield parent, field, None
            elif isinstance(value, list):
                yield from ((parent, field, i) for i, part in enumerate(value) if isinstance(part, ast.AST))


def changes(source: str) -> list[Change]:
    """All changes of a module."""
    tree = ast.parse(source)
    found = []
    for parent, field, index in list(places(tree)):
        held = getattr(parent, field)
        node = held if index is None else held[index]
        for other in variants(node):
            if index is None:
                setattr(parent, field, other)
            else:
                held[index] = other
            texts = [
                ast.unparse(one.test if isinstance(one, (ast.If, ast.While)) else one)
                for one in (node, other)
            ]
            found.append(Change(node.lineno, *texts, ast.unparse(ast.fix_missing_locations(tree))))
        if index is None:
            setattr(parent, field, node)
        else:
            held[index] = node
    return found


def copied(folder: Path) -> None:
    """Copy the working tree into a folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def tests_of(revision: str, folder: Path) -> None:
    """Put the tests of a revision of git in the place of those of a copy."""
    shutil.rmtree(folder / "tests")
    archive = subprocess.run(["git", "archive", revision, "tests"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def outcome(folder: Path, tests: list[str], cache: Path, timeout: float | None) -> tuple[str, str]:
    """Run the tests in a copy: "survived", "killed" or "timeout", and what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(cache), "CI": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return "survived" if process.returncode == 0 else "killed", output.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("module", type=Path, help="the module that is changed, such as gear_loader/errors.py")
    parser.add_argument("tests", nargs="+", help="what pytest is to run")
    parser.add_argument("-n", type=int, default=15, help="how many changes are tried")
    parser.add_argument("--seed", type=int, default=0, help="which changes are tried")
    parser.add_argument("--before", metavar="REV", help="what survives is tried again with the tests of REV")
    parser.add_argument(
        "--folder", type=Path, help="the copy lies here, and the next run finds its machine code"
    )
    options = parser.parse_args()
    module = options.module.resolve().relative_to(ROOT)
    source = (ROOT / module).read_text()
    every = changes(source)
    chosen = sorted(random.Random(options.seed).sample(every, min(options.n, len(every))))
    with tempfile.TemporaryDirectory(prefix="gear-loader-mutate-") as temporary:
        parent = options.folder or Path(temporary)
        folder, cache = parent / "tree", parent / "numba"
        shutil.rmtree(folder, ignore_errors=True)
        copied(folder)
        left = tried(chosen, folder, module, options.tests, cache)
        print(f"{len(chosen)} of {len(every)} changes: {len(chosen) - len(left)} noticed", flush=True)
        if options.before and left:
            tests_of(options.before, folder)
            (folder / module).write_text(source)
            still = tried(left, folder, module, options.tests, cache)
            print(f"with the tests of {options.before}: {len(chosen) - len(still)} noticed")


def tried(chosen: list[Change], folder: Path, module: Path, tests: list[str], cache: Path) -> list[Change]:
    """Run the tests of a copy once without a change, then with each, and print what came of it.

    Returns:
        The changes that survive.
    """
    source = (folder / module).read_text()
    tests = [name for name in tests if (folder / name.partition("::")[0]).exists()]
    began = time.monotonic()
    result, output = outcome(folder, tests, cache, None)
    if result != "survived":
        sys.exit(f"{output}\nThe tests fail without a change; expected tests that pass.")
    timeout = max(60.0, 5 * (time.monotonic() - began))
    compiled = Path(importlib.util.cache_from_source(str(folder / module)))
    left = []
    for change in chosen:
        (folder / module).write_text(change.source)
        compiled.unlink(missing_ok=True)  # it is told from an older one by seconds and bytes only
        own = cache.with_name("numba of one") if "numba" in source or "njit" in source else cache
        result, output = outcome(folder, tests, own, timeout)
        shutil.rmtree(cache.with_name("numba of one"), ignore_errors=True)
        if result == "survived":
            left.append(change)
        first = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        place = f"{module}:{change.line}"
        print(
            f"{result:8}  {place}  {change.before}  ->  {change.after}  {first.partition(' - ')[0]}",
            flush=True,
        )
    return left


if __name__ == "__main__":
    main()
