"""The command line, and what makes a region one in use: `gear_loader.cli` and `gear_loader.storage.shared_memory`."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import mmap
import multiprocessing
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_common import run
from table_common import COLUMNS, numbers_of, rows
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.cli import app
from gear_loader.errors import RegionError
from gear_loader.storage import region, shared_memory
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.layout import FORMAT_VERSION
from gear_loader.storage.shared_memory import region_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60.0  # seconds for what takes milliseconds


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of one test alone; forked children have it too."""
    directory = Path(tempfile.mkdtemp(prefix="gear-loader-test.", dir=shared_memory.DIRECTORY))
    directory.chmod(0o1777)
    monkeypatch.setattr(shared_memory, "DIRECTORY", str(directory))
    yield directory
    gc.collect()
    shutil.rmtree(directory)


def said(*words: str, code: int = 0) -> str:
    """What `gear-loader ...` shows, which ends with that code."""
    found, text = run(*words)
    assert found == code, text
    return text


def listed() -> dict[str, dict[str, Any]]:
    """What `gear-loader ls --json` shows, by name."""
    output = said("ls", "--json")
    entries = json.loads(output)
    assert [entry["name"] for entry in entries] == sorted(entry["name"] for entry in entries)
    return {entry["name"]: entry for entry in entries}


def leave(name: str, *numbers: int) -> Path:
    """A table that nobody has mapped any more."""
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=16, block_steps=4, name=name) as table:
        for number in numbers:
            table.add(rows(number, 5))
    return Path(region_path(name))


def small(name: str) -> gear.Table:
    return gear.Table.create(COLUMNS, max_steps=20, max_trajectories=2, name=name)


class Child:
    """`work(pipe)` in a forked process."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()

        def guarded() -> None:
            try:
                work(theirs)
            except BaseException:
                theirs.send(RuntimeError(traceback.format_exc()))

        self.process = multiprocessing.get_context("fork").Process(target=guarded, daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE)
        value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def kill(self, *_: Any) -> None:
        self.process.kill()
        wait_until(lambda: self.process.exitcode is not None)  # join() would wait for grandchildren too

    def __enter__(self) -> Child:
        return self

    __exit__ = kill


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Another Python program, in the repository's root."""
    told = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": ROOT}
    return subprocess.run([sys.executable, *words], **told)  # type: ignore[call-overload, no-any-return]


LOOK = """
import sys
from gear_loader.storage import shared_memory
shared_memory.DIRECTORY, name = sys.argv[1:]
print("in use" if shared_memory.in_use(shared_memory.region_path(name)) else "left over")
"""


def _from_outside(shelf: Path, name: str) -> str:
    """What a process sees that has inherited nothing."""
    done = program("-c", LOOK, str(shelf), name)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Listing ---------------------------------------------------------------------------------------------


def test_ls(shelf: Path) -> None:
    assert run("ls") == (0, f"No tables in {shelf}.\n")
    path = leave("left", 1, 2, 3)
    with gear.Table.create(
        {"x": gear.Column(torch.int8, (2, 3))}, max_steps=9, max_trajectories=2, name="used"
    ):
        found = listed()
        code, text = run("ls")
    assert list(found) == ["left", "used"]
    left = found["left"]
    assert abs(time.time() - datetime.fromisoformat(left.pop("created")).timestamp()) < PATIENCE
    with contextlib.suppress(KeyError):
        assert left["owner"] == pwd.getpwuid(os.getuid()).pw_name
    columns = {n: {"dtype": c.dtype_name, "shape": list(c.shape)} for n, c in COLUMNS.items()}
    use = {"bytes": path.stat().st_size, "in_use": False, "processes": [], "problem": None}
    sizes = {"trajectories": 3, "steps": 15, "max_trajectories": 16, "max_steps": 200}
    told = {"name": "left", "path": str(path), "owner": left["owner"], "columns": columns, "disk": None}
    assert left == {**told, **use, **sizes}
    used = found["used"]
    assert (used["in_use"], used["processes"]) == (True, [os.getpid()])
    assert used["columns"] == {"x": {"dtype": "int8", "shape": [2, 3]}}
    assert code == 0
    title, first, second = text.splitlines()
    assert title.split() == ["NAME", "SIZE", "TRAJECTORIES", "STEPS", "COLUMNS", "AGE", "OWNER", "STATE"]
    assert (
        " 3 of 16  15 of 200  number int64, step int32, length int32, value float32[3], and 1 more " in first
    )
    assert first.rstrip().endswith("left over")
    assert " x int8[2, 3] " in second
    assert second.rstrip().endswith(f"in use by {os.getpid()}")


