"""Cached machine code of the compiled loops."""

from __future__ import annotations

import gc
import types
from pathlib import Path
from typing import Any

import pytest

from gear_loader.native import compile as compiling
from gear_loader.native import gathering
from gear_loader.storage.operations import entry_points
from gear_loader.transport import ucx_library


def files_of(loop: Any) -> set[str]:
    found = compiling._files(loop.py_func.__globals__, {loop.py_func.__code__.co_filename})
    return {Path(file).name for file in found}


def test_cached_code_depends_on_all_files_that_it_comes_from() -> None:
    """Entry points link loops of `copying`: code of another version of these would write to other places."""
    operations = {path.name for path in Path(entry_points.__file__).parent.glob("*.py")} - {"__init__.py"}
    assert files_of(entry_points._store) == {*operations, "copying.py", "memory.py"}
    assert files_of(gathering.gather) == {"gathering.py", "memory.py", "returns.py", "singles.py", "spans.py"}
    for loop in compiling.loops:
        assert len(loop._cache._cache_file._source_stamp) == 32 * len(files_of(loop)), loop


def test_no_garbage_is_collected_while_ucxx_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(name: str) -> Any:
        seen.append((name, gc.isenabled()))
        raise ImportError(name)

    monkeypatch.setattr(ucx_library, "importlib", types.SimpleNamespace(import_module=load))
    with pytest.raises(ImportError):
        ucx_library._imported("ucxx.absent")
    assert seen == [("ucxx.absent", False)]
    assert gc.isenabled()
