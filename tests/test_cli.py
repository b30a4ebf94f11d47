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
import random
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_common import COLUMNS, named, numbers_of, rows

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


def listed() -> dict[str, dict[str, Any]]:
    """What `gear-loader ls --json` shows, by name."""
    code, output = run("ls", "--json")
    assert code == 0
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
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE)
        value = self.pipe.recv()
        assert not isinstance(value, _Failed), value.trace
        return value

    def kill(self) -> None:
        self.process.kill()
        _eventually(lambda: self.process.exitcode is not None)  # join() would wait for grandchildren too


class _Failed:
    def __init__(self, trace: str) -> None:
        self.trace = trace


def _work(work: Callable[[Any], None], pipe: Any) -> None:
    try:
        work(pipe)
    except BaseException:
        pipe.send(_Failed(traceback.format_exc()))


@contextlib.contextmanager
def child(work: Callable[[Any], None]) -> Iterator[Child]:
    made = Child(work)
    try:
        yield made
    finally:
        made.kill()


HOLDER = """
import os, sys, torch, gear_loader as gear
how, name = sys.argv[1:]
if how == "create":
    table = gear.Table.create({"x": gear.Column(torch.float32, (3,))}, max_steps=50, max_trajectories=5, name=name)
    table.add({"x": torch.ones(7, 3)})
else:
    table = gear.Table.attach(name)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(how: str, name: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program that has the table open until it is killed."""
    command, pipe = [sys.executable, "-c", HOLDER, how, name], subprocess.PIPE
    environment = {**os.environ, "GEAR_LOADER_DIR": str(directory)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Another Python program, in the repository's root."""
    told = {"capture_output": True, "text": True, "timeout": PATIENCE, "cwd": ROOT}
    return subprocess.run([sys.executable, *words], **told)  # type: ignore[call-overload, no-any-return]


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
    told = {"name": "left", "path": str(path), "owner": left["owner"], "columns": columns}
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
        with table.region.lock:
            table.region.array("counters")[DIRTY] = 1
            pipe.send("inside")
            pipe.recv()  # nothing comes: it stays until it is killed

    with child(stop) as other:
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
        table.region.lock.timeout = 0.05
        try:
            with table.region.lock:
                pipe.send("got it")
        except gear.errors.LockTimeoutError:
            pipe.send("refused")

    with gear.Table.attach("mine") as table:
        with table.region.lock:
            assert listed()["mine"]["in_use"]
            assert run("rm", "mine")[0] == 1
            assert run("rm", "--all")[0] == 0
            assert shared_memory.in_use(region_path("mine"))
            with child(attempt) as other:
                assert other.hear() == "refused"
        assert numbers_of(table) == []
    assert run("rm", "mine")[0] == 0


def test_closing_a_table_while_this_process_looks_at_another_unmaps_it(shelf: Path) -> None:
    path = leave("other")
    table = small("closed")
    with shared_memory.opened(str(path)):
        table.close()
        assert table.region._mapping.key in shared_memory.descriptors
    assert table.region._mapping.key not in shared_memory.descriptors
    assert not shared_memory.in_use(region_path("closed"))


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
    code, text = run("ls")
    assert code == 0
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


HEADERS: list[dict[str, Any]] = [
    {"max_steps": "a"},
    {"num_blocks": 10**4000},
    {"schema": [["\x1b[2J\x1b]0;mine\x07", "int8", []]]},
    {"rules": []},
    {"more": 1},
]


def test_a_header_of_other_types_is_one_bad_line(shelf: Path) -> None:
    """Its checksum is right: attaching and listing call the same thing damaged."""
    path = leave("bad", 1)
    whole, fields = path.read_bytes(), _header(path)
    leave("good", 1)
    for change in HEADERS:
        path.write_bytes(whole)
        _with_header(path, {**fields, **change})
        entries = listed()
        assert "damaged" in entries["bad"]["problem"]
        assert (entries["bad"]["trajectories"], entries["bad"]["columns"]) == (None, None)
        assert entries["good"]["problem"] is None
        with pytest.raises(RegionError, match="damaged"):
            gear.Table.attach("bad")
    code, text = run("ls")
    assert code == 0
    assert text.replace("\n", "").isprintable()
    assert len(text.splitlines()) == 4, "a heading, two tables, and what is wrong with one"
    assert run("rm", "bad")[0] == 0
    assert list(listed()) == ["good"]


@pytest.mark.parametrize("seconds", [-(10**15), 253402300800])
def test_a_time_that_no_calendar_has(shelf: Path, seconds: int) -> None:
    path = leave("old", 1)
    try:
        os.utime(path, (seconds, seconds))
    except OverflowError:
        pytest.skip("this system has no such time")
    if int(path.stat().st_mtime) != seconds:
        pytest.skip("this file system has no such time")
    leave("good", 1)
    entries = listed()
    assert (entries["old"]["created"], entries["old"]["problem"]) == (None, None)
    assert entries["old"]["trajectories"] == 1
    assert entries["good"]["created"] is not None
    code, text = run("ls")
    assert code == 0
    assert len(text.splitlines()) == 3
    assert run("rm", "old")[0] == 0


def test_column_names_do_not_reach_the_terminal_as_they_are(shelf: Path) -> None:
    """Those that a table can have, and that are not printable."""
    columns = {"right\u202eleft": gear.Column(torch.int8), "x" * 5000: gear.Column(torch.int8)}
    with gear.Table.create(columns, max_steps=9, max_trajectories=2, name="odd"):
        assert list(listed()["odd"]["columns"]) == list(columns)
        code, text = run("ls")
        assert code == 0
        assert text.replace("\n", "").isprintable()
        assert "right\\u202eleft int8" in text
        assert f"{'x' * 60}... int8" in text
        assert "x" * 61 not in text


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "a", "\x1b[2J", "float32", "error", "\udc80", 10**400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_ROWS = st.lists(
    st.tuples(
        st.text(max_size=4) | _JSON,
        st.sampled_from(["int8", "float32", "x"]) | _JSON,
        st.lists(st.integers(-1, 2**40), max_size=3) | _JSON,
    ),
    max_size=3,
)
_FIELDS = ("max_steps", "max_trajectories", "block_steps", "num_blocks", "rules", "schema", "other")


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3),
    rows=st.none() | _ROWS,
    dropped=st.sets(st.sampled_from(_FIELDS), max_size=1),
    whole=st.none() | _JSON | st.binary(max_size=40),
    seconds=st.none() | st.integers(-(2**33), 2**63 // 10**9),
)
def test_no_header_makes_ls_fail(
    shelf: Path, changes: dict[str, Any], rows: Any, dropped: set[str], whole: Any, seconds: int | None
) -> None:
    path = Path(region_path("bad"))
    path.unlink(missing_ok=True)
    leave("bad")
    fields = {**_header(path), **changes, **({} if rows is None else {"schema": rows})}
    fields = {key: value for key, value in fields.items() if key not in dropped}
    _with_header(path, fields if whole is None else whole)
    if seconds is not None:
        os.utime(path, (seconds, seconds))
    with pytest.MonkeyPatch.context() as patch:  # who uses it is looked up in all of /proc, which is slow
        patch.setattr(shared_memory, "users", lambda keys: {key: [] for key in keys})
        entry = listed()["bad"]
        assert (entry["problem"] is None) == (entry["trajectories"] is not None)
        code, text = run("ls")
        assert code == 0
        assert text.replace("\n", "").isprintable()
        assert len(text.splitlines()) == (2 if entry["problem"] is None else 3)
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
        entries = listed()
        assert list(entries) == list(kinds)
        assert {entry["problem"] for entry in entries.values()} == {
            "It is not a regular file, and so not a table."
        }
        assert run("ls")[0] == 0
        problems = {
            kind: f"{path} is not a regular file, and so no table. Remove it by hand.\n"
            for kind, path in paths.items()
        }
        for kind, problem in problems.items():
            assert run("rm", kind) == (1, problem)
        assert run("rm", "--all") == (
            0,
            "".join(f"Left {kind}: {problem}" for kind, problem in problems.items()),
        )
    assert all(os.path.lexists(path) for path in paths.values())
    assert target.read_bytes() == shared_memory.MAGIC


