"""`connect`: the table of a server on another machine, or in another process, to write to."""

from __future__ import annotations

import contextlib
import copy
import os
import ssl
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from gear_loader.errors import FilledError, GearError, HandshakeError, SchemaError, TransportError
from gear_loader.storage.edit_values import checked_edits
from gear_loader.storage.incoming import (
    checked_priorities,
    checked_priority,
    listed,
    prefix_missing,
    prefix_numbers,
    rectangular,
    stacked_bytes,
    stacked_rows,
    with_final,
)
from gear_loader.storage.late_values import check_late, checked_fill
from gear_loader.storage.priority_updates import is_strict, request
from gear_loader.storage.ragged import check_fixed
from gear_loader.storage.ragged_input import Common
from gear_loader.storage.schema import Schema, as_mapping, keeps
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table_rules import check_seconds
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.storage.writer import Writer
from gear_loader.transport.access import refusal
from gear_loader.transport.change_messages import Metadata
from gear_loader.transport.client import Peer
from gear_loader.transport.delivery import Delivery, fill_parts, set_parts, until_done
from gear_loader.transport.handshake import check_secret, read_secret
from gear_loader.transport.remote_reads import RemoteReads
from gear_loader.transport.spool import Spool
from gear_loader.transport.spool_sink import SpoolSink
from gear_loader.transport.store_message import Rows, Stacked
from gear_loader.transport.table_report import TableReport
from gear_loader.transport.tls import client_context
from gear_loader.transport.urls import Place, split_url
from gear_loader.transport.wire import Kind
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least
from gear_loader.utils.provided import provided

if TYPE_CHECKING:
    import torch

_SPOOL_BYTES = 256 << 20
_UPDATES = 1 << 13  # priorities of one request


def connect(
    url: str,
    *,
    secret: bytes | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    spool_bytes: int = _SPOOL_BYTES,
    max_in_flight: int | None = None,
) -> RemoteTable:
    """Connect to a table that another process serves, by `Table.serve` or ``gear-loader serve``.

    Args:
        url: ``gear://<host>:<port>/<table>``, ``gears://...`` for a server with a certificate, whose connections are
            encrypted (TLS), or ``gear+ucx://...`` for UCX; or ``ray://<actor>`` for the table of a
            `gear_loader.integrations.ray.Replay` in this process's Ray cluster, which needs no secret: on the actor's
            node this returns a `Table`, which has the same methods to add and more. Of
            `gear_loader.integrations.ray.ReplayShards` it returns a `gear_loader.transport.RemoteShards`.
        secret: the server's secret. secret_file: a file that holds it and that only its owner can read. By default the
            environment variable ``GEAR_LOADER_SECRET``.
        ca_file: with ``gears://``, a PEM file with the certificate authorities to trust, or with the server's
            certificate; by default the system's authorities.
        timeout: seconds that a call waits for the server, restarts of the server and lost connections included.
        spool_bytes: largest number of bytes of steps that this process buffers; beyond it writers wait until the server
            has stored committed trajectories.
        max_in_flight: largest number of committed trajectories that the server has not confirmed; beyond it writers
            wait before the next trajectory. By default only `spool_bytes` limits.

    Raises:
        TransportError: an invalid address, or the server does not answer. HandshakeError: another secret or version, or
            a certificate that is not accepted.
        RegionError: the server does not serve this table.
    """
    if isinstance(url, str) and url.startswith("ray://"):
        if ca_file is not None:
            raise HandshakeError(f"ca_file was given with {url}, which is not encrypted. Leave it out.")
        options = {"timeout": timeout, "spool_bytes": spool_bytes, "max_in_flight": max_in_flight}
        return _through_ray(url, secret, secret_file, **options)
    place = split_url(url)
    known = _secret(secret, secret_file)
    timeout = check_seconds("timeout", timeout)
    at_least("spool_bytes", spool_bytes)
    most = None if max_in_flight is None else at_least("max_in_flight", max_in_flight)
    tls = _tls(place, ca_file)
    peer = Peer(place.address, secret=known, timeout=timeout, name=f"the server {place.address}", tls=tls)
    try:
        return RemoteTable(peer, place.table, url, timeout, int(spool_bytes), most)
    except BaseException:
        peer.close()
        raise