def test_ls_changes_nothing_and_waits_for_nothing(shelf: Path) -> None:
    """Not with an index that has to be repaired, nor while a process is stopped inside the lock."""
    path = leave("left", 1, 2)

    def stop(pipe: Any) -> None:
        table = gear.Table.attach("left")
        with table._engine.region.lock:
            table._engine.region.array("counters")[DIRTY] = 1
            pipe.send("inside")
            pipe.recv()  # nothing comes: it stays until it is killed

    with Child(stop) as other:
        assert other.hear() == "inside"
        before, times = path.read_bytes(), path.stat()
        assert listed()["left"]["trajectories"] == 2  # while the other one is inside
        assert path.read_bytes() == before
        assert path.stat().st_mtime_ns == times.st_mtime_ns


def test_neither_command_drops_a_lock_of_this_process(shelf: Path) -> None:
    """Closing any descriptor of a file drops the record locks that the process has on it."""
    leave("mine")

    def attempt(pipe: Any) -> None:
        table = gear.Table.attach("mine")
        table._engine.region.lock.timeout = 0.05
        try:
            with table._engine.region.lock:
                pipe.send("got it")
        except gear.errors.LockTimeoutError:
            pipe.send("refused")

    with gear.Table.attach("mine") as table:
        with table._engine.region.lock:
            assert listed()["mine"]["in_use"]
            assert run("rm", "mine")[0] == 1
            assert run("rm", "--all")[0] == 0
            assert shared_memory.in_use(region_path("mine"))
            with Child(attempt) as other:
                assert other.hear() == "refused"
        assert numbers_of(table) == []
    assert run("rm", "mine")[0] == 0


# Files that are no tables ----------------------------------------------------------------------------


def _version(data: bytes) -> bytes:
    return data[:8] + struct.pack("<I", FORMAT_VERSION + 5) + data[12:]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "version": (_version, f"It has table format {FORMAT_VERSION + 5}; this version of Gear Loader reads "),
    "header": (lambda data: data[:70] + b"?" + data[71:], "It has a damaged header: its checksum is "),
    "truncated": (lambda data: data[:-1], "It is damaged: it has "),
    "cut off": (lambda data: data[:30], "It is not a Gear Loader table: "),
    "json only": (lambda data: data[:70], "It has a damaged header: "),
    "empty": (lambda data: b"", "It is not a Gear Loader table: it starts with b''"),
    "foreign": (lambda data: b"some notes", "It is not a Gear Loader table: it starts with b'some not'"),
}


def test_damaged_files_are_listed_with_the_reason_and_removed(shelf: Path) -> None:
    """`rm --all` removes damaged tables, and spares what never was one."""
    paths = {kind: leave(kind.replace(" ", "-"), 1) for kind in DAMAGE}
    leave("good", 1)
    data = {kind: DAMAGE[kind][0](path.read_bytes()) for kind, path in paths.items()}
    for kind, path in paths.items():
        path.write_bytes(data[kind])
    entries = listed()
    assert entries["good"]["problem"] is None
    text = said("ls")
    assert text.count("unreadable, left over") == len(DAMAGE)
    everything = run("rm", "--all")
    assert everything[0] == 0
    assert "Removed good (" in everything[1]
    for kind, (_, problem) in DAMAGE.items():
        path, name = paths[kind], kind.replace(" ", "-")
        bad = entries[name]
        assert bad["problem"].startswith(problem)
        assert (bad["in_use"], bad["processes"]) == (False, [])
        assert (bad["trajectories"], bad["columns"]) == (None, None)
        assert f"{name}: {problem}" in text
        removed = f"Removed {name} ({_size(bad['bytes'])})."
        if data[kind].startswith(shared_memory.MAGIC):
            assert removed in everything[1]
        else:
            assert (
                f"Left {name}: {path} does not begin as a table does: {data[kind][:8]!r} was found, expected "
                f"{shared_memory.MAGIC!r}. If it is not needed, remove it by its name: gear-loader rm {name}\n"
            ) in everything[1]
            assert path.read_bytes() == data[kind]
            assert run("rm", name) == (0, f"{removed}\n")
        assert not path.exists()


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"