def test_names_that_no_table_can_have(shelf: Path) -> None:
    odd = b"\xff\xfe".decode(errors="surrogateescape")
    names = sorted(["a b", "", "[bold]x", "a\nb", "a\x1b[2Jb", "ä", odd, "-x"])
    for name in names:
        (shelf / f"{shared_memory.PREFIX}{name}").write_bytes(b"x")
    assert list(listed()) == names
    code, text = run("ls")
    assert code == 0
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    lines = text.splitlines()[1:]
    assert len(lines) == 2 * len(names)
    for name in names:
        shown = name if name.isprintable() and name and name.isascii() else ascii(name)
        assert any(line.startswith(shown) for line in lines)
        code, text = run("rm", "--", name)
        assert code == 1
        assert text.startswith(f"Table name {name!r} was received; expected 1 to 128 letters, digits, ")
    code, text = run("rm", "--all")
    assert code == 0
    assert text.count("Left ") == len(names) == len(list(shelf.iterdir()))


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_without_permission(shelf: Path, mode: int) -> None:
    """Another user's table, which may be read or not, is neither described wrongly nor removed."""
    if os.getuid() != 0:
        pytest.skip("becomes another user, which only root can")
    path = leave("other", 1)
    path.chmod(mode)

    def look(pipe: Any) -> None:
        os.setgid(65534)
        os.setuid(65534)
        pipe.send((listed(), run("rm", "other"), run("rm", "--all")))

    with child(look) as other:
        entries, one, everything = other.hear()
    entry = entries["other"]
    if mode == 0o600:
        assert entry["problem"] == f"It cannot be read: [Errno 13] Permission denied: '{path}'."
        assert (entry["in_use"], entry["trajectories"]) == (None, None)
    else:
        assert (entry["problem"], entry["in_use"], entry["trajectories"]) == (None, False, 1)
    assert entry["bytes"] == path.stat().st_size
    number, reason = (13, "Permission denied") if mode == 0o600 else (1, "Operation not permitted")
    problem = f"Table 'other' cannot be removed: [Errno {number}] {reason}: '{path}'."
    problem += " Its owner or root can remove it.\n"
    assert one == (1, problem)
    assert everything == (0, f"Left other: {problem}")
    assert path.exists()


