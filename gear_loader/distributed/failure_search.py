"""Finds the rank that keeps a collective from ending."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gear_loader.distributed.liveness import BEAT, Beat, Liveness
from gear_loader.errors import RankError

if TYPE_CHECKING:
    from gear_loader.distributed.exchange import Exchange

__all__ = ["Search"]

_SILENT = 3 * BEAT  # seconds without a heartbeat after which a rank has stopped, or died
_GRACE = 5 * BEAT  # seconds in which the rank is looked for that has closed its connections
_SETTLE = 0.5  # seconds for which what a rank that has ended had sent may still be on its way
_LOOK = 0.4  # seconds between two looks
_ADVICE = "Look at its log. Start the job again from its last checkpoint, or give a longer timeout if it was only slow."


class Search:
    """One call of an exchange, and who is missing in it.

    Ranks are numbered as in the default process group.

    Args:
        exchange: whose call it is.
        what: the missing rank did not do, for errors.
        began: when the call began, by `time.monotonic`.
    """

    def __init__(self, exchange: Exchange, what: str, began: float) -> None:
        self._exchange = exchange
        self._what = what
        self._began = began
        self._looked = self._listened = 0.0
        self._mine = exchange.ranks[exchange.rank]
        self._others = [rank for rank in exchange.ranks if rank != self._mine]
        self._ended_at: float | None = None
        self._beats: dict[
            int, tuple[Beat, float]
        ] = {}  # the last heartbeat of each rank, and when it was new here

    # ---------------------------------------------------------------- while it runs

    def look(self) -> None:
        """Look whether the call can still end. Cheap to call often.

        Raises:
            RankError: it cannot, or the deadline has come.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK and now < self._end:
            return
        self._looked = now
        liveness = self._exchange.liveness
        if liveness is None:
            if now >= self._end:
                raise self._late([])
            return
        self._heed_failure()
        with contextlib.suppress(Exception):
            liveness.learn()
        ended = liveness.ended(self._others)
        if not ended:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        if self._ended_at is not None and now - self._ended_at >= _SETTLE:
            raise self._failed(
                ended, "its process has ended" if len(ended) == 1 else "their processes have ended"
            )
        if now >= self._end or (now >= self._end - _SILENT - BEAT and not self._beats):
            self._listen(liveness)
        if now >= self._end:
            raise self._late(liveness.stopped(self._others))

    @property
    def _end(self) -> float:
        return self._began + self._exchange.timeout

    def _heed_failure(self) -> None:
        """Raise what another rank has found out."""
        told = self._exchange.failure()
        if told is not None:
            raise self._exchange.give_up(self._error(told["ranks"], told["why"]))

    def _listen(self, liveness: Liveness) -> None:
        now = self._listened = time.monotonic()
        with contextlib.suppress(Exception):
            for rank, beat in liveness.beats(self._others).items():
                known = self._beats.get(rank)
                if known is None or known[0].count != beat.count:
                    self._beats[rank] = (beat, now)

    def _silent(self) -> list[int]:
        """Ranks that have had no heartbeat for too long."""
        now = time.monotonic()
        least = min(_SILENT, max(0.5 * self._exchange.timeout, 2 * BEAT))
        return [rank for rank, (_, when) in self._beats.items() if now - when >= least]

    # ---------------------------------------------------------------- when it has failed

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Errors of the store inside are the error for the rank that is missing."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise self.after(error) from error

    def after(self, error: Exception) -> RankError:
        """The error for a call that has failed: some rank has closed its connections."""
        liveness = self._exchange.liveness
        grace = time.monotonic() + min(_GRACE, max(self._exchange.timeout, 2 * BEAT))
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        while liveness is not None:
            try:
                self._heed_failure()
            except RankError as found:
                return found
            with contextlib.suppress(Exception):
                liveness.learn()
            ended = liveness.ended(self._others)
            if ended:
                return self._failed(
                    ended, "its process has ended" if len(ended) == 1 else "their processes have ended"
                )
            if time.monotonic() - self._listened >= BEAT:
                self._listen(liveness)
            if time.monotonic() > grace:
                break
            time.sleep(0.05)
        silent = self._silent()
        if silent:
            return self._failed(silent, f"no sign of life for {_SILENT:g} s ({said})")
        if time.monotonic() - self._began >= 0.9 * self._exchange.timeout:
            return self._late([])
        return self._failed([], f"has closed its connection{self._unknown()} ({said})")

    def _late(self, stopped: list[int]) -> RankError:
        """The error for a call that was waited for until the deadline."""
        waited = f"was waited for {time.monotonic() - self._began:.3g} s (timeout={self._exchange.timeout:g})"
        if stopped:
            return self._failed(stopped, f"{waited}, and is stopped")
        silent = self._silent()
        if silent:
            return self._failed(silent, f"{waited}, and gives no sign of life")
        missing = self._behind()
        if missing:
            return self._failed(
                missing,
                f"{waited}; it is alive, and has not asked for as many batches (or not called the same methods): let "
                "all ranks iterate alike (batches_per_epoch, the same breaks), and no rank alone leave its loop",
            )
        return self._failed([], f"{waited}{self._unknown()}")

    def _unknown(self) -> str:
        """Why it is not known which rank is missing."""
        if self._exchange.liveness is None or self._beats:
            return ""
        return "; torch.distributed's store, which rank 0 usually holds, does not answer either"

    def _behind(self) -> list[int]:
        """Ranks that have not come as far as this one, or to another call: of two groups the smaller."""
        key, (number, kind) = self._exchange.key, self._exchange.position
        if number == 0:
            with contextlib.suppress(Exception):
                return [rank for rank in self._exchange.missing("joined") if rank in self._others]
            return []
        positions = {rank: beat.positions.get(key, [0, ""]) for rank, (beat, _) in self._beats.items()}
        behind = [rank for rank, (count, _) in positions.items() if count < number]
        elsewhere = [rank for rank, position in positions.items() if position == [number, _other(kind)]]
        if behind or 2 * len(elsewhere) <= self._exchange.size:
            return behind or elsewhere
        alike = [rank for rank, position in positions.items() if position == [number, kind]]
        return sorted([*alike, self._mine])

    def _failed(self, ranks: list[int], why: str) -> RankError:
        """The error for these ranks, which the other ranks get too."""
        if ranks:
            with contextlib.suppress(Exception):
                self._exchange.put("failed", json.dumps({"ranks": ranks, "why": why}))
        return self._exchange.give_up(self._error(ranks, why))

    def _error(self, ranks: list[Any], why: str) -> RankError:
        if self._mine in ranks:
            why = f"as the others say, {why}"
        who = self._exchange.names(ranks) if ranks else "A rank, which could not be found out,"
        this = " (this one)" if ranks == [self._mine] else ""
        return RankError(f"{who}{this} {self._what}: {why}. {_ADVICE}")


def _other(kind: str) -> str:
    return {"batch": "call", "call": "batch"}[kind]
