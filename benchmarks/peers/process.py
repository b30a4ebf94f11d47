"""Other processes that measure, and the interpreters that have another library: commands go to a process's standard
input, answers come back, one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO, cast

from benchmarks import machine

_SCRIPT = str(Path(__file__).with_name("serve.py"))


_UNDO = """
import json, subprocess, sys
for line in reversed(sys.stdin.read().splitlines()):
    subprocess.run(json.loads(line), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


class PeerFailed(Exception):
    """Another process could not do what it was told to; the message says why."""


class PeerProcess:
    """A process that answers commands, and ends with its input.

    command: what to start: an interpreter, a script, its arguments. patience: seconds that an answer may take. folder:
    where it runs; here by default. about: what it said about itself: versions.
    """

    def __init__(
        self, command: Sequence[str], *, patience: float = 300.0, folder: Path | None = None
    ) -> None:
        self._patience = patience
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        try:
            self._process = subprocess.Popen(command, encoding="utf-8", cwd=folder, **pipes)
        except OSError as error:
            self._errors.close()
            raise PeerFailed(f"{command[0]}: {error.strerror}") from error
        self._in, self._out = cast(TextIO, self._process.stdin), cast(TextIO, self._process.stdout)
        try:
            self.about = self.receive()
        except PeerFailed:
            self.close()
            raise

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self.send(what, **arguments)
        return self.receive()

    def send(self, what: str, **arguments: Any) -> None:
        """Send a command, whose answer `receive` brings."""
        try:
            print(json.dumps({"do": what, **arguments}), file=self._in, flush=True)
        except OSError as error:
            raise PeerFailed(f"it has ended: {self._last_error()}") from error

    def receive(self) -> dict[str, Any]:
        late = threading.Timer(self._patience, self._process.kill)
        late.start()
        try:
            answer = json.loads(self._out.readline())
        except ValueError:
            raise PeerFailed(f"it has ended, or took {self._patience:.0f} s: {self._last_error()}") from None
        finally:
            late.cancel()
        if "error" in answer:
            raise PeerFailed(" ".join(str(answer["error"]).split())[:200])
        return dict(answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._errors.close()

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        return lines[-1] if lines else "no message"


def receive_all(processes: Iterable[PeerProcess]) -> list[dict[str, Any]]:
    """The answers of all of them; only then the first error, so that no answer is taken for that of a later command."""
    answers, failures = [], []
    for number, process in enumerate(processes):
        try:
            answers.append(process.receive())
        except PeerFailed as error:
            failures.append(f"process {number}: {error}")
    if failures:
        raise PeerFailed("; ".join(failures))
    return answers


@contextlib.contextmanager
def together(makers: Sequence[Callable[[], PeerProcess]], most: int) -> Iterator[list[Future[PeerProcess]]]:
    """Processes that are started side by side, at most so many at a time, and all ended at the same time."""
    with ThreadPoolExecutor(most) as pool:
        made = [pool.submit(make) for make in makers]
    there = [one.result() for one in made if one.exception() is None]
    try:
        yield made
    finally:
        with ThreadPoolExecutor(max(1, len(there))) as pool:
            list(pool.map(PeerProcess.close, there))


class Undo:
    """Commands that are run when this process has ended, however it ended, or this is left; the last one first.

    A process in a session of its own waits for it.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", _UNDO]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "encoding": "utf-8", "start_new_session": True}
        self._process = subprocess.Popen(command, **options)

    def add(self, *command: str) -> None:
        """Run this in the end. Called before what it undoes is done."""
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


FOLDER = machine.ROOT / ".peers"
"""Where `make.sh` puts the environments unless it is told otherwise."""
OWN = ("gear", "plain")
"""What needs no environment of its own."""


def environments(given: Path | None) -> Path | None:
    """The folder of the environments that are meant; None if there shall be no peers."""
    named = os.environ.get("GEAR_LOADER_PEERS")
    return given or (FOLDER if named is None else Path(named) if named else None)


def start(
    folder: Path | None,
    task: str,
    library: str,
    variant: str,
    threads: int = 1,
    *,
    environment: str | None = None,
    patience: float = 300.0,
    prefix: Sequence[str] = (),
    own: Path | None = None,
) -> PeerProcess:
    """A process that answers commands of a task with a library: see `benchmarks/peers/serve.py`.

    Args:
        environment: of `make.sh`; by default the library's own, or none for ours and torch alone.
        prefix: words before the command, which run it elsewhere. own: folder with another `gear_loader`.
    """
    python = Path(sys.executable)
    if environment is None and library.partition("_")[0] not in OWN:
        environment = library.partition("_")[0]
    if environment is not None:
        place = (folder or Path()) / environment
        python, note = place / "bin" / "python", place / "failed.txt"
        if note.is_file():
            raise PeerFailed(note.read_text(encoding="utf-8").strip())
        if folder is None or not python.exists():
            where = "GEAR_LOADER_PEERS is empty" if folder is None else f"{folder}"
            raise PeerFailed(f"there is no environment {environment}: {where} (benchmarks/peers/make.sh)")
    command = [*prefix, str(python), "-I", _SCRIPT, task, library, variant, str(threads)]
    command += [] if own is None else [str(own)]
    return PeerProcess(command, patience=patience)
