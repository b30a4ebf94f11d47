"""Which modules of the benchmarks import which: no circles, and scripts of peers run without this project."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

import pytest
from benchmarks_common import ROOT

FOLDER = ROOT / "benchmarks"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FOLDER.rglob("*.py")
}
STANDARD = {*sys.stdlib_module_names, "numpy"}
LIBRARIES = {"reverb": {"reverb", "tensorflow", "torch"}, "cpprb": {"cpprb"}, "tianshou": {"tianshou"}}
LIBRARIES["torchrl"] = {"torchrl", "tensordict", "torch"}
LIBRARIES["transferqueue"] = {"transfer_queue", "ray", "omegaconf", "tensordict", "torch"}
LIBRARIES["lance"] = {"lance", "pyarrow", "PIL", "torch"}
LIBRARIES["lerobot"] = {"lerobot", "datasets", "pyarrow", "torch"}
LIBRARIES["webdataset"] = {"webdataset"}
LIBRARIES["streaming"] = {"streaming", "PIL", "torch"}
LIBRARIES["sb3"] = {"stable_baselines3", "gymnasium", "torch"}
TASKS = (
    "select",
    "batches",
    "checkpoint",
    "memory",
    "online",
    "episodes",
    "transitions",
    "learn",
    "sequences",
    "values",
    "data",
)


def imported(path: Path) -> set[str]:
    """All modules that a file imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & set(FILES) or {str(node.module)}
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: imported(path) & set(FILES) - {name} for name, path in FILES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_rooms_below_do_not_import_experiments() -> None:
    for name, path in FILES.items():
        below = name.startswith("benchmarks.peers.") or name in ("benchmarks.harness", "benchmarks.machine")
        if below:
            assert not {m for m in imported(path) if m.startswith("benchmarks.experiments")}, name


@pytest.mark.parametrize("name", ["serve", "source", *TASKS, *LIBRARIES])
def test_what_runs_beside_another_library_imports_nothing_else(name: str) -> None:
    found = imported(FOLDER / "peers" / f"{name}.py")
    allowed = STANDARD | LIBRARIES.get("sb3" if name == "learn" else name, set())
    other = {m for m in found if not m.startswith("benchmarks.peers.")}
    assert {module.split(".")[0] for module in other} <= allowed
    assert not found & {"benchmarks.peers.gear", "benchmarks.peers.plain", "benchmarks.peers.process"}