def _with_header(path: Path, fields: Any) -> None:
    """Give a table's file another header, with sizes and a checksum that fit as far as they can."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields, separators=(",", ":")).encode()
    data = path.read_bytes()
    head = struct.pack("<8sIIQ", shared_memory.MAGIC, FORMAT_VERSION, len(body), len(data))
    head = (head + struct.pack("<I", zlib.crc32(head + body))).ljust(64, b"\0") + body
    path.write_bytes(head.ljust(len(data), b"\0") if len(head) < len(data) else head)


def _header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    fields: dict[str, Any] = json.loads(data[64 : 64 + struct.unpack_from("<I", data, 12)[0]])
    return fields


def test_a_time_that_no_calendar_has(shelf: Path) -> None:
    path = leave("old", 1)
    for seconds in (-(10**15), 253402300800):
        with contextlib.suppress(OverflowError):
            os.utime(path, (seconds, seconds))
        if int(path.stat().st_mtime) == seconds:  # this system and this file system have such a time
            entry = listed()["old"]
            assert (entry["created"], entry["problem"], entry["trajectories"]) == (None, None, 1)
            code, text = run("ls")
            assert (code, len(text.splitlines())) == (0, 2)
    assert run("rm", "old")[0] == 0


def test_column_names_do_not_reach_the_terminal_as_they_are(shelf: Path) -> None:
    """Those that a table can have, and that are not printable."""
    columns = {"right\u202eleft": gear.Column(torch.int8), "x" * 5000: gear.Column(torch.int8)}
    with gear.Table.create(columns, max_steps=9, max_trajectories=2, name="odd"):
        assert list(listed()["odd"]["columns"]) == list(columns)
        text = said("ls")
        assert text.replace("\n", "").isprintable()
        assert "right\\u202eleft int8" in text
        assert f"{'x' * 60}... int8" in text
        assert "x" * 61 not in text


DAMAGED: list[Any] = [
    {"max_steps": "a"},
    {"max_steps": -1},
    {"max_trajectories": 10**400},
    {"num_blocks": 10**4000},
    {"block_steps": None},
    {"schema": [["\x1b[2J\x1b]0;mine\x07", "int8", []]]},
    {"schema": [["x", "int8", [-1]]]},
    {"schema": [["\udc80", "x", []], 3]},
    {"schema": {}},
    {"rules": []},
    {"more": 1},
    [],
    b"\xff{",
]
"""What a header has instead, or the whole of it."""


def test_no_header_makes_ls_fail(shelf: Path) -> None:
    """Attaching and listing call the same files damaged, of which the checksum is right."""
    leave("good", 1)
    for number, changes in enumerate(DAMAGED):
        path = leave(f"bad-{number}")
        _with_header(path, {**_header(path), **changes} if isinstance(changes, dict) else changes)
    entries = listed()
    assert (entries["good"]["problem"], entries["good"]["trajectories"]) == (None, 1)
    for number in range(len(DAMAGED)):
        bad = entries[f"bad-{number}"]
        assert "damaged" in bad["problem"]
        assert (bad["trajectories"], bad["columns"]) == (None, None)
        with pytest.raises(RegionError, match="damaged"):
            gear.Table.attach(f"bad-{number}")
    text = said("ls")
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) == 2 + 2 * len(DAMAGED)  # a line for each table, and one for each problem
    assert run("rm", "--all")[0] == 0


def test_what_is_no_file_is_listed_and_left(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kinds = tmp_path / "target", ("dangling", "directory", "link", "pipe", "socket")
    target.write_bytes(shared_memory.MAGIC)
    paths = {kind: Path(region_path(kind)) for kind in kinds}
    monkeypatch.chdir(shelf)  # a socket's path has 107 bytes at most
    paths["directory"].mkdir()
    os.mkfifo(paths["pipe"])
    paths["link"].symlink_to(target)
    paths["dangling"].symlink_to(tmp_path / "nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(paths["socket"].name)
        entries, problem = listed(), "It is not a regular file, and so not a table."
        assert {name: entry["problem"] for name, entry in entries.items()} == dict.fromkeys(kinds, problem)
        assert run("ls")[0] == 0
        left = ""
        for kind, path in paths.items():
            problem = f"{path} is not a regular file, and so no table. Remove it by hand.\n"
            assert run("rm", kind) == (1, problem)
            left += f"Left {kind}: {problem}"
        assert run("rm", "--all") == (0, left)
    assert all(os.path.lexists(path) for path in paths.values())
    assert target.read_bytes() == shared_memory.MAGIC


def test_names_that_no_table_can_have(shelf: Path) -> None:
    odd = b"\xff\xfe".decode(errors="surrogateescape")
    names = sorted(["a b", "", "[bold]x", "a\nb", "a\x1b[2Jb", "ä", odd, "-x"])
    for name in names:
        (shelf / f"{shared_memory.PREFIX}{name}").write_bytes(b"x")
    assert list(listed()) == names
    text = said("ls")
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    lines = text.splitlines()[1:]
    assert len(lines) == 2 * len(names)
    for name in names:
        shown = name if name.isprintable() and name and name.isascii() else ascii(name)
        assert any(line.startswith(shown) for line in lines)
        text = said("rm", "--", name, code=1)
        assert text.startswith(f"Table name {name!r} was received; expected 1 to 128 letters, digits, ")
    text = said("rm", "--all")
    assert text.count("Left ") == len(names) == len(list(shelf.iterdir()))
    with pytest.raises(
        RegionError, match="There is no table named 'b'"
    ):  # with names that are not UTF-8 beside it
        gear.Table.attach("b")


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can")
def test_without_permission(shelf: Path) -> None:
    """Another user's table, which may be read or not, is neither described wrongly nor removed."""
    path = leave("other", 1)

    def look(pipe: Any) -> None:
        os.setgid(65534)
        os.setuid(65534)
        pipe.send((listed()["other"], run("rm", "other"), run("rm", "--all")))

    cannot = f"It cannot be read: [Errno 13] Permission denied: '{path}'."
    for mode, *seen, reason in (
        (0o600, cannot, None, None, "[Errno 13] Permission denied"),
        (0o644, None, False, 1, "[Errno 1] Operation not permitted"),
    ):
        path.chmod(mode)
        with Child(look) as other:
            entry, one, everything = other.hear()
        assert [entry[name] for name in ("problem", "in_use", "trajectories")] == seen
        assert entry["bytes"] == path.stat().st_size
        problem = f"Table 'other' cannot be removed: {reason}: '{path}'. Its owner or root can remove it.\n"
        assert (one, everything) == ((1, problem), (0, f"Left other: {problem}"))
    assert path.exists()


