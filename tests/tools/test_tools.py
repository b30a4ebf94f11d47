"""The small tools: lost writes, mutations, interruptions, the stand-ins of TensorDict and of another node."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import interrupts_loop
import mutate
import numpy as np
import pytest
import tensordict_stand_in
import torch
from distributed_common import filled
from interrupts_loop import Interruption, interrupt_at, opcodes_of
from lost_writes import Tree, write_tree
from played_peer import PlayedPeer

from gear_loader.collection.windows import windows_of
from gear_loader.storage.schema import Window
from gear_loader.transport.spec import WindowSpec

_WINDOW = Window(2)


def test_what_was_not_synced_is_lost(tmp_path: Path) -> None:
    changes: list[int] = []
    tree = Tree(tmp_path, lambda: changes.append(1))
    with tree.recording():
        folder = os.open(os.path.realpath(tmp_path), os.O_RDONLY)
        os.mkdir("a", dir_fd=folder)
        inner = os.open("a", os.O_RDONLY, dir_fd=folder)
        file = os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=inner)
        os.write(file, b"one")
        assert (tree.view(names=True), tree.view(names=False)) == ({"a/x": b""}, {})
        os.fsync(file)
        os.write(file, b"two")
        assert (tree.view(names=True), tree.view(names=False)) == ({"a/x": b"one"}, {})
        os.fsync(folder)
        assert tree.view(names=False) == {}  # its own name is there, not that of its file
        os.fsync(inner)
        os.rename("x", "y", src_dir_fd=inner, dst_dir_fd=inner)
        assert (tree.view(names=True), tree.view(names=False)) == ({"a/y": b"one"}, {"a/x": b"one"})
        os.unlink("y", dir_fd=inner)
        assert (tree.view(names=True), tree.view(names=False)) == ({}, {"a/x": b"one"})
        for each in (file, inner, folder):
            os.close(each)
    assert len(changes) == 9
    write_tree(tmp_path, {"b/c": b"3"})
    assert (tmp_path / "b" / "c").read_bytes() == b"3"


def test_changes_of_a_module() -> None:
    source = """
    def f(x: int = 1) -> str:
        if x < 2 and x is not None:
            x += 1
            print(f"{x:>3}")
        else:
            raise ValueError(x)
        return x
    """
    found = mutate.changes(textwrap.dedent(source))
    assert {(change.before, change.after) for change in found} == {
        ("1", "2"), ("1", "0"), ("2", "3"), ("2", "1"), ("x < 2", "x <= 2"), ("x is not None", "x is None"),
        ("x < 2 and x is not None", "x < 2 or x is not None"),
        ("x < 2 and x is not None", "not (x < 2 and x is not None)"),
        ("x += 1", "pass"), ("print(f'{x:>3}')", "pass"), ("raise ValueError(x)", "pass"),
    }  # fmt: skip
    assert all(compile(change.source, "", "exec") for change in found)
    assert len({change.source for change in found}) == len(found)


def test_survivors_are_what_no_test_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.py").write_text("x = 1\nif x == 1:\n    y = 5\n")
    chosen = mutate.changes((tmp_path / "m.py").read_text())

    def outcome(folder: Path, *_: Any) -> tuple[str, str]:
        scope: dict[str, Any] = {}
        exec((folder / "m.py").read_text(), scope)
        return ("survived" if scope.get("y", 0) >= 5 else "killed"), ""

    monkeypatch.setattr(mutate, "outcome", outcome)
    left = mutate.tried(chosen, tmp_path, Path("m.py"), [], tmp_path / "cache")
    assert [(change.before, change.after) for change in left] == [("5", "6")]


def test_a_call_is_interrupted_at_every_opcode_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_loop, "FILES", (__file__,))
    seen: list[int] = []

    def call() -> None:
        seen.append(1)
        seen.append(2)

    count, ends = opcodes_of(call), []
    for number in range(1, count + 1):
        seen.clear()
        assert isinstance(interrupt_at(call, number), Interruption)
        ends.append(len(seen))
    assert ends == sorted(ends)
    assert set(ends) == {0, 1, 2}
    assert interrupt_at(call, count + 1) is None
    monkeypatch.setattr(interrupts_loop, "FILES", ("elsewhere",))
    assert opcodes_of(call) == 0


def test_the_stand_in_of_tensordict_is_like_it() -> None:
    library = pytest.importorskip("tensordict", reason="needs pip install '.[tensordict]'")
    entries = {"a": torch.arange(6).view(3, 2), "next": {"b": torch.ones(3)}}
    real, ours = library.TensorDict(entries, [3]), tensordict_stand_in.TensorDict(entries, [3])
    assert list(real.keys()) == list(ours.keys())
    assert real.batch_size == ours.batch_size
    assert len(real) == len(ours)
    for one, other in zip(real, ours, strict=True):
        assert torch.equal(one["a"], other["a"])
        assert torch.equal(one["next"]["b"], other["next"]["b"])
        assert one.batch_size == other.batch_size


def test_a_played_peer_answers_with_the_rows_and_what_is_gone() -> None:
    with filled(None, 0, [9]) as table:
        slots, anchors = np.array([2, 5, 7]), np.array([0, 3, 1])
        generations = table._engine.reader().slot_states()[1][slots]
        spec = WindowSpec(
            "table", table.schema, windows_of(table.schema, {"act": _WINDOW, "task": None}, None)
        )
        out = np.zeros(spec.data_bytes(3) + 3, np.uint8)
        gone = PlayedPeer(table, {5}).fetch(spec, slots, anchors, generations, out=out, here=True).result()
        assert gone.tolist() == [0, 1, 0]
        pieces = {(piece.name, piece.kind): piece for piece in spec.pieces(3)}
        (piece,) = (each for (name, kind), each in pieces.items() if name == "act" and kind != "mask")
        rows = out[piece.offset : piece.offset + 3 * piece.row_bytes].view(np.int64).reshape(3, 2)
        assert [rows[row, 0] for row in (0, 2)] == [int(table[2]["act"][0]), int(table[7]["act"][1])]
