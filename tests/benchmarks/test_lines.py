"""The programs of benchmarks/lines: their batches are right, and docs/lines.md has their lines."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from benchmarks.lines import count, world

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "gear": "gear_loader",
    "sb3": "stable_baselines3",
    "torchrl": "torchrl.data",
    "cpprb": "cpprb",
    "reverb": "reverb",
}
SLOW = ("torchrl", "reverb", "cpprb", "sb3")


def test_the_table_of_the_page_is_counted() -> None:
    assert count.table() in (ROOT / "docs/lines.md").read_text("utf-8")


def test_what_is_counted(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        '"""Not counted."""\n\nimport os\n\n# not counted\nfirst = [  # counted, two lines\n    1]\n'
        "for each in first:  # shared\n    print(each)  # counted\n    print(\n        each,\n    )  # shared\n"
    )
    assert count.count(program) == 3


@pytest.mark.parametrize(
    ("program", "library"),
    [pytest.param(*name, marks=pytest.mark.long if name[1] in SLOW else ()) for name in count.counts()],
)
@pytest.mark.filterwarnings("default")
def test_a_program_is_right(program: str, library: str) -> None:
    pytest.importorskip(PACKAGES[library])
    world.checked.clear()
    try:
        runpy.run_module(f"benchmarks.lines.{program}_{library}")
    except RuntimeError as error:
        if "SumSegmentTreeFp32 is not available" in str(error):
            pytest.skip("TorchRL's C++ extension loads only beside the torch that it was built for")
        raise
    assert len(world.checked) >= 20