# Removing --------------------------------------------------------------------------------------------


def test_a_table_is_left_over_when_its_process_is_killed(shelf: Path) -> None:
    def hold(pipe: Any) -> None:
        table = small("held")
        pipe.send(os.getpid())
        pipe.recv()  # nothing comes
        table.close()

    with Child(hold) as other:
        pid = other.hear()
        text = said("rm", "held", code=1)
        assert text.startswith(f"Table 'held' is in use by process {pid} (")
        assert "Table.unlink()" in text
        entry = listed()["held"]
        assert (entry["in_use"], entry["processes"]) == (True, [pid])
    text = said("rm", "held")
    assert text.startswith("Removed held (")
    assert not os.path.exists(region_path("held"))
    text = said("rm", "held", code=1)
    assert text.startswith("There is no table named 'held'; tables on this machine: none")


def test_a_forked_child_goes_on_using_the_table(shelf: Path) -> None:
    """Its parent, which made the table, has been killed; the child has never touched it."""

    def make(pipe: Any) -> None:
        table = small("family")
        pid = os.fork()
        if pid == 0:
            time.sleep(PATIENCE)
            os._exit(0)
        pipe.send(pid)
        time.sleep(PATIENCE)
        table.close()

    with Child(make) as parent:
        pid = parent.hear()
        parent.kill()
    try:
        assert listed()["family"]["processes"] == [pid]
        text = said("rm", "family", code=1)
        assert f" in use by process {pid} (" in text
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run("rm", "family")[0] == 0)


