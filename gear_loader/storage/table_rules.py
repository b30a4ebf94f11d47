"""The rules of a table: eviction, expiry and rate limit."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.schema import Schema
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, one_of

OnFull = Literal["error", "evict_oldest", "evict_lowest_priority", "wait"]
_LONGEST = 9e9  # seconds, whose nanoseconds fit into 64 bits
_POLICIES = ("error", "evict_oldest", "evict_lowest_priority", "wait")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rules that remove trajectories although the table has room: ``limits=gear.Limits(max_times_sampled=4)``.

    Attributes:
        max_times_sampled: number of draws after which a trajectory is removed; None for no limit.
        max_age: seconds after which a trajectory is removed; None for no limit.
        version: name of a column per trajectory, int32 or int64, that holds the version of the policy that made it; it
            is compared with `Table.policy_version`. None for none.
        max_lag: largest difference of these versions: trajectories of older policies are removed, by
            `Table.advance_version` or before the next draw, and counted (`TableStats.num_outdated`). If none are left,
            draws wait for others, at most `timeout`. None for no limit.

    Raises:
        SchemaError: an invalid value.
    """

    max_times_sampled: int | None = None
    max_age: float | None = None
    version: str | None = None
    max_lag: int | None = None

    def __post_init__(self) -> None:
        times = self.max_times_sampled
        if times is not None:
            object.__setattr__(self, "max_times_sampled", at_least("max_times_sampled", times))
            if times >= 2**31:
                raise SchemaError(f"max_times_sampled is {times:,}; expected None or less than 2**31.")
        if self.max_age is not None:
            object.__setattr__(self, "max_age", check_seconds("max_age", self.max_age))
        if self.version is not None and not isinstance(self.version, str):
            raise SchemaError(f"version is {shown(self.version)}; expected the name of a column, or None.")
        if self.max_lag is not None:
            if self.version is None:
                raise SchemaError(
                    f"max_lag is {shown(self.max_lag)} without version; give the column of the versions."
                )
            object.__setattr__(self, "max_lag", at_least("max_lag", self.max_lag, least=0))


@dataclasses.dataclass(frozen=True)
class Rules(Limits):
    """The rules of a table, stored in its region and valid for all processes: limits, eviction and rate limit.

    Attributes:
        on_full: default policy of additions to a full table.
        rate_limiter: rate limiter, or None.

    Raises:
        SchemaError: an invalid value.
    """

    on_full: OnFull = "error"
    rate_limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        check_on_full(self.on_full)
        if self.rate_limiter is not None and not isinstance(self.rate_limiter, RateLimiter):
            raise SchemaError(
                f"rate_limiter is {shown(self.rate_limiter)}; expected None or a limiter such as "
                "gear_loader.MinSize(1000)."
            )
        super().__post_init__()

    @property
    def limits(self) -> Limits:
        """The limits alone, as `Table.create` takes them."""
        return Limits(self.max_times_sampled, self.max_age, self.version, self.max_lag)

    def check_columns(self, schema: Schema) -> None:
        """Raise SchemaError unless a table with these columns can have the rules."""
        if self.version is None:
            return
        column = schema.per_trajectory.get(self.version)
        if column is None or column.shape or column.late or column.dtype_name not in ("int32", "int64"):
            raise SchemaError(
                f"version is {self.version!r}; expected the name of a column of int32 or int64 with per='trajectory', "
                f"shape () and without late: the table has {dict(schema.per_trajectory)}."
            )

    def to_json(self) -> dict[str, Any]:
        """The rules as plain JSON, stored with the table."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        versions = {} if self.version is None else {"version": self.version, "max_lag": self.max_lag}
        return {
            **versions,
            "on_full": self.on_full,
            "rate_limiter": limiter,
            "max_times_sampled": self.max_times_sampled,
            "max_age": self.max_age,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Rules:
        """The inverse of `to_json`."""
        fields = dict(fields)
        limiter = fields.pop("rate_limiter", None)
        return cls(rate_limiter=None if limiter is None else RateLimiter.from_json(limiter), **fields)


def check_on_full(on_full: Any) -> None:
    """Raise SchemaError unless `on_full` is a policy."""
    one_of("on_full", on_full, _POLICIES)


def check_seconds(name: str, value: Any) -> float:
    """Return `value` as a float; SchemaError unless it is a positive number of seconds below 9e9."""
    fits = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not fits or not 0 < value < _LONGEST:
        raise SchemaError(
            f"{name} is {shown(value)}; expected a positive number of seconds, less than {_LONGEST:.0e}."
        )
    return float(value)
