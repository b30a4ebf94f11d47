"""Finds the rank that keeps a collective from ending."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gear_loader.distributed.liveness import BEAT, CLOSED, Liveness
from gear_loader.errors import RankError
from gear_loader.utils.background import must_end

_SILENT = 3 * BEAT  # seconds without a heartbeat after which a rank has stopped, or died
_GRACE = 5 * BEAT  # seconds of the search for a rank that has closed its connections
_SETTLE = 0.5  # seconds for which messages of a rank that has ended may still be on their way
_CHECK = 0.4  # seconds between two checks
_ADVICE = "Look at its log. Start the job again from its last checkpoint, or give a longer timeout if it was only slow."


class FailureSearch:
    """Searches for the rank that keeps one call of an exchange from ending.

    Ranks are numbered as in the default process group.

    Args:
        what: the action of the call in errors: "did not send its options".
        began: start of the call, by `time.monotonic`; by default now.
    """

    def __init__(self, exchange: Any, what: str, began: float | None = None) -> None:
        self._exchange = exchange
        self._what = what
        self._began = time.monotonic() if began is None else began
        self._checked = self._listened = 0.0
        self._own = exchange.ranks[exchange.rank]
        self._others = [rank for rank in exchange.ranks if rank != self._own]
        self._ended_at: float | None = None
        self._beats: dict[int, tuple[int, dict[str, Any]]] = {}  # last heartbeat of each rank
        self._heard: dict[int, float] = {}  # when it was new

    # ---------------------------------------------------------------- while it runs

    def check(self) -> None:
        """Check whether the call can still end. Cheap to call often.

        Raises:
            RankError: a rank has failed, or the deadline has passed.
        """
        if must_end():
            raise RankError(f"This process ends during a call in which another rank {self._what}.")
        now = time.monotonic()
        if now - self._checked < _CHECK and now < self._end:
            return
        self._checked = now
        liveness = self._exchange.liveness
        if liveness is None:
            if now >= self._end:
                raise self._late([])
            return
        self._raise_known_failure()
        with contextlib.suppress(Exception):
            liveness.learn()
        ended = liveness.ended(self._others)
        if not ended:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        if self._ended_at is not None and now - self._ended_at >= _SETTLE:
            raise self._over(ended)
        if now >= self._end or (now >= self._end - _SILENT - BEAT and not self._beats):
            self._listen(liveness)
        if now >= self._end:
            raise self._late(liveness.stopped(self._others))

    @property
    def _end(self) -> float:
        return self._began + float(self._exchange.timeout)

    def _raise_known_failure(self) -> None:
        """Raise the failure that another rank has found."""
        failure = self._exchange.failure()
        if failure is not None:
            ranks, why = failure["ranks"], failure["why"]
            if self._own in ranks:
                why = f"as the other ranks report, {why}"
            raise self._exchange.give_up(self._error(ranks, why))

    def _listen(self, liveness: Liveness) -> None:
        """Read the heartbeats of all ranks."""
        now = self._listened = time.monotonic()
        with contextlib.suppress(Exception):
            for rank, beat in liveness.beats(self._others).items():
                if rank not in self._beats or self._beats[rank][0] != beat[0]:
                    self._beats[rank], self._heard[rank] = beat, now

    def _silent(self) -> list[int]:
        """Return the ranks without a heartbeat for too long."""
        now = time.monotonic()
        least = min(_SILENT, max(0.5 * self._exchange.timeout, 2 * BEAT))
        return [rank for rank, when in self._heard.items() if now - when >= least]

    # ---------------------------------------------------------------- when it has failed

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Turn errors of the store into the error for the missing rank."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise self.after(error) from error

    def after(self, error: Exception) -> RankError:
        """Return the error for a call that has failed: a rank has closed its connections."""
        liveness = self._exchange.liveness
        grace = time.monotonic() + min(_GRACE, max(self._exchange.timeout, 2 * BEAT))
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        while liveness is not None:
            try:
                self._raise_known_failure()
            except RankError as found:
                return found
            with contextlib.suppress(Exception):
                liveness.learn()
            ended = liveness.ended(self._others)
            if ended:
                return self._over(ended)
            if time.monotonic() - self._listened >= BEAT:
                self._listen(liveness)
                closed = [rank for rank, (_, kind, _) in self._positions().items() if kind == CLOSED]
                if closed:
                    return self._failed(
                        closed, "it is alive, and has closed or deleted its dataset or its Shards before"
                    )
            if time.monotonic() > grace:
                break
            time.sleep(0.05)
        silent = self._silent()
        if silent:
            return self._failed(silent, f"no sign of life for {_SILENT:g} s ({reason})")
        if time.monotonic() - self._began >= 0.9 * self._exchange.timeout:
            return self._late([] if liveness is None else liveness.stopped(self._others))
        return self._failed([], f"has closed its connection{self._unknown()} ({reason})")

    def _over(self, ended: list[int]) -> RankError:
        return self._failed(
            ended, "its process has ended" if len(ended) == 1 else "their processes have ended"
        )

    def differs(self, mine: str, others: str) -> RankError:
        """Return the error for a rank that does something else than the first that arrived.

        Args:
            mine: what this rank does. others: the same of the first rank, with its name.
        """
        why = f"it {mine}, where {others}: let all ranks call the same methods in the same order"
        return self._failed([self._own], why)

    def _late(self, stopped: list[int]) -> RankError:
        """Return the error for a call at its deadline."""
        waited = f"was waited for {time.monotonic() - self._began:.3g} s (timeout={self._exchange.timeout:g})"
        if stopped:
            return self._failed(stopped, f"{waited}, and is stopped")
        silent = self._silent()
        if silent:
            return self._failed(silent, f"{waited}, and gives no sign of life")
        if self._exchange.position[0] == 0:
            return self._absent(waited)
        missing = self._behind()
        if missing:
            return self._failed(
                missing,
                f"{waited}; it is alive, and has not drawn as many batches (or not called the same methods"
                f"{self._doing(missing)}): let all ranks iterate alike (batches_per_epoch, the same breaks), and leave "
                "their loops at the same batch",
            )
        return self._failed([], f"{waited}{self._unknown()}")

    def _absent(self, waited: str) -> RankError:
        """Return the error for ranks that have not joined the exchange."""
        missing = []
        with contextlib.suppress(Exception):
            missing = [rank for rank in self._exchange.missing("joined") if rank in self._others]
        unseen = [rank for rank in missing if rank not in self._beats]
        if unseen:
            return self._failed(
                unseen,
                f"{waited}; it has not begun to make its Shards, or its process has ended before it did",
            )
        if missing:
            return self._failed(
                missing, f"{waited}; it is alive, and has not made these Shards or this dataset"
            )
        return self._failed([], f"{waited}{self._unknown()}")

    def _unknown(self) -> str:
        """Return the reason why the missing rank is not known."""
        if self._exchange.liveness is None or self._beats:
            return ""
        return "; torch.distributed's store, which rank 0 usually holds, does not answer either"

    def _behind(self) -> list[int]:
        """Return the ranks that are behind this one, or in another call: the smaller of two groups."""
        number, kind, _ = self._exchange.position
        positions = self._positions()
        behind = [rank for rank, (count, *_) in positions.items() if count < number]
        other = {"batch": "call", "call": "batch"}[kind]
        elsewhere = [rank for rank, position in positions.items() if [*position[:2]] == [number, other]]
        if behind or 2 * len(elsewhere) <= self._exchange.size:
            return behind or elsewhere
        alike = [rank for rank, position in positions.items() if [*position[:2]] == [number, kind]]
        return sorted([*alike, self._own])

    def _doing(self, ranks: list[int]) -> str:
        """Return what the first of these ranks does, and this one, for errors; "" if it is the same or unknown."""
        theirs = self._positions().get(ranks[0], ("",))[-1]
        mine = self._exchange.position[-1]
        return f"; it {theirs}, where rank {self._own} {mine}" if theirs not in ("", mine) else ""

    def _positions(self) -> dict[int, Sequence[Any]]:
        """Return the position of each rank in this exchange at its last heartbeat; see `Exchange.position`."""
        key = self._exchange.key
        return {rank: positions.get(key, [0, "", ""]) for rank, (_, positions) in self._beats.items()}

    def _failed(self, ranks: list[int], why: str) -> RankError:
        """Return the error for these ranks, and publish it for the other ranks."""
        if ranks:
            self._exchange.tell_failure(ranks, why)
        error: RankError = self._exchange.give_up(self._error(ranks, why))
        return error

    def _error(self, ranks: list[Any], why: str) -> RankError:
        names = self._exchange.names(ranks) if ranks else "An unknown rank"
        this = " (this one)" if ranks == [self._own] else ""
        return RankError(f"{names}{this} {self._what}: {why}. {_ADVICE}")
