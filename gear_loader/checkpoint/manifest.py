"""The manifest of a checkpoint of one table: its contents, and reading it from a file that is not trusted."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from gear_loader.checkpoint import old_versions
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.json_file import (
    Fields,
    FileRecord,
    manifest_bytes,
    read_fields,
    schema_of,
    shortened,
)
from gear_loader.checkpoint.names import (
    INDEX_NAME,
    MANIFEST_NAME,
    PREVIOUS_NAME,
    SHARDS_NAME,
    column_file,
    index_file,
)
from gear_loader.checkpoint.segments import Segment, parse_segment, stored_columns
from gear_loader.checkpoint.trajectory_records import Counters, record_of
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.layout import MOST_PAYLOAD
from gear_loader.storage.schema import Schema
from gear_loader.storage.statistics import Statistics
from gear_loader.storage.table_rules import Rules

VERSION = 6
"""Of tables whose trajectories share steps or values; others are written as version 5, which is all that they need."""
_WITHOUT_SHARING = 5
FORMAT = "gear-loader checkpoint"
LARGEST_COUNT = 2**62
"""Largest value of a counter."""
_LIMIT = 2**37  # of the sizes, as in `Table.create`


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        save: random name of this save. table: random name of the saved table.
        saves: number of saves into the directory.
        next_segment: number above all segments ever written.
        rules: eviction, expiry and rate limits of the table.
        origin: the table's shard number, or None.
        next_sequence: sequence number above all trajectories ever committed.
        num_inserted, num_sampled: trajectories added and rows drawn so far, as rate limiters count them.
        policy_version: version of the policy, 0 in a table without versions, whose file has no such field.
        clock: time of the save, nanoseconds of the clock that times of commitment are of.
        num_trajectories, num_steps: size of the saved table.
        payload: bytes of the memory of ragged values; without ragged columns 0, and the file has no such field.
        index: valid bytes of the index file and their checksum. index_name: its name.
        segments: those that the index refers to.
        statistics: of the columns; without them the file has no such field.
        prefixes: whether trajectories of the table may share steps; if not, the file has no such field.
        shares: whether they do so on disk: the version is 6.
    """

    schema: Schema
    save: str
    table: str
    saves: int
    next_segment: int
    block_steps: int
    max_steps: int
    max_trajectories: int
    num_blocks: int
    rules: Rules
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    policy_version: int
    clock: int
    num_trajectories: int
    num_steps: int
    payload: int
    index: FileRecord
    index_name: str
    segments: tuple[Segment, ...]
    statistics: Statistics | None = None
    prefixes: bool = False
    shares: bool = False

    @property
    def has_old_index(self) -> bool:
        """Whether its index is of version 3."""
        return self.index_name == old_versions.index_file(self.saves)

    @property
    def counters(self) -> Counters:
        """Counters of the saved table."""
        names = (field.name for field in dataclasses.fields(Counters))
        return Counters(**{name: getattr(self, name) for name in names})

    def to_bytes(self) -> bytes:
        """Serialize the manifest."""
        fields: dict[str, Any] = {
            **vars(self),
            "schema": self.schema.to_json(),
            "rules": self.rules.to_json(),
        }
        if self.rules.version is None:
            del fields["policy_version"]
        fields["index"] = {
            "path": fields.pop("index_name"),
            **vars(self.index),
            "record": record_of(self.shares).descr,
        }
        if not self.schema.ragged:
            del fields["payload"]
        del fields["shares"]
        if not self.prefixes:
            del fields["prefixes"]
        if self.statistics is None:
            del fields["statistics"]
        else:
            fields["statistics"] = self.statistics.to_json()
        fields["files"] = _files(self.schema)
        fields["segments"] = [segment.to_json() for segment in self.segments]
        return manifest_bytes(FORMAT, VERSION if self.shares else _WITHOUT_SHARING, fields)


def no_manifest(directory: str, *, several: bool = False) -> str:
    """Error text for a directory without a manifest.

    Args:
        several: whether it is a checkpoint of several tables.
    """
    if several:
        return (
            f"{directory} is a checkpoint of several tables: it has {SHARDS_NAME} and no {MANIFEST_NAME}. Load it with "
            "gear_loader.distributed.load()."
        )
    return (
        f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Give the directory that Table.save() wrote; "
        "a first save that was killed leaves no manifest."
    )


def previous_of(directory: Directory) -> Manifest | None:
    """The manifest of the checkpoint before the current one, or None if there is none that can be read."""
    with contextlib.suppress(CheckpointError):
        if directory.has(PREVIOUS_NAME):
            return read_manifest(directory, PREVIOUS_NAME)
    return None


