"""What a server tells clients of a table: schema, longest trajectory, what they may do, statistics."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from gear_loader.errors import TransportError
from gear_loader.storage.schema import Schema
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table_rules import OnFull, check_on_full
from gear_loader.transport.access import Allow, check_allow

if TYPE_CHECKING:
    from gear_loader.storage.table import Table


@dataclasses.dataclass(frozen=True)
class TableReport:
    """A table as its server describes it.

    Attributes:
        schema: its columns. longest: steps of the longest trajectory that it holds. on_full: its policy.
        max_steps: most steps that it holds. has_disk: whether trajectories may lie on disk only.
        allow: what clients may do, as for `Server`. stats: its statistics. policy_version: as `Table.policy_version`.
    """

    schema: Schema
    longest: int
    max_steps: int
    has_disk: bool
    on_full: OnFull
    allow: Allow
    stats: TableStats
    policy_version: int

    @classmethod
    def parse(cls, data: bytes) -> TableReport:
        """Parse and check a report from an untrusted source.

        Raises:
            TransportError: invalid.
        """
        try:
            fields = json.loads(data)
            for name, least in (("longest", 1), ("max_steps", 1), ("policy_version", 0)):
                if type(fields[name]) is not int or fields[name] < least:
                    raise ValueError(f"{name} is {fields[name]!r}")
            if type(fields["has_disk"]) is not bool:
                raise ValueError(f"has_disk is {fields['has_disk']!r}")
            check_on_full(fields["on_full"])
            return cls(
                schema=Schema.from_json(fields["schema"]),
                longest=fields["longest"],
                max_steps=fields["max_steps"],
                has_disk=fields["has_disk"],
                on_full=fields["on_full"],
                allow=check_allow(fields["allow"]),
                stats=_stats(fields["stats"]),
                policy_version=fields["policy_version"],
            )
        except Exception as error:
            raise TransportError(
                f"A server described a table by {data[:100]!r} ({error}). Run the same version of Gear Loader on all "
                "machines."
            ) from None


def _stats(fields: Any) -> TableStats:
    names = [field.name for field in dataclasses.fields(TableStats) if field.name != "disk"]
    numbers = {name: fields[name] for name in names}
    wrong = [name for name, value in numbers.items() if type(value) not in (int, float) or not value >= 0]
    if wrong:
        raise ValueError(f"{wrong[0]} is {numbers[wrong[0]]!r}")
    return TableStats(**numbers)


def table_report(table: Table, allow: Allow) -> bytes:
    """The report of a table, serialized. May wait for the table's lock."""
    stats = dataclasses.replace(table.stats(), disk=None)  # of the process that writes it
    report = {
        "schema": table.schema.to_json(),
        "longest": table._engine.longest,
        "max_steps": table._engine.region.layout.max_steps,
        "has_disk": table._engine.has_tier,
        "on_full": table.on_full,
        "allow": allow,
        "policy_version": table.policy_version,
        "stats": dataclasses.asdict(stats),
    }
    return json.dumps(report).encode()
