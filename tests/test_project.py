"""The project's shape: who may import whom, the public names, what an import costs, what gets packaged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gear_loader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gear_loader"
FRONT_DOOR = "__init__"

# The rooms of docs/architecture.md, the lowest first. A module imports from floors below its own; rooms of one
# floor do not know each other. A package (`sources`) is one room. Rooms may be listed before they are built.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"kernels"}),
    frozenset({"errors", "notice", "patience"}),
    frozenset({"native", "numbers"}),
    frozenset({"schema"}),
    frozenset({"index_ops", "limiters", "lock", "names", "native_tree", "options"}),
    frozenset({"ids", "rules", "snapshot"}),
    frozenset({"layout"}),
    frozenset({"region"}),
    frozenset({"slots"}),
    frozenset({"room"}),
    frozenset({"crew", "index", "priority_tree", "random"}),
    frozenset({"stats", "writer"}),
    frozenset({"table"}),
    frozenset({"collector", "item_map", "request", "selectors", "transport"}),
    frozenset({"checkpoint", "prefetch", "selection", "sources"}),
    frozenset({"priorities"}),
    frozenset({"device_priorities", "distributed"}),
    frozenset({"dataset"}),
    frozenset({"datamodule", "monitor"}),
    frozenset({FRONT_DOOR}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Packages of others: those that every room may import, and those that one room alone may.
EVERYWHERE = frozenset({"numba", "numpy", "torch"})
IN_ONE_ROOM: dict[str, frozenset[str]] = {
    "checkpoint": frozenset({"rich", "safetensors", "xxhash"}),
    "cli": frozenset({"psutil", "rich", "typer"}),
    "datamodule": frozenset({"lightning"}),
    "index_ops": frozenset({"llvmlite"}),
    "monitor": frozenset({"lightning"}),
    "native": frozenset({"llvmlite"}),
    "native_tree": frozenset({"llvmlite"}),
    "sources": frozenset({"gymnasium", "h5py", "minari", "rich"}),
    "transport": frozenset({"nixl", "ucp", "ucxx"}),
}
IN_KERNELS = frozenset({"numpy", "torch", "triton"})  # in place of EVERYWHERE

# Needed by some users only, slow to import, or with effects of their own: never loaded by `import gear_loader`.
LOADED_ON_DEMAND = (
    "gymnasium",
    "h5py",
    "lightning",
    "matplotlib",
    "minari",
    "mujoco",
    "nixl",
    "pytorch_lightning",
    "rich",
    "safetensors",
    "typer",
    "ucp",
    "ucxx",
    "xxhash",
)


def source_files() -> dict[str, Path]:
    """Every source file of the package by its dotted name; packages end in `.__init__`."""
    found = {}
    for folder, prefix in ((ROOT / "gear_loader", PACKAGE), (ROOT / "triton_kernels", f"{PACKAGE}.kernels")):
        for path in sorted(folder.rglob("*.py")):
            found[".".join((prefix, *path.relative_to(folder).with_suffix("").parts))] = path
    return found


def room_of(module: str) -> str:
    """`gear_loader.sources.minari` -> `sources`; `gear_loader` itself is the front door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FRONT_DOOR


