"""A directory tree as a disk has it that loses everything that was not synced: a model that follows the calls."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PowerCuts", "Tree", "write_tree"]


class _File:
    def __init__(self) -> None:
        self.data, self.synced = b"", b""


class _Folder:
    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.synced: dict[str, _File | _Folder] = {}


class Tree:
    """Follows the calls of the system below one directory while `recording`.

    Args:
        path: the directory; it exists and is empty. changed: called after each call that changes something.
    """

    def __init__(self, path: Path, changed: Callable[[], None]) -> None:
        self._root, self._path, self._changed = _Folder(), os.path.realpath(path), changed
        self._fds: dict[int, _File | _Folder] = {}

    def view(self, *, names: bool) -> dict[str, bytes]:
        """Files after a power cut: path -> contents, those that were synced.

        Args:
            names: whether all names have reached the disk, synced or not; else those of synced directories only.
        """
        found: dict[str, bytes] = {}

        def add(folder: _Folder, prefix: str) -> None:
            for name, node in (folder.entries if names else folder.synced).items():
                if isinstance(node, _File):
                    found[prefix + name] = node.synced
                else:
                    add(node, f"{prefix}{name}/")

        add(self._root, "")
        return found

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Follow all calls inside the block."""
        names = ("open", "close", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(os, name, self._wrapped(getattr(os, name), getattr(self, f"_{name}")))
            yield

    def _wrapped(self, genuine: Any, follow: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if genuine.__name__ == "close":
                follow(None, *args)
                return genuine(*args)
            result = genuine(*args, **options)
            if follow(result, *args, **options):
                self._changed()
            return result

        return call

    def _folder(self, fd: int | None) -> _Folder | None:
        node = None if fd is None else self._fds.get(fd)
        return node if isinstance(node, _Folder) else None

    # Each returns whether it has changed something.

    def _close(self, _: Any, fd: int) -> bool:
        self._fds.pop(fd, None)
        return False

    def _write(self, count: int, fd: int, data: Any) -> bool:
        node = self._fds.get(fd)
        if isinstance(node, _File):
            node.data += bytes(data[:count])
        return isinstance(node, _File)

    def _fsync(self, _: Any, fd: int) -> bool:
        node = self._fds.get(fd)
        if isinstance(node, _File):
            node.synced = node.data
        elif isinstance(node, _Folder):
            node.synced = dict(node.entries)
        return node is not None

    def _rename(
        self, _: Any, old: str, new: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> bool:
        source, target = self._folder(src_dir_fd), self._folder(dst_dir_fd)
        if source is None or target is None:
            return False
        if target.entries.get(new) is not source.entries[old]:
            target.entries[new] = source.entries.pop(old)
        return True

    _replace = _rename

    def _link(
        self, _: Any, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> bool:
        source, target = self._folder(src_dir_fd), self._folder(dst_dir_fd)
        if source is None or target is None:
            return False
        target.entries[new] = source.entries[old]
        return True

    def _unlink(self, _: Any, name: str, *, dir_fd: int | None = None) -> bool:
        folder = self._folder(dir_fd)
        if folder is not None:
            del folder.entries[name]
        return folder is not None

    _rmdir = _unlink

    def _mkdir(self, _: Any, name: str, *args: Any, dir_fd: int | None = None) -> bool:
        folder = self._folder(dir_fd)
        if folder is not None:
            folder.entries[name] = _Folder()
        return folder is not None

    def _open(self, fd: int, path: Any, *args: Any, dir_fd: int | None = None, **_: Any) -> bool:
        if dir_fd is None:
            if path == self._path:
                self._fds[fd] = self._root
            return False
        folder = self._folder(dir_fd)
        if folder is None or path == "..":
            return False
        new = path not in folder.entries
        if new:
            folder.entries[path] = _File()
        self._fds[fd] = folder.entries[path]
        return new


def write_tree(path: Path, files: dict[str, bytes]) -> None:
    """Make a directory with these files."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


class PowerCuts:
    """What power cuts would leave of a directory, after each call of the system while `recording`.

    Args:
        path: as for `Tree`. names: as for `Tree.view`.

    Attributes:
        turn: is noted with each view; set it when a write has been told of.
    """

    def __init__(self, path: Path, *, names: bool) -> None:
        self.turn, self._names = -1, names
        self._tree = Tree(path, self._note)
        self._views: list[tuple[int, dict[str, bytes]]] = []
        self.recording = self._tree.recording

    def _note(self) -> None:
        view = self._tree.view(names=self._names)
        view.pop(".gear-loader.lock", None)
        if not self._views or self._views[-1] != (self.turn, view):
            self._views.append((self.turn, view))

    def copies(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """Turn and a copy, which lies in `folder` until the next one, of each different view."""
        for number, (turn, view) in enumerate(self._views):
            copy = folder / str(number)
            copy.mkdir()
            write_tree(copy, view)
            yield turn, copy
            shutil.rmtree(copy)
