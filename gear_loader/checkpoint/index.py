"""The index of a checkpoint: its trajectories and their places in the segments.

The file may be damaged or come from an untrusted source; every value is checked before it is used.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.json_file import read_limited
from gear_loader.checkpoint.manifest import LARGEST_COUNT, Manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, index_file
from gear_loader.errors import CheckpointError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.ids import LARGEST_ID, following, joined
from gear_loader.utils.arrays import Array

__all__ = ["Entries", "read_entries"]

_LARGEST_TIMES = 2**31 - 1
_ENTRY_BYTES = 68  # of the index, for each trajectory
_HEADER_BYTES = 1 << 16  # limit of the safetensors header, which has less than 1,000 bytes for these arrays


@dataclasses.dataclass(frozen=True)
class Entries:
    """The trajectories of a checkpoint, oldest first; all arrays [n].

    Attributes:
        sequence: int64, number in order of commitment. length: int64, steps. priority: float32, -1 if not given.
        times_sampled: int64, number of draws so far, 0 if the table does not count them.
        age: int64, nanoseconds between commitment and save.
        ident: int64, global id that the trajectory was added with, -1 if the table assigned one.
        segment: int64, number of the segment. first: int64, first row in the segment.
        final: int64, number of final steps (0 or 1), which follow the steps in the segment. The file has it only if
            there is any.
        place: int64, position among the trajectories of the segment, which is the row in the files of columns per
            trajectory. The file has it only if there is such a column.
        filled: int64, bits of the late columns that are filled. The file has it only if any is.
    """

    sequence: Array
    length: Array
    priority: Array
    times_sampled: Array
    age: Array
    ident: Array
    segment: Array
    first: Array
    final: Array
    place: Array
    filled: Array

    @property
    def rows(self) -> Array:
        """Rows in the segment, int64 [n]: steps and final steps."""
        rows: Array = self.length + self.final
        return rows

    def take(self, chosen: Array) -> Entries:
        """Entries selected by a boolean mask or by integer positions."""
        return Entries(*(array[chosen] for array in self.arrays().values()))

    def ids(self, origin: int | None) -> Array:
        """Global ids of the trajectories, int64 [n].

        Args:
            origin: shard number of the saved table, or None.
        """
        return np.where(self.ident >= 0, self.ident, joined(self.sequence, origin or 0))

    def arrays(self) -> dict[str, Array]:
        """Arrays by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def read_entries(directory: Directory, manifest: Manifest) -> Entries:
    """Read and check the index.

    Raises:
        CheckpointError: the index is missing, damaged, or contradicts the manifest.
    """
    import safetensors
    import safetensors.numpy

    path = directory.at(index_file(manifest.saves))
    each = _ENTRY_BYTES + 8 * (bool(manifest.schema.per_trajectory) + bool(manifest.schema.late))
    limit = each * manifest.num_trajectories + _HEADER_BYTES

    def check(size: int) -> None:
        if size != manifest.index.bytes:
            raise CheckpointError(f"{path} has {size:,} bytes; expected {manifest.index.bytes:,}. {REMEDY}")
        if size > limit:
            raise CheckpointError(
                f"{path} has {size:,} bytes; expected at most {limit:,} for {manifest.num_trajectories:,} "
                f"trajectories. {REMEDY}"
            )

    try:
        data = read_limited(directory, index_file(manifest.saves), check)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {MANIFEST_NAME} beside it names it. {REMEDY}") from error
    found = xxhash.xxh3_128_hexdigest(data)
    if found != manifest.index.xxh128:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found}, expected {manifest.index.xxh128}. {REMEDY}"
        )
    try:
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}). {REMEDY}") from error
    names = [field.name for field in dataclasses.fields(Entries)]
    for name in ("final", "filled") if manifest.schema.per_trajectory else ("final", "filled", "place"):
        arrays.setdefault(name, np.zeros(manifest.num_trajectories, dtype=np.int64))
    if sorted(arrays) != sorted(names):
        raise CheckpointError(f"{path} has the tensors {sorted(arrays)}; expected {sorted(names)}. {REMEDY}")
    for name in names:
        dtype = np.dtype(np.float32 if name == "priority" else np.int64)
        if arrays[name].dtype != dtype or arrays[name].shape != (manifest.num_trajectories,):
            raise CheckpointError(
                f"{path}: {name!r} is {arrays[name].dtype} {list(arrays[name].shape)}; expected {dtype} "
                f"[{manifest.num_trajectories}]. {REMEDY}"
            )
    entries = Entries(**{name: arrays[name] for name in names})
    problem = _problem(entries, manifest)
    if problem:
        raise CheckpointError(f"{path} contradicts {MANIFEST_NAME}: {problem}. {REMEDY}")
    return entries


