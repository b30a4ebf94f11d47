"""The learners of a server by their identities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gear_loader.errors import TransportError
from gear_loader.transport.wire import Limits

if TYPE_CHECKING:
    from gear_loader.transport.learner import Learner


class Learners:
    """The learners of a server by their identities; one whose connection is lost is kept for a while. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._guard = threading.Condition()
        self._making: set[bytes] = set()
        self._known: dict[bytes, Learner] = {}
        self._epochs: Any = None

    def take(self, identity: bytes, owner: object, make: Callable[[], Learner]) -> tuple[Learner, bool]:
        """The learner, which belongs to `owner` from now on, and whether it was known.

        Raises:
            TransportError: there are too many.
        """
        self.sweep()
        with self._guard:
            self._guard.wait_for(lambda: identity not in self._making)
            found = self._known.get(identity)
            if found is not None:
                found.owner = owner
                return found, True
            if len(self._known) + len(self._making) >= self._limits.learners:
                raise TransportError(
                    f"The server draws for {len(self._known):,} learners, the most it accepts at a time."
                )
            self._making.add(identity)
        made: Learner | None = None
        try:
            made = make()
            made.owner = owner
            return made, False
        finally:
            with self._guard:
                self._making.discard(identity)
                if made is not None:
                    self._known[identity] = made
                self._guard.notify_all()

    def epochs(self, make: Callable[[], Any]) -> Any:
        """The epochs that learners divide; made by the first."""
        with self._guard:
            self._epochs = self._epochs or make()
            return self._epochs

    def left(self, learner: Learner, owner: object) -> None:
        """The connection of a learner is lost."""
        with self._guard:
            if learner.owner is owner:
                learner.owner, learner.left_at = None, time.monotonic()

    def sweep(self, *, keep: bool = True) -> None:
        """Forget the learners that have been away for long; without `keep` all."""
        now = time.monotonic()
        with self._guard:
            gone = [
                identity
                for identity, each in self._known.items()
                if not keep or (each.owner is None and now - each.left_at > self._limits.learner_seconds)
            ]
            learners = [self._known.pop(identity) for identity in gone]
        for each in learners:
            each.close()

    def end(self, learner: Learner) -> None:
        """A learner has said goodbye; it does not come again."""
        with self._guard:
            self._known = {identity: each for identity, each in self._known.items() if each is not learner}
        learner.close()
