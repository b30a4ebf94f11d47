"""The call graph of the Python sources installed in this environment: a real, skewed graph that needs no download.

A node is a function or method. Its neighbours are the functions that it calls and those that call it, as far as names
tell: a call belongs to the function of that name in the same module, or else in the same package, or else anywhere if
few have the name. Features are hashed parts of the function's name and of its arguments' names, and its size; the class
is the package, of the 15 largest, or 15 for all others. The graph is built once, and kept in the user's cache folder.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
import os
import re
import sysconfig
import warnings
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

FEATURES, CLASSES = 64, 16
_FEW = 4  # functions of one name that a call from elsewhere may mean
_LARGEST = 1 << 20  # bytes of a file that is read: larger ones are generated tables
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")

Function = tuple[
    str, list[str], int, list[str]
]  # name, names of arguments, statements, names of called functions


@dataclasses.dataclass(frozen=True)
class CallGraph:
    """edge_index: int64 [2, E]. x: float32 [N, FEATURES]. y: int64 [N]. names, packages: of nodes and classes."""

    edge_index: np.ndarray
    x: np.ndarray
    y: np.ndarray
    names: list[str]
    packages: list[str]


def load(limit: int | None = None) -> CallGraph:
    """The graph of the environment, from the cache if it is there. limit: about as many files, for a quick look."""
    files = _files()
    if limit is not None:
        files = files[:: max(1, len(files) // limit)]
    stamp = hashlib.sha256(repr([(str(path), path.stat().st_size) for path in files]).encode())
    stamp.update(Path(__file__).read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gear-loader"
    cached = folder / f"callgraph-{stamp.hexdigest()[:16]}.npz"
    if not cached.exists():
        graph = _built(files)
        folder.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(f".{os.getpid()}.npz")
        np.savez(
            part,
            edge_index=graph.edge_index,
            x=graph.x,
            y=graph.y,
            names=graph.names,
            packages=graph.packages,
        )
        part.rename(cached)  # whole, or not at all
    with np.load(cached) as file:
        arrays = {name: file[name] for name in file.files}
    texts = {name: arrays.pop(name).tolist() for name in ("names", "packages")}
    return CallGraph(**arrays, **texts)


def _files() -> list[Path]:
    """The sources of all installed packages, without their tests."""
    # numpy may lie elsewhere: in a folder that a path file adds to the environment.
    roots = {Path(sysconfig.get_path("purelib")), Path(np.__file__).parents[1]}
    found = {path for root in roots for path in root.rglob("*.py") if path.stat().st_size < _LARGEST}
    return sorted(path for path in found if not {"tests", "test", "testing"} & set(path.parts))


def _built(files: list[Path]) -> CallGraph:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        read = list(pool.map(_functions, files, chunksize=64))
    names: list[str] = []
    modules: list[str] = []
    functions: list[Function] = []
    for path, found in zip(files, read, strict=True):
        module = _module(path)
        for function in found:
            names.append(f"{module}.{function[0]}")
            modules.append(module)
            functions.append(function)
    packages = [module.partition(".")[0] for module in modules]
    largest = [name for name, _ in collections.Counter(packages).most_common(CLASSES - 1)]
    number = {package: i for i, package in enumerate(largest)}
    y = np.array([number.get(package, CLASSES - 1) for package in packages], dtype=np.int64)
    x = np.stack([_features(function) for function in functions])
    return CallGraph(_edges(functions, modules, packages), x, y, names, [*largest, "others"])


def _module(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return ".".join(parts[len(parts) - parts[::-1].index(root) :])
    return ".".join(parts[-2:])


def _functions(path: Path) -> list[Function]:
    """The functions of a file, in order; none if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings in other people's code
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []
    found: list[Function] = []
    waiting: list[tuple[ast.AST, str, Function | None]] = [(tree, "", None)]
    while waiting:
        node, prefix, owner = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            given = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            owner = (f"{prefix}{node.name}", given, 0, [])
            found.append(owner)
            prefix = f"{prefix}{node.name}."
        elif isinstance(node, ast.ClassDef):
            prefix, owner = f"{prefix}{node.name}.", None
        elif isinstance(node, ast.Call) and owner is not None:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name is not None:
                owner[3].append(name)
        waiting.extend((child, prefix, owner) for child in ast.iter_child_nodes(node))
    return found


def _features(function: Function) -> np.ndarray:
    name, arguments, _, calls = function
    row = np.zeros(FEATURES, dtype=np.float32)
    for weight, texts in ((2.0, [name]), (1.0, arguments)):
        for text in texts:
            for part in _PART.findall(text):
                row[zlib.crc32(part.lower().encode()) % (FEATURES - 2)] += weight
    row[-2:] = np.log1p(len(calls)), np.log1p(len(arguments))
    return row


def _edges(functions: list[Function], modules: list[str], packages: list[str]) -> np.ndarray:
    near: dict[tuple[str, str], int] = {}
    within: dict[tuple[str, str], int] = {}
    anywhere: dict[str, list[int]] = collections.defaultdict(list)
    for node, (name, *_) in enumerate(functions):
        short = name.rpartition(".")[2]
        near.setdefault((modules[node], short), node)
        within.setdefault((packages[node], short), node)
        anywhere[short].append(node)
    pairs: set[tuple[int, int]] = set()
    for caller, (_, _, _, calls) in enumerate(functions):
        for name in set(calls):
            callee = near.get((modules[caller], name), within.get((packages[caller], name)))
            if callee is None and 0 < len(anywhere.get(name, ())) <= _FEW:
                callee = anywhere[name][0]
            if callee is not None and callee != caller:
                pairs |= {(callee, caller), (caller, callee)}
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T.copy()