def read_manifest(directory: Directory, name: str = MANIFEST_NAME) -> Manifest:
    """Read and check `manifest.json`, or the previous one.

    Raises:
        CheckpointError: the manifest is missing, damaged or of another version.
    """

    def missing() -> str:
        return no_manifest(directory.path, several=directory.has(SHARDS_NAME))

    fields = read_fields(directory, name, FORMAT, *range(old_versions.VERSION, VERSION + 1), missing=missing)
    schema = schema_of(fields)
    saves = fields.integer("saves", 1, 10**12 - 1)
    next_segment = fields.integer("next_segment", 1, 10**12 - 1)
    if fields.value["version"] >= _WITHOUT_SHARING:
        fields.exactly("files", _files(schema))
    segments: dict[int, Segment] = {}
    for i, value in enumerate(fields.items("segments")):
        inner = Fields(value, fields.path, f"segments[{i}]")
        segment = parse_segment(inner, schema, next_segment)
        if segment.number in segments:
            raise inner.wrong("number", segment.number, "a number that no other segment has")
        segments[segment.number] = segment
    max_steps = fields.integer("max_steps", 1, _LIMIT - 1)
    max_trajectories = fields.integer("max_trajectories", 1, 2**31 - 1)
    num_trajectories = fields.integer("num_trajectories", 0, max_trajectories)
    next_sequence = fields.integer("next_sequence", num_trajectories, LARGEST_COUNT)
    rules = _rules(fields, schema, max_trajectories)
    prefixes = _prefixes(fields)
    shares = prefixes and fields.value["version"] >= VERSION
    clock, index, index_name = _index(fields, saves, shares)
    return Manifest(
        schema=schema,
        save=fields.hexadecimal("save", 16),
        table=fields.hexadecimal("table", 16),
        saves=saves,
        next_segment=next_segment,
        block_steps=fields.integer("block_steps", 1, _LIMIT - 1),
        max_steps=max_steps,
        max_trajectories=max_trajectories,
        num_blocks=fields.integer("num_blocks", 1, 2**31 - 1),
        rules=rules,
        origin=fields.origin("origin"),
        next_sequence=next_sequence,
        num_inserted=fields.integer("num_inserted", num_trajectories, next_sequence),
        num_sampled=fields.integer("num_sampled", 0, LARGEST_COUNT),
        policy_version=0 if rules.version is None else fields.integer("policy_version", 0, LARGEST_COUNT),
        clock=clock,
        num_trajectories=num_trajectories,
        num_steps=fields.integer("num_steps", num_trajectories, max_steps),
        payload=fields.integer("payload", 1, MOST_PAYLOAD) if schema.ragged else 0,
        index=index,
        index_name=index_name,
        segments=tuple(segments.values()),
        statistics=_statistics(fields),
        prefixes=prefixes,
        shares=shares,
    )


def _prefixes(fields: Fields) -> bool:
    given = fields.value.get("prefixes", False)
    if type(given) is not bool:
        raise fields.wrong("prefixes", given, "True or False")
    return given


def _statistics(fields: Fields) -> Statistics | None:
    given = fields.value.get("statistics")
    try:
        return None if given is None else Statistics.from_json(given)
    except SchemaError as error:
        raise fields.wrong("statistics", given, "statistics of columns") from error


def _files(schema: Schema) -> dict[str, str]:
    """Names of the files of columns, and of the values of ragged ones."""
    return {name: column_file(name) for name in stored_columns(schema)}


def _index(fields: Fields, saves: int, shares: bool) -> tuple[int, FileRecord, str]:
    """The clock, and record and name of the index file."""
    if fields.value["version"] == old_versions.VERSION:
        name = old_versions.index_file(saves)
        return 0, fields.record("index", name), name
    inner = fields.inner("index")
    name = inner.get("path")
    match = INDEX_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or name != index_file(int(match[1]), match[2] or "") or not 1 <= int(match[1]) <= saves:
        raise inner.wrong("path", name, f"{index_file(saves)!r}, or one of an earlier save")
    inner.exactly("record", [list(field) for field in record_of(shares).descr])
    return fields.integer("clock", 0, LARGEST_COUNT), fields.record("index", name, least=0), name


def _rules(fields: Fields, schema: Schema, max_trajectories: int) -> Rules:
    inner = fields.inner("rules")
    known = list(Rules().to_json())
    if "version" in inner.value:
        known += ["version", "max_lag"]
    for key in known:
        value = inner.get(key)
        try:
            given = {key: value} if key != "max_lag" else {key: value, "version": inner.get("version")}
            rules = Rules.from_json(given)
            rules.check_columns(schema)
        except (SchemaError, ArithmeticError, LookupError, TypeError) as error:
            raise inner.wrong(key, value, f"a rule of a table ({shortened(str(error))})") from error
        if rules.rate_limiter is not None and rules.rate_limiter.min_size > max_trajectories:
            raise inner.wrong(key, value, f"a min_size of at most max_trajectories={max_trajectories:,}")
    if len(inner.value) != len(known):
        raise inner.wrong("", sorted(inner.value), f"the fields {known}")
    return Rules.from_json(inner.value)