def imports_of(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, at the top, inside functions and for types alike."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *base.split(".")]).rstrip(".")
            if base == PACKAGE:  # each name is a room, or comes out of the front door
                for name in node.names:
                    yield node.lineno, f"{PACKAGE}.{name.name}" if name.name in FLOOR_OF else PACKAGE
            else:
                yield node.lineno, base


def complaints(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module; empty if nothing is."""
    room = room_of(module)
    if room not in FLOOR_OF:
        return [f"{module}: no room of this name; give {room!r} its floor in FLOORS and docs/architecture.md"]
    wrong = []
    for line, target in imports_of(module, ast.parse(source)):
        top = target.partition(".")[0]
        if top == PACKAGE:
            other = room_of(target)
            if other == room or FLOOR_OF.get(other, len(FLOORS)) < FLOOR_OF[room]:
                continue
            wrong.append(f"{module}:{line}: imports {target}, which is not on a floor below {room!r}")
        elif top not in sys.stdlib_module_names:
            allowed = IN_KERNELS if room == "kernels" else EVERYWHERE | IN_ONE_ROOM.get(room, frozenset())
            if top not in allowed:
                wrong.append(f"{module}:{line}: imports {target}; {room!r} may import {sorted(allowed)}")
    return wrong


@pytest.mark.parametrize("module", sorted(source_files()))
def test_imports_point_down(module: str) -> None:
    found = complaints(module, source_files()[module].read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "accepted"),
    [
        ("gear_loader.table", "from gear_loader.schema import Column", True),
        ("gear_loader.table", "from .schema import Column", True),
        ("gear_loader.table", "from . import schema, errors", True),
        ("gear_loader.table", "import gear_loader.dataset", False),
        ("gear_loader.table", "from . import dataset", False),
        ("gear_loader.table", "from gear_loader import Column", False),
        ("gear_loader.table", "import gear_loader", False),
        ("gear_loader.table", "def f():\n    from gear_loader import dataset", False),
        ("gear_loader.table", "import triton", False),
        ("gear_loader.collector", "from gear_loader.kernels import gather", True),
        ("gear_loader.collector", "from gear_loader import selectors", False),
        ("gear_loader.sources.hdf5", "from .episodes import Episode", True),
        ("gear_loader.sources.hdf5", "from ..table import Table\nimport h5py", True),
        ("gear_loader.sources.hdf5", "from ..dataset import ReplayDataset", False),
        ("gear_loader.sources.__init__", "from .episodes import Episode", True),
        ("gear_loader.sources.__init__", "from ..dataset import ReplayDataset", False),
        ("gear_loader.kernels.gather", "import triton.language as tl\nfrom .reference import gather", True),
        ("gear_loader.kernels.gather", "from gear_loader.errors import GearError", False),
        ("gear_loader.kernels.gather", "from .. import errors", False),
        ("gear_loader.kernels.gather", "import numba", False),
        ("gear_loader.datamodule", "import lightning", True),
        ("gear_loader.dataset", "import lightning", False),
        ("gear_loader.__init__", "from .datamodule import ReplayDataModule", True),
        ("gear_loader.__init__", "from .cli import main", False),
        ("gear_loader.attic", "import os", False),
    ],
)
def test_the_direction_test_itself(module: str, source: str, accepted: bool) -> None:
    assert (complaints(module, source) == []) is accepted


def test_public_names_are_sorted_and_importable() -> None:
    names = gear_loader.__all__
    assert list(names) == sorted(set(names))
    missing = [name for name in names if not hasattr(gear_loader, name)]
    assert not missing


def test_every_public_name_is_documented() -> None:
    bare = [name for name in gear_loader.__all__ if not (getattr(gear_loader, name).__doc__ or "").strip()]
    assert not bare


def test_import_loads_nothing_that_only_some_users_need() -> None:
    program = (
        f"import sys, {PACKAGE}\n"
        f"print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({LOADED_ON_DEMAND!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_package_folder_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        module.removesuffix(f".{FRONT_DOOR}")
        for module in source_files()
        if module.endswith(f".{FRONT_DOOR}")
    }
    assert sorted(folders) == sorted(settings["packages"])
    assert (ROOT / "gear_loader" / "py.typed").is_file()


def test_install_hints_name_what_can_be_installed() -> None:
    """No package index has this package: hints say ``pip install '.[extra]'``, of extras that there are."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prose = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    code = [
        path
        for folder in ("gear_loader", "triton_kernels", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    wrong, found = [], set()
    for path in [*prose, *code, *(ROOT / "benchmarks").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if re.search(r"gear-loader\[|pip install '?gear[-_]loader", text):
            wrong.append(str(path.relative_to(ROOT)))
        for extras in re.findall(r"pip install '\.\[([^\]]*)\]'", text):
            found.update(extras.split(","))
    assert not wrong
    found.discard("{}")
    assert {"lightning", "nixl", "sources", "ucx"} <= found <= set(settings["optional-dependencies"])
