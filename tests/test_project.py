"""The project's shape: who may import whom, the public names, what an import costs, what gets packaged."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gear_loader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gear_loader"
FRONT_DOOR = "__init__"

# The rooms of docs/architecture.md, the lowest first: folders, and files beside them. A module imports from its own
# room and from floors below; rooms of one floor do not import each other. No room imports by a string.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "kernels"}),
    frozenset({"utils"}),
    frozenset({"native"}),
    frozenset({"storage"}),
    frozenset({"checkpoint", "collection", "selection", "transforms"}),
    frozenset({"dataset", "sources"}),
    frozenset({"replay", "transport"}),
    frozenset({"distributed", "doctor"}),
    frozenset({"graph"}),
    frozenset({"integrations", "lightning", "top", "warmup"}),
    frozenset({"exports"}),
    frozenset({"look"}),
    frozenset({FRONT_DOOR, "cli"}),
    frozenset({"__main__"}),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Packages of others: those that every room may import, and those that one room alone may.
EVERYWHERE = frozenset({"numba", "numpy", "torch"})
IN_ONE_ROOM: dict[str, frozenset[str]] = {
    "checkpoint": frozenset({"safetensors", "xxhash"}),
    "collection": frozenset({"tensordict"}),
    "cli": frozenset({"psutil", "rich", "typer"}),
    "look": frozenset({"markupsafe", "rich"}),
    "integrations": frozenset(
        {
            "gymnasium",
            "minari",
            "ray",
            "stable_baselines3",
            "tensordict",
            "tianshou",
            "torchrl",
            "transfer_queue",
        }
    ),
    "lightning": frozenset({"lightning"}),
    "native": frozenset({"llvmlite"}),
    "sources": frozenset({"gymnasium", "h5py", "minari"}),
    "storage": frozenset({"llvmlite", "msgpack", "torchvision"}),
    "top": frozenset({"rich"}),
    "transport": frozenset({"nixl", "ucp", "ucxx"}),
    "utils": frozenset({"fsspec", "rich"}),
}
IN_KERNELS = frozenset({"numpy", "torch", "triton"})  # in place of EVERYWHERE

# Needed by some users only, slow to import, or with effects of their own: never loaded by `import gear_loader`.
LOADED_ON_DEMAND = (
    "PIL",
    "av",
    "datasets",
    "fsspec",
    "gymnasium",
    "h5py",
    "lightning",
    "lz4",
    "matplotlib",
    "minari",
    "msgpack",
    "mujoco",
    "nixl",
    "pyarrow",
    "pytorch_lightning",
    "ray",
    "rich",
    "safetensors",
    "simplejpeg",
    "stable_baselines3",
    "tensordict",
    "tianshou",
    "torchrl",
    "transfer_queue",
    "typer",
    "ucp",
    "ucxx",
    "xxhash",
    "zstandard",
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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


# What a user calls on a table.
TABLE_NAMES = [
    "add",
    "advance_version",
    "attach",
    "check_valid",
    "clear",
    "close",
    "create",
    "export",
    "extend",
    "extend_as",
    "fill",
    "final",
    "gather",
    "ids",
    "indices",
    "lengths",
    "load",
    "loading",
    "name",
    "num_steps",
    "on_full",
    "origin",
    "pin",
    "policy_version",
    "recover",
    "remove",
    "required_blocks",
    "rules",
    "sample",
    "save",
    "schema",
    "seconds_waited",
    "serve",
    "set",
    "set_origin",
    "statistics",
    "stats",
    "unfilled",
    "unlink",
    "update_priority",
    "writer",
    "writers",
]
# Where a module is named by a string: the front door, which finds public names and the parts of `Table` that higher
# rooms implement on first use; other people's packages that are optional; readers and writers of data sets; a carrier.
BY_STRING = {
    "gear_loader.__init__": 2,
    "gear_loader.sources._optional": 1,
    "gear_loader.storage.coders": 1,
    "gear_loader.transport.channel": 1,
    "gear_loader.transport.nixl_agent": 1,
    "gear_loader.transport.ucx_library": 4,
    "gear_loader.utils.lazy": 1,
    "gear_loader.utils.registry": 1,
}

# Circles of files that are left; no other may begin.
CIRCLES: list[set[str]] = []


def imports_by_string(tree: ast.AST) -> int:
    """How often something is imported by a string."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called]
    return sum(name in ("import_module", "__import__") for name in names)


