"""Rate limiters: back-pressure between actors, which add trajectories, and the learner, which draws rows.

The semantics are those of Reverb's rate limiters (Cassirer et al., 2021, https://arxiv.org/abs/2102.04736). A limiter
uses three counts of the table: `size`, live trajectories; `inserted` and `sampled`, trajectories added and rows drawn
since the table was created. With

    balance = inserted * samples_per_insert - sampled

a row may be drawn while ``size >= min_size`` and the balance after it is at least `min_diff`; a trajectory may be
added while the balance after it is at most `max_diff`, and always while ``size < min_size``. Several at once are
allowed if they would be allowed one after another.

Balances are fractions, without rounding: a float stands for the fraction with a denominator up to a million that rounds
to it (0.1 is 1/10, 1 / 3 is 1/3), otherwise for the decimal that it prints as.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from typing import Any, ClassVar, Literal

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least

_FIELDS = ("samples_per_insert", "min_size", "min_diff", "max_diff")


@dataclasses.dataclass(frozen=True)
class RateLimiter:
    """Bounds of the balance between adding and sampling. Base class of `MinSize`, `SampleToInsertRatio` and `Queue`.

    Attributes:
        samples_per_insert: rows drawn for each trajectory added.
        min_size: live trajectories required for sampling.
        min_diff, max_diff: bounds of the balance ``inserted * samples_per_insert - sampled``; may be infinite.

    Raises:
        SchemaError: an invalid value, or bounds so close that single rows and trajectories can deadlock.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float
    _gain: Fraction = dataclasses.field(init=False, repr=False, compare=False)  # samples_per_insert
    _apart: Fraction | None = dataclasses.field(init=False, repr=False, compare=False)
    """Distance of the bounds plus the smallest step of a balance; None if a bound is infinite."""

    _low: Fraction | float = dataclasses.field(init=False, repr=False, compare=False)  # min_diff
    _high: Fraction | float = dataclasses.field(init=False, repr=False, compare=False)  # max_diff

    _loosen: ClassVar[str] = "set min_diff and max_diff further apart"

    def __post_init__(self) -> None:
        ratio = _ratio("samples_per_insert", self.samples_per_insert)
        low = _bound("min_diff", self.min_diff, never=math.inf)
        high = _bound("max_diff", self.max_diff, never=-math.inf)
        gain, apart = _fraction(ratio), None
        if math.isfinite(low) and math.isfinite(high):
            # Balances are multiples of 1 / unit, so the bounds are rounded inwards to such.
            unit = gain.denominator
            apart = Fraction(math.floor(_fraction(high) * unit) - math.ceil(_fraction(low) * unit) + 1, unit)
        settled: dict[str, Any] = {
            "samples_per_insert": ratio,
            "min_size": at_least("min_size", self.min_size),
            "min_diff": low,
            "max_diff": high,
            "_gain": gain,
            "_apart": apart,
            "_low": _limit(low),
            "_high": _limit(high),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        safe = self._safe_batch(1)
        if safe is not None and safe < 1:
            raise SchemaError(
                f"min_diff is {low!r} and max_diff is {high!r}; between them there is no room for a row and a "
                "trajectory, so that both could wait forever. "
                f"Set them at least {_show(1 + gain)} (1 + samples_per_insert) apart."
            )

    # ---------------------------------------------------------------- admission

    def may_insert(self, count: int, *, size: int, inserted: int, sampled: int) -> bool:
        """Whether `count` (at least 1) more trajectories may be added at once."""
        return size + count <= self.min_size or self._balance(inserted + count, sampled) <= self._high

    def may_sample(self, count: int, *, size: int, inserted: int, sampled: int) -> bool:
        """Whether a batch of `count` (at least 1) rows may be drawn at once."""
        return size >= self.min_size and self._balance(inserted, sampled + count) >= self._low

    def _balance(self, inserted: int, sampled: int) -> Fraction:
        # int(): a counter may be a numpy integer, whose products overflow.
        return int(inserted) * self._gain - int(sampled)

    def explain(
        self, what: Literal["insert", "sample"], count: int, *, size: int, inserted: int, sampled: int
    ) -> str:
        """Error text after a time-out: reason that `count` trajectories or rows were not allowed, and remedy."""
        size, inserted, sampled = int(size), int(inserted), int(sampled)
        counts = {"size": size, "inserted": inserted, "sampled": sampled}
        balance = self._balance(inserted, sampled)
        if what == "insert":
            asked = _many(count, "trajectory", "trajectories") + " be added"
            if self.may_insert(count, **counts):
                reason = "it would let it now. Try again, with a longer timeout"
            else:
                excess = balance + count * self._gain - self._high
                rows = _many(math.ceil(excess), "more row", "more rows")
                reason = f"it waits for {rows} to be sampled"
                if size < self.min_size:
                    free = self.min_size - size
                    reason += (
                        f", but nothing is sampled below min_size {self.min_size}. "
                        f"Add at most {free} at once, which needs no waiting"
                    )
                else:
                    reason += (
                        ". Sample (in another thread or process, or before adding more: is the learner still there?), "
                        f"or {self._looser(count, 1)}"
                    )
        else:
            asked = _many(count, "row", "rows") + " be sampled"
            if self.may_sample(count, **counts):
                reason = "it would let it now. Try again, with a longer timeout"
            else:
                missing = max(self.min_size - size, 0)
                if math.isfinite(self.min_diff):
                    missing = max(missing, math.ceil((self._low + count - balance) / self._gain))
                more = _many(missing, "more trajectory", "more trajectories")
                reason = f"it waits for {more} to be added. Add them (are the actors still there?)"
                if size < self.min_size:
                    reason += ", or lower min_size" if self.min_size > 1 else ""
                else:
                    reason += f", draw smaller batches, or {self._looser(1, count)}"
        return (
            f"{self!r} did not let {asked}: {reason}. Counts: size {size} (min_size {self.min_size}), "
            f"inserted {inserted}, sampled {sampled}, inserted * {_show(self.samples_per_insert)} - sampled = "
            f"{_show(balance)}, allowed from {_show(self.min_diff)} to {_show(self.max_diff)}."
        )

    # ---------------------------------------------------------------- deadlocks

    def check_batch(self, count: int, *, added: int = 1) -> None:
        """Refuse a batch of `count` rows if sampler and inserter could deadlock.

        Both are blocked while ``max_diff - added * samples_per_insert < balance < min_diff + count``; a batch is safe
        if no balance lies in this interval.

        Args:
            count: rows per batch. added: trajectories added at once.

        Raises:
            SchemaError: the batch is not safe, or `count` or `added` is not an integer of at least 1.
        """
        count, added = at_least("The number of rows of a batch", count), at_least("added", added)
        safe = self._safe_batch(added)
        if safe is None or count <= safe:
            return
        if safe < 1:
            at_most = f"Adding {_trajectories(added)} at once, no batch is safe. Add fewer at once"
        else:
            at_most = f"Draw at most {_many(safe, 'row', 'rows')} at once"
        raise SchemaError(
            f"A batch of {_many(count, 'row', 'rows')} does not fit {self!r}: sampling and adding "
            f"{_trajectories(added)} at once could wait for each other forever. {at_most}, or "
            f"{self._enough(added, count)}."
        )

    def check_insert(self, count: int, *, batch: int = 1) -> None:
        """Refuse to add `count` trajectories at once if inserter and sampler could deadlock.

        Requires the condition of `check_batch`, and for ``count > 1`` that they can be added when one trajectory is
        missing to `min_size`. If later removals lower the size below `min_size` while the balance is near `max_diff`,
        add trajectories up to `min_size` only, which is always allowed; `explain` says so.

        Args:
            count: trajectories added at once. batch: rows per batch.

        Raises:
            SchemaError: not safe, or `count` or `batch` is not an integer of at least 1.
        """
        count, batch = at_least("The number of trajectories to add", count), at_least("batch", batch)
        safe = self._safe_insert(batch)
        if safe is None or count <= safe:
            return
        if safe < 1:
            at_most = (
                f"With batches of {_many(batch, 'row', 'rows')}, not even one is safe. Draw smaller batches"
            )
        else:
            at_most = f"Add at most {safe} at once"
        raise SchemaError(
            f"{_trajectories(count)} at once do not fit {self!r}: adding them and sampling "
            f"{_many(batch, 'row', 'rows')} at once could wait for each other forever. {at_most}, or "
            f"{self._enough(count, batch)}."
        )

    def _safe_batch(self, added: int) -> int | None:
        """The largest safe batch; None without a limit."""
        return None if self._apart is None else math.floor(self._apart - added * self._gain)

    def _safe_insert(self, batch: int) -> int | None:
        """Largest number of trajectories that may safely be added at once; None without a limit."""
        if math.isinf(self.max_diff):
            return None
        safe = max(math.floor(self._high / self._gain) - self.min_size + 1, 1)
        return safe if self._apart is None else min(safe, math.floor((self._apart - batch) / self._gain))

    def _bounds_for(self, count: int, batch: int) -> tuple[Fraction, Fraction]:
        """Smallest safe distance of the bounds, and smallest safe upper bound."""
        needed = (self.min_size - 1 + count) * self._gain if count > 1 else Fraction(0)
        return batch + count * self._gain, needed

    def _looser(self, count: int, batch: int) -> str:
        """Remedy for errors: the change of the limiter that shortens waits."""
        safe = self._safe_insert(batch)
        return self._loosen if safe is None or count <= safe else self._enough(count, batch)

    def _enough(self, count: int, batch: int) -> str:
        """Remedy for errors: the change of the limiter that makes these counts safe."""
        apart, high = self._bounds_for(count, batch)
        at_least = f" and max_diff at least {_show(high)}" if high > self.max_diff else ""
        return f"set min_diff and max_diff at least {_show(apart)} apart{at_least}"

    # ---------------------------------------------------------------- stored in a table's header

    def to_json(self) -> dict[str, Any]:
        """Class and fields as plain JSON; None for an infinite bound."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        for name in ("min_diff", "max_diff"):
            if math.isinf(fields[name]):
                fields[name] = None
        return {"kind": type(self).__name__, **fields}

    @classmethod
    def from_json(cls, fields: Any) -> RateLimiter:
        """Restore a limiter from `to_json`, with its class.

        Raises:
            SchemaError: fields that `to_json` cannot have written, or of a limiter that is not a `cls`.
        """
        if not isinstance(fields, Mapping) or set(fields) != {"kind", *_FIELDS}:
            raise SchemaError(
                f"A stored rate limiter is {fields!r}; expected a mapping of {['kind', *_FIELDS]}, from to_json()."
            )
        kinds = {kind.__name__: kind for kind in (RateLimiter, MinSize, SampleToInsertRatio, Queue)}
        kind = kinds.get(fields["kind"]) if isinstance(fields["kind"], str) else None
        if kind is None or not issubclass(kind, cls):
            known = sorted(name for name, kind in kinds.items() if issubclass(kind, cls))
            raise SchemaError(
                f"A stored rate limiter is of kind {fields['kind']!r}; expected one of {known}. "
                "Was it written by a newer version?"
            )
        plain = RateLimiter(
            fields["samples_per_insert"],
            fields["min_size"],
            -math.inf if fields["min_diff"] is None else fields["min_diff"],
            math.inf if fields["max_diff"] is None else fields["max_diff"],
        )
        made = kind._of(plain)
        if any(getattr(made, name) != getattr(plain, name) for name in _FIELDS):
            raise SchemaError(
                f"A stored rate limiter is {dict(fields)}; no {kind.__name__} has these values."
            )
        return made

    @classmethod
    def _of(cls, plain: RateLimiter) -> RateLimiter:
        """The limiter of this class with the fields of `plain`, as far as the class can have them."""
        return plain


class MinSize(RateLimiter):
    """Blocks sampling while the table has fewer than `min_size` trajectories; limits nothing else.

    Raises:
        SchemaError: `min_size` is not an integer of at least 1.
    """

    def __init__(self, min_size: int) -> None:
        super().__init__(1.0, min_size, -math.inf, math.inf)

    def __repr__(self) -> str:
        return f"MinSize(min_size={self.min_size})"

    @classmethod
    def _of(cls, plain: RateLimiter) -> RateLimiter:
        return cls(plain.min_size)


class SampleToInsertRatio(RateLimiter):
    """Keeps the number of rows sampled per trajectory added near `ratio`, once the table has `min_size` trajectories.

    Args:
        ratio: rows drawn for each trajectory added, above 0. With batches of 256 rows and ratio 4, the learner draws a
            batch for every 64 trajectories.
        min_size: below this size adding is never blocked and sampling always is, even after removals.
        error_buffer: how far either side may run ahead: the largest difference of ``inserted * ratio - sampled`` from
            ``min_size * ratio``, its value when sampling begins; or the two bounds ``(min_diff, max_diff)``. The bounds
            are at least ``2 * max(1, ratio)`` apart, so a single number is at least ``max(1, ratio)``; a batch of B
            rows needs about ``(B + ratio) / 2`` (`check_batch`).

    A thread that both adds and samples must not wait for itself. For example, with `max_diff` below ``min_size *
    ratio``, adding waits for a batch as soon as the size is `min_size`.

    Raises:
        SchemaError: an invalid value, bounds too close to each other, or a lower bound that blocks sampling at
            `min_size`.
    """

    _loosen = "give it a larger error_buffer"

    def __init__(self, ratio: float, min_size: int, error_buffer: float | tuple[float, float]) -> None:
        ratio = _ratio("ratio", ratio)
        min_size = at_least("min_size", min_size)
        start = min_size * _fraction(ratio)
        apart = 2 * max(Fraction(1), _fraction(ratio))
        if isinstance(error_buffer, (tuple, list)):
            if len(error_buffer) != 2:
                raise SchemaError(
                    f"error_buffer is {shown(error_buffer)}; expected a number or a pair (min_diff, max_diff)."
                )
            low = _bound("min_diff of error_buffer", error_buffer[0], never=math.inf)
            high = _bound("max_diff of error_buffer", error_buffer[1], never=-math.inf)
            if math.isfinite(low) and math.isfinite(high) and _fraction(high) - _fraction(low) < apart:
                raise SchemaError(
                    f"error_buffer is {shown(error_buffer)}; expected a min_diff and a max_diff at least "
                    f"{_show(apart)} "
                    "(2 * max(1, ratio)) apart, so that a row and a trajectory fit between them."
                )
        else:
            buffer = _number("error_buffer", error_buffer, "a number or a pair (min_diff, max_diff)")
            if buffer < 0 or (math.isfinite(buffer) and _fraction(buffer) < apart / 2):
                raise SchemaError(
                    f"error_buffer is {shown(error_buffer)}; expected a number of at least {_show(apart / 2)} "
                    "(max(1, ratio)), so that a row and a trajectory fit into it."
                )
            low, high = -math.inf, math.inf
            if math.isfinite(buffer):
                try:
                    low, high = float(start - _fraction(buffer)), float(start + _fraction(buffer))
                except OverflowError:
                    raise SchemaError(
                        f"error_buffer is {shown(error_buffer)}, which is too large with ratio {ratio!r} and min_size "
                        f"{min_size}; use math.inf for no bounds."
                    ) from None
        if low > start:
            raise SchemaError(
                f"error_buffer is {shown(error_buffer)}; with a min_diff above min_size * ratio = {_show(start)}, "
                "nothing "
                f"could be sampled when min_size = {min_size} trajectories are there. Lower min_diff or raise min_size."
            )
        super().__init__(ratio, min_size, low, high)

    def __repr__(self) -> str:
        start = self.min_size * _fraction(self.samples_per_insert)
        buffer: float | tuple[float, float] = (self.min_diff, self.max_diff)
        if math.isinf(self.min_diff) and math.isinf(self.max_diff):
            buffer = math.inf
        elif math.isfinite(self.min_diff) and math.isfinite(self.max_diff):
            above = _fraction(self.max_diff) - start
            if above == start - _fraction(self.min_diff):
                buffer = float(above)
        return f"SampleToInsertRatio(ratio={self.samples_per_insert}, min_size={self.min_size}, error_buffer={buffer})"

    def _enough(self, count: int, batch: int) -> str:
        apart, high = self._bounds_for(count, batch)
        start = self.min_size * self._gain
        return f"give it an error_buffer of at least {_show(max(apart / 2, high - start))}"

    @classmethod
    def _of(cls, plain: RateLimiter) -> RateLimiter:
        return cls(plain.samples_per_insert, plain.min_size, (plain.min_diff, plain.max_diff))


class Queue(RateLimiter):
    """A queue of at most `size` trajectories, each sampled once, in order.

    For a table that samples each trajectory at most once, with the sampler `Fifo`. Adding waits while the table has
    `size` trajectories, sampling while it has fewer than the rows of a batch; a batch has at most `size` rows.

    Raises:
        SchemaError: `size` is not an integer of at least 1.
    """

    _loosen = "give the queue a larger size"

    def __init__(self, size: int) -> None:
        super().__init__(1.0, 1, 0.0, at_least("size", size))

    def __repr__(self) -> str:
        return f"Queue(size={int(self.max_diff)})"

    def _enough(self, count: int, batch: int) -> str:
        return f"give the queue a size of at least {count + batch - 1}"

    @classmethod
    def _of(cls, plain: RateLimiter) -> RateLimiter:
        return cls(int(plain.max_diff) if math.isfinite(plain.max_diff) else 1)


# ---------------------------------------------------------------- numbers


def _number(name: str, value: Any, expected: str) -> float:
    """Return `value` as a float, which may be infinite; SchemaError if it is not a number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.nan
        if not math.isnan(number):
            return number
    raise SchemaError(f"{name} is {shown(value)}; expected {expected}.")


def _ratio(name: str, value: Any) -> float:
    expected = "a finite number above 0, the rows to sample for each trajectory added"
    ratio = _number(name, value, expected)
    if not 0 < ratio < math.inf:
        raise SchemaError(f"{name} is {shown(value)}; expected {expected}.")
    return ratio


def _bound(name: str, value: Any, *, never: float) -> float:
    expected = f"a number, or {-never} for no bound"
    bound = _number(name, value, expected)
    if bound == never:
        raise SchemaError(f"{name} is {shown(value)}; expected {expected}.")
    return bound


def _fraction(value: float) -> Fraction:
    """The fraction that a finite float stands for; it rounds to the same float."""
    simple = Fraction(value).limit_denominator()
    return simple if float(simple) == value else Fraction(repr(value))


def _limit(bound: float) -> float | Fraction:
    """A bound as a fraction, for comparison with balances; infinite bounds unchanged."""
    return bound if math.isinf(bound) else _fraction(bound)


def _show(value: float | Fraction) -> str:
    try:
        return f"{float(value):.15g}"
    except OverflowError:
        return "more than 1e308"


def _many(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _trajectories(count: int) -> str:
    return _many(count, "trajectory", "trajectories")