def _problem(entries: Entries, manifest: Manifest) -> str | None:
    """The first inconsistency of the entries, or None."""
    if not len(entries.sequence):
        return None if manifest.num_steps == 0 else "there are steps and no trajectory"
    sequence, length, first = entries.sequence, entries.length, entries.first
    if sequence[0] < 0 or sequence[-1] >= manifest.next_sequence or (np.diff(sequence) <= 0).any():
        return f"sequence numbers do not ascend from 0 to {manifest.next_sequence - 1}"
    if length.min() < 1 or length.max() > manifest.max_steps:
        return f"a length is not between 1 and {manifest.max_steps}"
    if length.sum() != manifest.num_steps:
        return f"lengths add up to {length.sum()}, expected {manifest.num_steps}"
    if entries.final.min() < 0 or entries.final.max() > 1:
        return "a number of final steps is not 0 or 1"
    if entries.filled.min() < 0 or entries.filled.max() >> len(manifest.schema.late):
        return f"bits of filled columns are not of {len(manifest.schema.late)} late ones"
    priority = entries.priority[entries.priority != UNSET]
    if not (np.isfinite(priority) & (priority >= 0)).all():
        return f"a priority is neither {UNSET:g} nor finite and at least 0"
    times, age = entries.times_sampled, entries.age
    most = (manifest.rules.max_times_sampled or _LARGEST_TIMES + 1) - 1
    if times.min() < 0 or times.max() > most:
        return f"a trajectory was drawn less than 0 or more than {most} times"
    if age.min() < 0 or age.max() > LARGEST_COUNT:
        return f"an age is not between 0 and {LARGEST_COUNT}"
    if entries.ident.min() < -1 or entries.ident.max() > LARGEST_ID:
        return f"an id is neither -1 nor between 0 and {LARGEST_ID}"
    if len(np.unique(entries.ids(manifest.origin))) != len(sequence):
        return "two trajectories have the same id"
    if following(entries.ident, manifest.origin or 0) > manifest.next_sequence:
        return f"an id of the table's own origin has a number above {manifest.next_sequence - 1}"
    steps, rows = {segment.number: segment.steps for segment in manifest.segments}, entries.rows
    counts = {segment.number: segment.trajectories for segment in manifest.segments}
    for number in np.unique(entries.segment).tolist():
        if number not in steps:
            return f"segment {number} does not exist"
        here = np.flatnonzero(entries.segment == number)
        here = here[np.argsort(first[here], kind="stable")]
        # By subtraction: the sum of two invalid numbers could overflow.
        if first[here[0]] < 0 or (first[here] > steps[number] - rows[here]).any():
            return f"a trajectory lies outside segment {number}, which has {steps[number]} steps"
        if (np.diff(first[here]) < rows[here[:-1]]).any():
            return f"two trajectories of segment {number} overlap"
        place = entries.place[here]
        if manifest.schema.per_trajectory and (
            place[0] < 0 or place[-1] >= counts[number] or (np.diff(place) <= 0).any()
        ):
            return f"places in segment {number} do not ascend from 0 to {counts[number] - 1}"
    return None
