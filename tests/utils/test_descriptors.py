"""Descriptors that no exception of a signal handler can leak."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interrupts_loop import descriptors, interrupt_at

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import write_small
from gear_loader.utils.descriptors import open_descriptor


def test_a_descriptor_is_closed_with_its_object(tmp_path: Path) -> None:
    before = descriptors()
    folder = open_descriptor(str(tmp_path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    assert not os.get_inheritable(folder.fileno())
    with open_descriptor("a", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder.fileno()) as file:
        os.write(file.fileno(), b"text")
    assert file.closed
    assert (tmp_path / "a").read_bytes() == b"text"
    assert descriptors() - before == {(folder.fileno(), str(tmp_path))}
    del folder
    assert descriptors() == before
    with pytest.raises(FileNotFoundError):
        open_descriptor(str(tmp_path / "b"), os.O_RDONLY)


def test_no_interrupt_leaves_a_descriptor(tmp_path: Path) -> None:
    """Wherever CPython looks for a signal, in opening directories, making, reading and locking a file."""

    def work() -> None:
        with Directory.open(str(tmp_path)) as folder, folder.open_or_make_all("a/b") as child:
            child.remove_files(lambda name: True)
            write_small(child, "c", b"text")
            child.open_lock("d").close()
            with child.opened("c") as (fd, _):
                assert os.read(fd, 9) == b"text"

    before, number = descriptors(), 0
    while True:
        number += 1
        error = interrupt_at(work, number, as_signals=True)
        if error is None:
            break
        del error
        assert descriptors() == before, number
    assert number > 200
