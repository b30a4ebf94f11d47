"""Statistics of tables in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gear_loader.errors import SchemaError
from gear_loader.storage.stats import TableStats
from gear_loader.utils.arrays import shown

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SERIES: tuple[tuple[str, str, str, str], ...] = (  # name without prefix, type, field of `TableStats`, help
    ("trajectories", "gauge", "num_trajectories", "Live trajectories."),
    ("steps", "gauge", "num_steps", "Steps of live trajectories."),
    ("payload_bytes", "gauge", "payload_bytes", "Bytes of the live steps."),
    (
        "resident_bytes",
        "gauge",
        "resident_bytes",
        "Bytes of the blocks in use, with padding and index entries.",
    ),
    ("reserved_bytes", "gauge", "reserved_bytes", "Bytes of the region."),
    ("value_bytes", "gauge", "value_bytes", "Bytes of the ragged values of live trajectories in memory."),
    (
        "value_resident_bytes",
        "gauge",
        "value_resident_bytes",
        "Bytes of the memory of ragged values in use, with headers and padding.",
    ),
    ("value_reserved_bytes", "gauge", "value_reserved_bytes", "Bytes of the memory of ragged values."),
    ("blocks_in_use", "gauge", "blocks_in_use", "Blocks in use."),
    ("blocks", "gauge", "num_blocks", "Blocks of the region."),
    ("writing_trajectories", "gauge", "num_writing", "Trajectories being written."),
    ("inserted_trajectories_total", "counter", "num_inserted", "Trajectories added."),
    ("sampled_rows_total", "counter", "num_sampled", "Rows drawn."),
    ("evicted_trajectories_total", "counter", "num_evicted", "Trajectories evicted from the full table."),
    (
        "expired_trajectories_total",
        "counter",
        "num_expired",
        "Trajectories removed for age or number of draws.",
    ),
    (
        "outdated_trajectories_total",
        "counter",
        "num_outdated",
        "Trajectories removed for their policy's version.",
    ),
    ("insert_wait_seconds_total", "counter", "insert_wait", "Seconds that additions have waited."),
    (
        "sample_wait_seconds_total",
        "counter",
        "sample_wait",
        "Seconds that draws have waited for the rate limiter.",
    ),
    ("device_bytes", "gauge", "device_bytes", "Bytes of blocks in use in a GPU's memory."),
    ("host_part_bytes", "gauge", "host_part_bytes", "Bytes of blocks in use in host memory below it."),
    ("spilled_trajectories", "gauge", "num_spilled", "Live trajectories that lie on disk only."),
    ("spilled_bytes", "gauge", "spilled_bytes", "Bytes of their steps."),
    ("lost_trajectories_total", "counter", "num_lost", "Trajectories that could not be read from disk."),
    ("disk_hits_total", "counter", "num_hits", "Rows of batches that were in memory, with a disk tier."),
    ("disk_misses_total", "counter", "num_misses", "Rows of batches that were read from disk."),
    ("disk_read_bytes_total", "counter", "miss_bytes", "Bytes read from disk for batches."),
    ("disk_read_seconds_total", "counter", "miss_seconds", "Seconds of these reads."),
    ("disk_promoted_bytes_total", "counter", "promoted_bytes", "Bytes brought back into memory."),
    ("disk_wait_ratio", "gauge", "disk_wait", "Share of the time during which batches were read from disk."),
)


def prometheus_text(stats: Mapping[str, TableStats | None]) -> str:
    """Statistics of tables as a page that Prometheus reads.

    ``gear-loader serve --metrics PORT`` serves one. With a web server of your own::

        page = gear.prometheus_text({"replay": table.stats()})

    Args:
        stats: name of each table, the label ``table`` -> `Table.stats`; None for one that cannot be read, of which
            ``gear_loader_up`` is 0.

    Returns:
        The text: a series ``gear_loader_...`` for each number. Its type is ``text/plain; version=0.0.4``.

    Raises:
        SchemaError: a value that is no `TableStats`.
    """
    wrong = [value for value in stats.values() if value is not None and not isinstance(value, TableStats)]
    if wrong:
        raise SchemaError(f"{shown(wrong[0])} was received; expected Table.stats() of each name.")
    labels = {name: _escaped(name) for name in stats}
    lines = ["# HELP gear_loader_up Whether the table can be read.", "# TYPE gear_loader_up gauge"]
    lines += [f"gear_loader_up{{{labels[name]}}} {int(found is not None)}" for name, found in stats.items()]
    for series, kind, field, text in _SERIES:
        lines += [f"# HELP gear_loader_{series} {text}", f"# TYPE gear_loader_{series} {kind}"]
        lines += [
            f"gear_loader_{series}{{{labels[name]}}} {_number(getattr(found, field))}"
            for name, found in stats.items()
            if found is not None
        ]
    return "\n".join(lines) + "\n"


def _escaped(name: str) -> str:
    text = str(name).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'table="{text}"'


def _number(value: Any) -> str:
    return "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