# Removing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["create", pytest.param("attach", marks=pytest.mark.long)])
def test_a_table_is_left_over_when_its_process_is_killed(shelf: Path, how: str) -> None:
    if how == "attach":
        leave("held")
    with holder(how, "held", shelf) as process:
        code, text = run("rm", "held")
        assert code == 1
        assert text.startswith(f"Table 'held' is in use by process {process.pid} ({sys.executable} -c")
        assert "Table.unlink()" in text
        entry = listed()["held"]
        assert (entry["in_use"], entry["processes"]) == (True, [process.pid])
        process.kill()
        process.wait(PATIENCE)
        code, text = run("rm", "held")
    assert code == 0
    assert text.startswith("Removed held (")
    assert not os.path.exists(region_path("held"))
    code, text = run("rm", "held")
    assert code == 1
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

    with child(make) as parent:
        pid = parent.hear()
        parent.kill()
    try:
        assert listed()["family"]["processes"] == [pid]
        code, text = run("rm", "family")
        assert code == 1
        assert f" in use by process {pid} (" in text
    finally:
        os.kill(pid, signal.SIGKILL)
    _eventually(lambda: run("rm", "family")[0] == 0)


def _eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_that_closes_the_table_does_not_free_it(shelf: Path) -> None:
    with small("family") as table:

        def close(pipe: Any) -> None:
            table.close()
            pipe.send(shared_memory.in_use(region_path("family")))

        with child(close) as other:
            assert other.hear() is True
        assert run("rm", "family")[0] == 1
    assert run("rm", "family")[0] == 0


def test_a_view_that_outlives_its_table_is_a_use(shelf: Path) -> None:
    table = small("view")
    table.add(rows(1, 5))
    view = table.region.column("number")
    table.close()
    assert listed()["view"]["in_use"]
    code, text = run("rm", "view")
    assert code == 1
    assert text.startswith(f"Table 'view' is in use by process {os.getpid()} (")

    assert _from_outside(shelf, "view") == "in use"
    assert view.size
    del view
    assert _from_outside(shelf, "view") == "left over"
    assert run("rm", "view")[0] == 0


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


def test_every_name_is_tried(shelf: Path) -> None:
    leave("a")
    leave("b")
    with small("used"):
        code, text = run("rm", "a", "used", "gone", "../a", "b", "b")
        assert code == 1
        lines = text.splitlines()
        used = f"Table 'used' is in use by process {os.getpid()}"
        gone = "There is no table named 'gone'; tables on this machine: b, used."
        assert [line.split(" (")[0] for line in lines] == ["Removed a", used, gone, lines[3], "Removed b"]
        assert lines[3].startswith("Table name '../a' was received; expected ")
        assert list(listed()) == ["used"]