def complaints(module: str, tree: ast.Module) -> list[str]:
    """What is wrong with the imports of one module; empty if nothing is."""
    room = room_of(module)
    if room not in FLOOR_OF:
        return [f"{module}: no room of this name; give {room!r} its floor in FLOORS and docs/architecture.md"]
    wrong = []
    for line, target in imports_of(module, tree):
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


def imported_files(module: str, tree: ast.AST, files: Collection[str]) -> set[str]:
    """The source files that one imports: at the top, inside functions and for types alike."""
    found = set()

    def file_of(name: str) -> str | None:
        return next((each for each in (name, f"{name}.{FRONT_DOOR}") if each in files), None)

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {file_of(name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *base.split(".")]).rstrip(".")
            found |= {file_of(f"{base}.{name.name}") or file_of(base) for name in node.names}
    return {each for each in found if each is not None} - {module}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Files that import each other, directly or through others: a set for each circle, or several that touch."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            fresh = imports[left.pop()] - seen
            seen |= fresh
            left.extend(fresh)
        return seen

    reach = {module: reached(module) for module in imports}
    found: list[set[str]] = []
    for module in sorted(imports):
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_no_files_import_each_other() -> None:
    files = source_files()
    imports = {module: imported_files(module, tree_of(path), files) for module, path in files.items()}
    assert circles(imports) == CIRCLES


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"a": "import gear_loader.b", "b": "import os"}, []),
        ({"a": "from gear_loader.b import x", "b": "from .a import y"}, [{"a", "b"}]),
        ({"a": "from . import b", "b": "def f():\n    from gear_loader import a"}, [{"a", "b"}]),
        ({"a": "from .b import x", "b": "if TYPE_CHECKING:\n    from .c import y", "c": "import gear_loader.a"},
         [{"a", "b", "c"}]),
    ],
)  # fmt: skip
def test_the_circle_test_itself(sources: dict[str, str], expected: list[set[str]]) -> None:
    files = {f"{PACKAGE}.{name}" for name in sources}
    imports = {
        f"{PACKAGE}.{name}": imported_files(f"{PACKAGE}.{name}", ast.parse(source), files)
        for name, source in sources.items()
    }
    assert circles(imports) == [{f"{PACKAGE}.{name}" for name in circle} for circle in expected]


# Names that several files or classes still have; no other may begin. A leading underscore makes no other name.
FILES_OF_ONE_NAME = {
    "budget_planner",
    "index",
    "item_map",
    "packed",
    "priority_updates",
    "random",
    "reading",
    "row_cache",
    "sum_tree",
}
CLASSES_OF_ONE_NAME = {
    "Arena",
    "Episode",
    "Fields",
    "Layout",
    "Limits",
    "Part",
    "Place",
    "PrioritizedReplayBuffer",
    "Reads",
    "ReplayBuffer",
    "Rows",
    "Share",
    "Steps",
}


def test_no_two_files_have_one_name() -> None:
    names = [module.rpartition(".")[2] for module in source_files()]
    twice = {name for name in names if names.count(name) > 1}
    assert twice - {FRONT_DOOR} == FILES_OF_ONE_NAME


