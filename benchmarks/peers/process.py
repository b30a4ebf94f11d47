"""Another process that measures: commands go to its standard input, answers come back, one line of JSON each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["PeerFailed", "PeerProcess"]


class PeerFailed(Exception):
    """Another process could not do what it was told to; the message says why."""


class PeerProcess:
    """A process that answers commands, and ends with its input.

    Args:
        command: what to start: an interpreter, a script, its arguments.
        patience: seconds that an answer may take.
        folder: where it runs; here by default.

    Attributes:
        about: what it said about itself: versions, and a note or None.

    Raises:
        PeerFailed: it could not be started, or what it needs is not there.
    """

    def __init__(
        self, command: Sequence[str], *, patience: float = 300.0, folder: Path | None = None
    ) -> None:
        self._patience = patience
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                cwd=folder,
            )
        except OSError as error:
            self._errors.close()
            raise PeerFailed(f"{command[0]}: {error.strerror}") from error
        try:
            self.about = self.receive()
        except PeerFailed:
            self.close()
            raise

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer.

        Raises:
            PeerFailed: it could not do it, ended, or took too long.
        """
        self.send(what, **arguments)
        return self.receive()

    def send(self, what: str, **arguments: Any) -> None:
        """Send a command, whose answer `receive` brings.

        Raises:
            PeerFailed: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailed(f"it has ended: {self._last_error()}") from error

    def receive(self) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            PeerFailed: it could not do it, ended, or took too long.
        """
        assert self._process.stdout is not None
        late = threading.Timer(self._patience, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerFailed(f"it has ended, or took {self._patience:.0f} s: {self._last_error()}") from None
        if "error" in answer:
            raise PeerFailed(" ".join(str(answer["error"]).split())[:200])
        return dict(answer)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        return lines[-1] if lines else "no message"