def test_all_removes_what_nobody_uses_and_says_what_it_left(shelf: Path) -> None:
    leave("a")
    leave("b")
    with small("used") as table:
        code, text = run("rm", "--all")
        assert code == 0
        lines = text.splitlines()
        left = f"Left used: Table 'used' is in use by process {os.getpid()}"
        assert [line.split(" (")[0] for line in lines] == ["Removed a", "Removed b", left]
        table.add(rows(1, 3))
        assert list(listed()) == ["used"]
    assert run("rm", "--all")[0] == 0
    assert run("rm", "--all") == (0, f"No tables in {shelf}.\n")


@pytest.mark.parametrize("words", [[], ["a", "--all"]])
def test_rm_wants_names_or_all(shelf: Path, words: list[str]) -> None:
    leave("a")
    code, text = run("rm", *words)
    assert code == 2
    assert "Give either the names of tables, or --all." in text
    assert list(listed()) == ["a"]


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
    monkeypatch.setattr(shared_memory, "users", lambda keys: {key: [] for key in keys})
    with small("far"):
        entry = listed()["far"]
        assert (entry["in_use"], entry["processes"]) == (True, [])
        code, text = run("rm", "far")
        assert code == 1
        assert text.startswith("Table 'far' is in use by a process that cannot be seen from here (")


def test_unlink_takes_the_name_of_a_table_in_use(shelf: Path) -> None:
    with small("mine") as table:
        table.unlink()
        assert listed() == {}
        table.add(rows(1, 3))


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "DIRECTORY", "/nowhere/at/all")
    for words in (["ls"], ["rm", "--all"]):
        code, text = run(*words)
        assert code == 1
        assert text.startswith("/nowhere/at/all cannot be read: [Errno 2] ")
    code, text = run("rm", "a")
    assert code == 1
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
    if removed:
        assert found[0].startswith("There is no table named 'busy'; tables on this machine: none.")
    else:
        assert found == [[1]]


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


def test_a_table_is_in_use_before_it_has_its_name(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    genuine = os.link

    def link(*words: Any, **options: Any) -> None:
        genuine(*words, **options)
        seen.append(_from_outside(shelf, "new"))

    monkeypatch.setattr(os, "link", link)
    with small("new"):
        assert seen == ["in use"]


def _yes(answer: Any) -> bool:
    assert isinstance(answer, bool), answer
    return answer


@pytest.mark.long
def test_attach_races_with_rm(shelf: Path) -> None:
    """One of the two wins: a table that works and keeps its name, or an error and no table."""
    rounds = 120

    def attach(pipe: Any) -> None:
        rng = random.Random(0)
        while (name := pipe.recv()) is not None:
            time.sleep(rng.uniform(0, 1.5e-3))
            try:
                table = gear.Table.attach(name)
            except RegionError as error:
                pipe.send(not str(error).startswith(f"There is no table named '{name}'; ") and repr(error))
                continue
            pipe.send(True)
            pipe.recv()  # rm has ended
            here = os.stat(region_path(name))
            assert (here.st_dev, here.st_ino) == table.region._mapping.key, "removed under it"
            table.add(rows(2, 4))
            assert set(numbers_of(table)) == {1, 2}
            table.close()
            pipe.send(True)

    def remove(pipe: Any) -> None:
        rng = random.Random(1)
        while (name := pipe.recv()) is not None:
            time.sleep(rng.uniform(0, 1e-3))
            try:
                shared_memory.remove(name, anything=True)
                pipe.send(True)
            except RegionError as error:
                pipe.send(not str(error).startswith(f"Table {name!r} is in use by ") and repr(error))

    won = 0
    with child(attach) as user, child(attach) as another, child(remove) as remover:
        for i in range(rounds):
            path = leave(f"race.{i}", 1)
            for each in (user, another, remover):
                each.pipe.send(path.name[len(shared_memory.PREFIX) :])
            removed = _yes(remover.hear())
            attached = [each for each in (user, another) if _yes(each.hear())]
            for each in attached:
                each.pipe.send("go on")
                assert each.hear()
            assert removed == (not attached)
            assert path.exists() == (not removed)
            path.unlink(missing_ok=True)
            won += removed
    assert 0 < won < rounds, "the race has always ended in the same way"


# The program -----------------------------------------------------------------------------------------


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


def test_a_region_begins_with_the_magic() -> None:
    with named() as table:
        assert table.region.layout.preamble().startswith(shared_memory.MAGIC)


def test_help() -> None:
    done = program("-m", "gear_loader", "--help")
    assert done.returncode == 0
    assert "python -m gear_loader [OPTIONS] COMMAND" in done.stdout
    assert {"ls", "rm"} <= set(done.stdout.split())