def test_no_two_classes_have_one_name() -> None:
    names = [
        node.name.lstrip("_")
        for path in source_files().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == CLASSES_OF_ONE_NAME


def test_nothing_is_imported_by_a_string_to_get_round_the_rule() -> None:
    found = {module: imports_by_string(tree_of(path)) for module, path in source_files().items()}
    assert {module: count for module, count in found.items() if count} == BY_STRING


def test_imports_point_down() -> None:
    found = [each for module, path in source_files().items() for each in complaints(module, tree_of(path))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "accepted"),
    [
        ("gear_loader.storage.table", "from gear_loader.storage.schema import Column", True),
        ("gear_loader.storage.table", "from .schema import Column", True),
        ("gear_loader.storage.table", "from . import schema\nfrom .. import errors", True),
        ("gear_loader.storage.table", "import gear_loader.dataset", False),
        ("gear_loader.storage.table", "from .. import dataset", False),
        ("gear_loader.storage.table", "from gear_loader import Column", False),
        ("gear_loader.storage.table", "import gear_loader", False),
        ("gear_loader.storage.table", "def f():\n    from gear_loader import dataset", False),
        ("gear_loader.storage.table", "import triton", False),
        ("gear_loader.collection.collector", "from gear_loader.kernels import gather", True),
        ("gear_loader.collection.collector", "from gear_loader.selection import samplers", False),
        ("gear_loader.selection.base", "from gear_loader.collection import collector", False),
        ("gear_loader.sources.hdf5", "from .episodes import Episode", True),
        ("gear_loader.sources.hdf5", "from ..storage.table import Table\nimport h5py", True),
        ("gear_loader.sources.hdf5", "from ..dataset import ReplayDataset", False),
        ("gear_loader.sources.__init__", "from .episodes import Episode", True),
        ("gear_loader.sources.__init__", "from ..dataset import ReplayDataset", False),
        ("gear_loader.kernels.gather", "import triton.language as tl\nfrom .reference import gather", True),
        ("gear_loader.kernels.gather", "from gear_loader.errors import GearError", False),
        ("gear_loader.kernels.gather", "from .. import errors", False),
        ("gear_loader.kernels.gather", "import numba", False),
        ("gear_loader.lightning.datamodule", "import lightning", True),
        ("gear_loader.dataset", "import lightning", False),
        ("gear_loader.__init__", "from .lightning.datamodule import ReplayDataModule", True),
        ("gear_loader.__init__", "from .cli import main", False),
        ("gear_loader.integrations.sb3", "from ..lightning.datamodule import ReplayDataModule", False),
        ("gear_loader.attic", "import os", False),
    ],
)
def test_the_direction_test_itself(module: str, source: str, accepted: bool) -> None:
    assert (complaints(module, ast.parse(source)) == []) is accepted


def test_the_picture_of_the_rooms_shows_their_floors() -> None:
    """The block diagram of docs/architecture.md: a row of five columns is a floor, the highest first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.partition("```mermaid\nblock-beta\n")[2].partition("```")[0]
    floors: list[set[str]] = []
    columns = 5
    for room, width in re.findall(r'\["(\w+).*?"\]:(\d)', picture):
        if columns == 5:
            floors.append(set())
            columns = 0
        floors[-1].add(room)
        columns += int(width)
    assert floors == [set(rooms) for rooms in reversed(FLOORS)]


def test_the_first_pages_stay_short() -> None:
    """README has at most 250 lines, docs/architecture.md 2,000 words without the targets of links, and two drawings."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    assert len(re.findall(r"\S*\w\S*", prose)) <= 2_000
    assert text.count("```mermaid") + text.count("![") <= 2


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if "://" not in target and not (path.parent / target.partition("#")[0]).exists():
                broken.append(f"{path.name}: {target}")
    assert not broken


def test_the_version_has_a_section_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", gear_loader.__version__)
    assert f"\n## [{gear_loader.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {gear_loader.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_parts_that_some_users_have_are_imported_by_nothing_else() -> None:
    """UCX and NIXL are known by their entries in `TRANSPORTS` alone; the command `ucx-env` is UCX's own."""
    parts = ("gear_loader.transport.ucx", "gear_loader.transport.nixl")
    for module, path in source_files().items():
        if not module.startswith(parts) and module != "gear_loader.cli":
            named = [name for _, name in imports_of(module, tree_of(path))]
            assert not [name for name in named if name.startswith(parts)], module


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
    prose = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
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


@pytest.mark.parametrize(("call", "most"), [(gear_loader.ReplayDataset, 15), (gear_loader.Table.create, 14)])
def test_options_that_belong_together_are_objects(call: Any, most: int) -> None:
    names = [name for name in inspect.signature(call).parameters if name not in ("self", "cls")]
    assert len(names) <= most, names


def test_a_table_shows_what_users_call() -> None:
    """Its internals are one object, `Table._engine`."""
    with gear_loader.Table.create(
        {"x": gear_loader.Column(torch.float32)}, max_steps=8, max_trajectories=2
    ) as table:
        names = [name for name in dir(table) if not name.startswith("_")]
        assert {name for name in vars(table) if name.startswith("_")} == {"_engine"}
    assert names == TABLE_NAMES