def _through_ray(
    url: str, secret: bytes | None, secret_file: str | os.PathLike[str] | None, **options: Any
) -> RemoteTable:
    if secret is not None or secret_file is not None:
        raise HandshakeError(f"A secret was given with {url}, for which the Ray actor has one. Leave it out.")
    return cast("RemoteTable", provided("connect_through_ray")(url, **options))


def _tls(place: Place, ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext | None:
    if place.tls:
        return client_context(ca_file)
    if ca_file is not None:
        raise HandshakeError(
            "ca_file was given with an address that is not encrypted; expected gears://<host>:<port>/<table>."
        )
    return None


def _secret(secret: bytes | None, secret_file: str | os.PathLike[str] | None) -> bytes:
    if secret is not None and secret_file is not None:
        raise HandshakeError("secret and secret_file were both given; expected one of them.")
    if secret_file is not None:
        return read_secret(secret_file)
    if secret is not None and not isinstance(secret, bytes):
        check_secret(secret)  # raises
    found = os.environb.get(b"GEAR_LOADER_SECRET", b"").strip() if secret is None else secret
    if not found:
        raise HandshakeError(
            "No secret was given; expected secret=, secret_file=, or the environment variable GEAR_LOADER_SECRET with "
            "the server's secret."
        )
    return found


class RemoteTable(RemoteReads):
    """A table of a server, to which trajectories are added as to a `Table`; made by `connect`.

    `add` and `extend` return when the trajectories can be drawn. Writers do not wait for the network: a thread sends
    what they have committed. Each trajectory is stored exactly once, even if connections are lost, or the server is
    killed and started again: what the server has not confirmed is sent again, and recognised by its id. The one
    exception: if a trajectory is evicted before its confirmation arrives, and the server is killed too, it is stored
    again.

    Use it in one process; several threads may call its methods.

    Attributes:
        name: of the table. url: of the table. schema: its columns. longest: steps of the longest trajectory it holds.
    """

    def __init__(
        self, peer: Peer, name: str, url: str, timeout: float, spool_bytes: int, max_in_flight: int | None
    ) -> None:
        super().__init__(peer, name, timeout)
        self._peer = peer
        self.url = url
        self._timeout = timeout
        report = self.report()
        self.schema: Schema = report.schema
        self._added = added = report.schema.added
        self.longest = report.longest
        self._waits = report.on_full != "error"
        self._refusal = refusal(report.allow, Kind.STORE)
        self._delivery = Delivery(peer, name, added, timeout)
        self._filler = Delivery(peer, name, report.schema, timeout)
        where = f"table {name!r} of {peer.name}"
        self._spool = Spool(added, report.longest, self._delivery, where, spool_bytes, max_in_flight)
        self._end = weakref.finalize(self, _end, self._spool, peer, timeout, os.getpid())
        self._spool.start()

    # ---------------------------------------------------------------- adding

    def _check(self) -> None:
        """Raise what makes it impossible to change the table."""
        if self._refusal is not None:
            raise TransportError(self._refusal)
        self._spool.check()

    def add(
        self,
        trajectory: Mapping[str, Any],
        *,
        priority: float | None = None,
        final: Mapping[str, Any] | None = None,
        prefix: int | None = None,
        prefix_steps: int | None = None,
        prefix_generation: int | None = None,
    ) -> int:
        """Store one trajectory, and wait until it can be drawn. Arguments as for `Table.add`.

        Returns:
            Index of the trajectory in the server's table, or -1 if it was evicted before the answer came.

        Raises:
            As `Table.add`. PeerTimeoutError: no answer before the deadline; it may be stored or not.
            TransportError: the server's clients may only read, `Table.serve` with ``allow="read"``.
        """
        self._check()
        begins = _prefixes((prefix, prefix_steps, prefix_generation), 1)
        first = checked_priority(priority)
        rows = (
            as_mapping(trajectory, self._added.objects)
            if final is None
            else with_final(self._added, trajectory, final)
        )
        (checked,) = Rows.listed(self._added, [rows], self._common(begins))
        if begins:
            finals = np.array([final is not None], dtype=np.int64)
            given = [checked], np.array([first], dtype=np.float32), finals
            return int(self._delivery.store(*given, waits=self._waits, prefixes=begins)[0])
        return self._delivery.store_one(checked, first, int(final is not None), waits=self._waits)

    def extend(
        self,
        trajectories: Iterable[Mapping[str, Any]] | Mapping[str, Any],
        *,
        lengths: Sequence[int] | Array | None = None,
        priority: float | Sequence[float] | Array | None = None,
        prefix: int | Sequence[int] | Array | None = None,
        prefix_steps: int | Sequence[int] | Array | None = None,
        prefix_generation: int | Sequence[int] | Array | None = None,
    ) -> Array:
        """Store many trajectories. Arguments as for `Table.extend`.

        They are sent in requests of a limited size; each request is stored as a whole or not at all. Give
        `prefix_generation` where the table evicts: what a prefix names may leave between two requests.

        Returns:
            Indices of the trajectories in the server's table, int64 [n]; -1 for one that was evicted meanwhile.

        Raises:
            As `add`; what earlier requests stored stays stored.
        """
        self._check()
        given = prefix, prefix_steps, prefix_generation
        rows = self._all_checked(trajectories, lengths, given)
        counts = (
            rows.lengths if isinstance(rows, Stacked) else np.array([each.length for each in rows], np.int64)
        )
        priorities, begins = checked_priorities(priority, len(counts)), _prefixes(given, len(counts))
        sizes = counts * self._added.step_bytes + self._added.trajectory_bytes
        if not isinstance(rows, Stacked):
            sizes += np.array([each.value_bytes for each in rows], dtype=np.int64)
        stored, low = [np.empty(0, dtype=np.int64)], 0
        while low < len(counts):
            high = low + self._delivery.counts(sizes[low:])
            part = rows.part(low, high) if isinstance(rows, Stacked) else rows[low:high]
            some = [each[low:high] for each in begins]
            chosen = part, priorities[low:high]
            stored.append(self._delivery.store(*chosen, waits=self._waits, prefixes=some))
            low = high
        return np.concatenate(stored)

    def _common(self, begins: Sequence[Array]) -> Common | None:
        """The empty records of values that trajectories have in common with those that they begin with."""
        empty = dict.fromkeys(self._added.per_group, np.zeros(2, dtype=np.int64))
        if not begins or not empty:
            return None
        return lambda _: [empty if slot >= 0 else {} for slot in begins[0].tolist()]

    def _all_checked(self, trajectories: Any, lengths: Any, prefix: Any) -> list[Rows] | Stacked:
        """Trajectories as bytes: views of stacked ones and of those in a list, copies of those of an iterator."""

        def checked(found: list[Any]) -> list[Rows]:
            return Rows.listed(self._added, found, self._common(_prefixes(prefix, len(found))))

        lengths = rectangular(trajectories) if lengths is None else lengths
        if lengths is not None and self._added.ragged:
            return checked(stacked_rows(self._added, trajectories, lengths))
        if lengths is not None:
            return Stacked(*stacked_bytes(self._added, trajectories, lengths))
        if isinstance(as_mapping(trajectories), Mapping):
            listed(self._added, trajectories)  # raises: one mapping without lengths
        try:
            items = iter(trajectories)
        except TypeError:
            listed(self._added, trajectories)  # raises
            raise
        kept, found = keeps(trajectories), []
        for each in items:
            rows = as_mapping(each, self._added.objects)
            found.append(copy.deepcopy(dict(rows)) if not kept and isinstance(rows, Mapping) else rows)
        return checked(found)

    def update_priority(
        self,
        index: Sequence[int] | Array | torch.Tensor,
        priority: Sequence[float] | Array | torch.Tensor,
        *,
        generation: Sequence[int] | Array | torch.Tensor | None = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> int:
        """Set the priorities of trajectories in the server's table; see `Table.update_priority`.

        Args:
            index, priority, generation, stale: as for `Table.update_priority`. They are sent in requests of at most
                8,192 rows, each of which is applied as a whole or not at all.

        Returns:
            Number of rows that were skipped.

        Raises:
            As `Table.update_priority`; with ``stale="error"`` the rows of earlier requests stay. PeerTimeoutError: no
            answer before the deadline; they may be set or not.
        """
        self._check()
        updates = request(index, priority, generation=generation, anchor=None, unit="trajectory")
        strict = is_strict(stale)
        parts = [updates.part(low, low + _UPDATES) for low in range(0, len(updates.slots), _UPDATES)]
        return sum(self._delivery.update(part, strict=strict) for part in parts)

    def fill(
        self,
        index: Any,
        /,
        *,
        generation: Sequence[int] | Array | torch.Tensor | int | None = None,
        stale: Literal["ignore", "error"] = "ignore",
        **columns: Any,
    ) -> int:
        """Write write-once columns of trajectories in the server's table; see `Table.fill`.

        Args:
            index, generation, stale, columns: as for `Table.fill`. They are sent in requests of a limited size, each of
                which is executed as a whole or not at all, and once, though its answer is lost.

        Returns:
            Number of rows that were skipped.

        Raises:
            As `Table.fill`; what earlier requests filled stays filled. PeerTimeoutError: no answer before the deadline;
            the columns may be filled or not. TransportError: the server's clients may only read.
        """
        self._check()
        slots, generations, values = checked_fill(self.schema, index, generation, columns)
        strict, count = is_strict(stale), len(slots)
        steps = [each for each in values if not each.column.trajectory]
        for each in steps[1:]:
            if not np.array_equal(each.lengths, steps[0].lengths):
                row = int(np.flatnonzero(each.lengths != steps[0].lengths)[0])
                raise SchemaError(
                    f"Column {each.name!r} has {each.lengths[row]:,} steps for row {row}, and {steps[0].name!r} "
                    f"{steps[0].lengths[row]:,}; expected the same. Nothing was changed."
                )
        if len(np.unique(slots)) != count:
            raise FilledError(
                "An index was given twice; a write-once column is filled once. Nothing was changed."
            )
        return fill_parts(self._filler, slots, generations, values, strict=strict)

    def set(
        self,
        index: Any,
        anchor: Any,
        /,
        *,
        generation: Sequence[int] | Array | torch.Tensor | int | None = None,
        mask: Any = None,
        stale: Literal["ignore", "error"] = "ignore",
        **columns: Any,
    ) -> int:
        """Overwrite values of columns with ``Column(mutable=True)`` in the server's table; see `Table.set`.

        Args:
            index, anchor, generation, mask, stale, columns: as for `Table.set`. They are sent in requests of a limited
                size, each of which is executed once, though its answer is lost. If the server is killed before it
                answers, the rows are written again when it is back, also over what others have written since.

        Returns:
            Number of rows that were skipped.

        Raises:
            As `Table.set`; what earlier requests wrote stays. PeerTimeoutError: no answer before the deadline; rows may
            be written or not. TransportError: the server's clients may only read.
        """
        self._check()
        edits = checked_edits(self.schema, index, anchor, generation, mask, columns)
        return set_parts(self._filler, edits, strict=is_strict(stale))

    def unfilled(self, *columns: str) -> tuple[Array, Array]:
        """The trajectories in the server's table in which a write-once column is not filled; see `Table.unfilled`."""
        check_late(self.schema, list(columns) or list(self.schema.late))
        return self._filler.unfilled(columns)

    def _check_writer(self, overlap_steps: int, commit_every_step: bool) -> None:
        _check_whole(commit_every_step)
        if overlap_steps:
            check_fixed(self._added, "writers with overlap_steps take")
        self._check()

    def writer(
        self,
        *,
        wait: bool = False,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
        commit_every_step: bool = False,
    ) -> Writer:
        """Create a writer that adds trajectories step by step.

        Args:
            wait: whether `commit` returns only when the trajectory can be drawn.
            chunk_steps, overlap_steps: as for `Table.writer`.
            commit_every_step: False; the steps of a trajectory on its way cannot be drawn.

        Raises:
            SchemaError: invalid arguments, `commit_every_step`, or `overlap_steps` with ragged columns. TransportError:
                the server's clients may only read.
        """
        self._check_writer(overlap_steps, commit_every_step)
        sink = SpoolSink(self._spool, self, 1, wait=wait, timeout=self._timeout)
        return Writer(sink, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    def writers(
        self,
        n: int,
        *,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
        commit_every_step: bool = False,
    ) -> VectorWriter:
        """Create a writer for the n environments of a vector environment.

        It does not wait for the server and returns no indices; `flush` waits until all is stored.

        Args:
            n: number of environments, at most as many as memory for their first steps is available.
            chunk_steps, overlap_steps: as for `Table.writer`.
            commit_every_step: as for `writer`.

        Raises:
            As `writer`.
        """
        self._check_writer(overlap_steps, commit_every_step)
        sink = SpoolSink(self._spool, self, n)
        return VectorWriter(sink, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the server has stored all that writers have committed.

        Args:
            timeout: seconds; by default those of `connect`.

        Raises:
            PeerTimeoutError: not before the deadline. GearError: the server refused a trajectory.
        """
        self._spool.flush(self._timeout if timeout is None else check_seconds("timeout", timeout))

    @property
    def num_waiting(self) -> int:
        """Trajectories that writers have committed and the server has not confirmed yet."""
        return self._spool.num_waiting

    # ---------------------------------------------------------------- looking

    def report(self) -> TableReport:
        """Describe the server's table, now: see `TableReport`."""

        def attempt(_: bool, seconds: float) -> bytes:
            return self._peer.ask(Metadata("table", self.name), seconds=seconds, here=True).result()

        return TableReport.parse(until_done(attempt, "nothing was changed", timeout=self._timeout))

    def stats(self) -> TableStats:
        """Statistics of the server's table, now."""
        return self.report().stats

    def __len__(self) -> int:
        """Number of live trajectories in the server's table, now."""
        return self.stats().num_trajectories

    @property
    def num_steps(self) -> int:
        """Number of their steps."""
        return self.stats().num_steps

    @property
    def policy_version(self) -> int:
        """Version of the policy in the server's table, now; see `Table.advance_version`."""
        return self.report().policy_version

    def advance_version(self) -> int:
        """Raise the version of the policy in the server's table by one; see `Table.advance_version`.

        It is raised once, though the answer is lost and the request sent again. Only if the server is killed before it
        answers, just when another client raises the version too, the two may count as one.

        Returns:
            The version that this call has made.

        Raises:
            SchemaError: the table was created without `version`.
            PeerTimeoutError: no answer before the deadline; the version may be raised or not.
            TransportError: the server's clients may only read.
        """
        self._check()
        return self._delivery.advance()

    # ---------------------------------------------------------------- closing

    def close(self) -> None:
        """Wait until all that was committed is stored, and disconnect; idempotent.

        Raises:
            As `flush`; it is disconnected all the same, and what was not stored is lost, as the message says. Any other
            exception (Ctrl-C): what is committed is still being stored; call it again.
        """
        if not self._end.alive:
            return
        try:
            if not self._spool.is_stopped:  # by a call that was interrupted
                self.flush()
        except GearError as error:
            lost = self.num_waiting
            self._disconnect()
            if lost:
                raise type(error)(f"{lost:,} committed trajectories were not stored: {error}") from None
            raise
        self._disconnect()

    def _disconnect(self) -> None:
        self._end_reading()
        _stop(self._spool, self._peer)
        self._end.detach()

    def __enter__(self) -> RemoteTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(GearError) if kind is not None else contextlib.nullcontext():
            self.close()

    def __repr__(self) -> str:
        state = f"{self.num_waiting} waiting" if self._end.alive else "closed"
        return f"RemoteTable({self.url!r}, {len(self.schema)} columns, {state})"


def _check_whole(commit_every_step: object) -> None:
    if commit_every_step is not False:
        raise SchemaError(
            f"commit_every_step is {shown(commit_every_step)}; expected False: a server stores whole trajectories. "
            "Pass chunk_steps=1 to make each step a trajectory that can be drawn at once, or a few steps more "
            "(overlap_steps= repeats those before, for windows); or attach to the table on its machine, "
            "gear_loader.Table.attach(name), whose writers take commit_every_step=True."
        )


def _end(spool: Spool, peer: Peer, timeout: float, pid: int) -> None:
    """Store what is left when the table is garbage or the process ends."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(GearError):
        spool.flush(timeout)
    if spool.num_waiting:
        spool.report_loss()
    _stop(spool, peer)


def _stop(spool: Spool, peer: Peer) -> None:
    spool.stop()
    peer.close()  # ends the request of the thread
    spool.join()


def _prefixes(given: Sequence[Any], count: int) -> list[Array]:
    """What `count` trajectories begin with, as STORE has it, int64 [count] each; empty if nothing was given."""
    prefix, steps, generation = given
    if prefix is None:
        if steps is not None or generation is not None:
            raise prefix_missing(steps, generation)
        return []
    names = "prefix", "prefix_steps", "prefix_generation"
    return [
        np.full(count, -1, dtype=np.int64) if value is None else prefix_numbers(name, value, count)
        for name, value in zip(names, given, strict=True)
    ]