def test_a_table_is_in_use_before_it_has_its_name_and_while_there_is_a_view(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    genuine = os.link

    def link(*words: Any, **options: Any) -> None:
        genuine(*words, **options)
        seen.append(_from_outside(shelf, "view"))

    monkeypatch.setattr(os, "link", link)
    table = small("view")
    assert seen == ["in use"]
    table.add(rows(1, 5))
    view = table._engine.region.column("number")
    table.close()
    assert listed()["view"]["in_use"]
    text = said("rm", "view", code=1)
    assert text.startswith(f"Table 'view' is in use by process {os.getpid()} (")
    assert _from_outside(shelf, "view") == "in use"
    assert view.size
    del view
    assert _from_outside(shelf, "view") == "left over"
    assert run("rm", "view")[0] == 0


def test_names_and_all(shelf: Path) -> None:
    """Every name is tried; `--all` removes what is not in use, and says what it left."""
    leave("a")
    leave("b")
    for words in ([], ["a", "--all"]):
        text = said("rm", *words, code=2)
        assert "Give either the names of tables, or --all." in text
    assert list(listed()) == ["a", "b"]
    with small("used") as table:
        text = said("rm", "a", "used", "gone", "../a", "b", "b", code=1)
        lines = text.splitlines()
        used = f"Table 'used' is in use by process {os.getpid()}"
        gone = "There is no table named 'gone'; tables on this machine: b, used."
        assert [line.split(" (")[0] for line in lines] == ["Removed a", used, gone, lines[3], "Removed b"]
        assert lines[3].startswith("Table name '../a' was received; expected ")
        leave("a")
        leave("b")
        text = said("rm", "--all")
        assert [line.split(" (")[0] for line in text.splitlines()] == [
            "Removed a",
            "Removed b",
            f"Left used: {used}",
        ]
        assert list(listed()) == ["used"]

        def close(pipe: Any) -> None:
            table.close()
            pipe.send(shared_memory.in_use(region_path("used")))

        with Child(close) as other:  # a forked child that closes the table does not free it
            assert other.hear() is True
        assert run("rm", "used")[0] == 1
        table.add(rows(1, 3))
        table.unlink()  # takes the name of a table in use
        assert listed() == {}
        table.add(rows(1, 3))
    assert run("rm", "--all") == (0, f"No tables in {shelf}.\n")


def test_a_mapping_without_a_lock_is_a_use(shelf: Path) -> None:
    """As older versions have it."""
    path = leave("old")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert not shared_memory.in_use(str(path))
        assert listed()["old"]["in_use"]
        assert f" is in use by process {os.getpid()} (" in run("rm", "old")[1]
    assert run("rm", "old")[0] == 0


def test_a_user_that_cannot_be_seen(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container, or another user's."""
    path = leave("other")
    monkeypatch.setattr(shared_memory, "users", lambda keys: {key: [] for key in keys})
    table = small("far")
    entry = listed()["far"]
    assert (entry["in_use"], entry["processes"]) == (True, [])
    text = said("rm", "far", code=1)
    assert text.startswith("Table 'far' is in use by a process that cannot be seen from here (")
    with shared_memory.opened(str(path)):  # closing while this process looks at another table unmaps it
        table.close()
        assert table._engine.region._mapping.key in shared_memory.descriptors
    assert table._engine.region._mapping.key not in shared_memory.descriptors
    assert not shared_memory.in_use(region_path("far"))


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "DIRECTORY", "/nowhere/at/all")
    for words in (["ls"], ["rm", "--all"]):
        text = said(*words, code=1)
        assert text.startswith("/nowhere/at/all cannot be read: [Errno 2] ")
    text = said("rm", "a", code=1)
    assert text.startswith("GEAR_LOADER_DIR is '/nowhere/at/all': [Errno 2] ")


# Attaching against removing --------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """As another process does that removes or looks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize("removed", [True, False])
def test_attach_waits_for_one_that_removes_or_looks(shelf: Path, removed: bool) -> None:
    path = leave("busy", 1)
    found: list[Any] = []

    def attach() -> None:
        try:
            with gear.Table.attach("busy") as table:
                found.append(numbers_of(table))
        except RegionError as error:
            found.append(str(error))

    with locked(path):
        thread = threading.Thread(target=attach)
        thread.start()
        time.sleep(0.1)
        assert not found
        if removed:
            path.unlink()
    thread.join(PATIENCE)
    gone = "There is no table named 'busy'; tables on this machine: none."
    assert found[0].startswith(gone) if removed else found == [[1]]


def test_attach_does_not_wait_for_ever(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_ATTACH_TIMEOUT", 0.1)
    path = leave("busy", 1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with locked(path), pytest.raises(RegionError) as caught:
        gear.Table.attach("busy")
    assert str(caught.value) == (
        "Table 'busy' has been locked for over 0.1 s, perhaps by a process that is removing it. That process may be "
        f"stopped; `fuser {path}` names it."
    )
    assert len(os.listdir("/proc/self/fd")) == before
    assert run("rm", "busy")[0] == 0


def test_rm_is_not_refused_because_somebody_looks(shelf: Path) -> None:
    path = leave("busy")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(path))
        threading.Timer(0.005, stack.pop_all().close).start()
        assert run("rm", "busy")[0] == 0


@pytest.mark.parametrize("what", ["attach", "remove"])
def test_a_file_that_takes_the_place_of_the_one_opened(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between opening and locking the table is removed, and another made of that name."""
    path = leave("name", 1)
    replaced: list[int] = []
    genuine = fcntl.flock

    def replace(fd: int, how: int) -> None:
        if how & fcntl.LOCK_NB and not replaced:
            replaced.append(path.stat().st_ino)
            path.rename(shelf / "aside")
            leave("name", 2)
            stack.enter_context(gear.Table.attach("name"))
        genuine(fd, how)

    # The creation inside takes the guard too.
    monkeypatch.setattr(shared_memory, "guarded", contextlib.nullcontext)
    monkeypatch.setattr(region, "guarded", contextlib.nullcontext)
    monkeypatch.setattr(fcntl, "flock", replace)
    with contextlib.ExitStack() as stack:
        if what == "attach":
            with gear.Table.attach("name") as table:
                assert numbers_of(table) == [2]
        else:
            assert run("rm", "name")[0] == 1
            assert path.exists()
    assert replaced == [(shelf / "aside").stat().st_ino]


def test_rm_loads_neither_torch_nor_numpy() -> None:
    done = program(
        "-c",
        "import sys\nfrom typer.testing import CliRunner\nfrom gear_loader.cli import app\n"
        "assert CliRunner().invoke(app, ['rm', 'test.there.is.none']).exit_code == 1\n"
        "print(*sorted({'numba', 'numpy', 'torch', 'triton'} & set(sys.modules)))",
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_program_that_is_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, attribute = scripts["gear-loader"].partition(":")
    assert getattr(importlib.import_module(module), attribute) is app
    done = program("-m", "gear_loader", "--help")
    assert done.returncode == 0
    assert "python -m gear_loader [OPTIONS] COMMAND" in done.stdout
    assert {"ls", "rm"} <= set(done.stdout.split())
