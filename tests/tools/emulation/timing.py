"""When the warps of a block issue their instructions, if every instruction takes a stated time.

A warp issues its instructions in order, each when the registers that it reads are there. So this finds how often a warp
waits for memory, one wait after another, whatever the order of the instructions promises. What it leaves out: warps in
each other's way, beyond the share of a scheduler that each has; what is in which cache, except that a block finds the
lines that it read before; how ptxas reorders instructions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from .arithmetic import Array
from .ptx import Instruction

_NAMES = re.compile(r"%[a-z]+\d+")
_NO_RESULT = {"st", "bra", "bar", "ret", "cp", "stmatrix"}
LINE = 128


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Units of time from an instruction to its result; `issue` is that between two instructions of a warp.

    Attributes:
        device, host: a load from the GPU's memory, or over the bus. near: of a line that the block has read before.
        shared: shared memory and shuffles. other: arithmetic. barrier: a barrier of the block.
    """

    device: float
    host: float
    near: float = 0
    shared: float = 0
    other: float = 0
    issue: float = 0
    barrier: float = 0


ROUND_TRIPS = Latencies(device=1, host=1)
"""Time is the number of loads from global memory that a block waits for one after another."""

NANOSECONDS = Latencies(device=350, host=1400, near=20, shared=15, other=3, issue=0.6, barrier=15)
"""Assumed of a GPU of 1.6 GHz; those of `benchmarks predict`."""


class Timeline:
    """The time of each warp of a block, and when each register's value is there.

    Args:
        registers: names of the registers.
        warps: warps of the block. More than four share the schedulers.
    """

    def __init__(self, registers: Iterable[str], warps: int, latencies: Latencies) -> None:
        self.latencies, self._warps = latencies, warps
        self._issue = latencies.issue * max(1.0, warps / 4)
        self.now = np.zeros(warps)
        self._ready = {name: np.zeros(warps) for name in registers}
        self._seen: set[int] = set()
        self._copies: list[list[Array]] = [
            []
        ]  # by group, the open one last: when copies are complete, for each warp
        self._operands: dict[int, tuple[list[Array], list[Array]]] = {}  # by the instruction's id

    def _of(self, instruction: Instruction) -> tuple[list[Array], list[Array]]:
        """Arrays of the registers that an instruction reads and of those that it writes."""
        if id(instruction) not in self._operands:
            found = [_NAMES.findall(each) for each in instruction.operands]
            first = 0 if instruction.parts[0] in _NO_RESULT else 1
            read = [name for names in found[first:] for name in names]
            if instruction.predicate is not None:
                read.append(instruction.predicate[0])
            wrote = [name for names in found[:first] for name in names]
            named = [self._ready[name] for name in read if name in self._ready]
            self._operands[id(instruction)] = named, [self._ready[name] for name in wrote]
        return self._operands[id(instruction)]

    def issue(self, instruction: Instruction, warps: Array) -> None:
        """Warps (distinct numbers) issue an instruction when what it reads is there."""
        read, wrote = self._of(instruction)
        name, latencies = instruction.parts[0], self.latencies
        there = self.now[warps]
        for each in read:
            there = np.maximum(there, each[warps])
        if name == "mov":  # ptxas gives both the same register, so this waits for nothing
            self.now[warps] += self._issue
        else:
            self.now[warps] = there + self._issue
            shared = "shared" in instruction.parts or name in ("shfl", "redux", "ldmatrix")
            there = there + (latencies.shared if shared else latencies.other)
        for each in wrote:
            each[warps] = there

    def loaded(
        self, instruction: Instruction, warps: Array, addresses: Array, *, host: bool, cached: bool
    ) -> None:
        """The load that warps have just issued reads these addresses of global memory, [n] like `warps`."""
        which = np.unique(warps)
        arrival = self._arrival(addresses, host, cached)
        for each in self._of(instruction)[1]:
            each[which] = self.now[which] + arrival

    def copied(self, warps: Array, addresses: Array, host: bool) -> None:
        """Asynchronous copies from these addresses begin."""
        which, done = np.unique(warps), np.zeros(self._warps)
        done[which] = self.now[which] + self._arrival(addresses, host, True)
        self._copies[-1].append(done)

    def _arrival(self, addresses: Array, host: bool, cached: bool) -> float:
        lines = set(np.unique(addresses // np.uint64(LINE)).tolist())
        near = cached and lines <= self._seen
        self._seen |= lines
        return self.latencies.near if near else self.latencies.host if host else self.latencies.device

    def commit(self) -> None:
        """Close a group of copies."""
        self._copies.append([])

    def wait(self, left: int) -> None:
        """All warps wait until at most `left` groups of copies are under way."""
        complete = self._copies[: max(len(self._copies) - 1 - left, 0)]
        for group in complete:
            for done in group:
                self.now = np.maximum(self.now, done)
            group.clear()

    def barrier(self) -> None:
        """All warps meet."""
        self.now[:] = self.now.max() + self.latencies.barrier
