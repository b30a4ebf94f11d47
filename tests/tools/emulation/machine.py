"""Run a compiled kernel: one block after the other, each instruction for all threads of the block that are at it.

Of threads at different instructions, those at the lowest go first, so that branches meet again where they would on a
GPU. What is checked at every step: that memory accessed was given and is aligned, that shuffles read only from threads
that take part, that barriers are reached by the whole block together, and that warps which touch the same byte have a
barrier or an atomic operation between them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from . import arithmetic
from .arithmetic import TYPES, Array
from .copies import AsyncCopies
from .memory import ATOMIC, READ, WRITE, Accesses, InvalidAccessError, Memory, RaceError
from .ptx import Instruction, Program, listed
from .timing import Latencies, Timeline

WARP = 32
SECTOR, LINE = 32, 128
_UNSET = 0xA5A5_A5A5_DEAD_BEEF
_WORDS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
_RUNAWAY = 5_000_000

Reader = Callable[[], Array]
Writer = Callable[[Array, Array], None]
Step = Callable[[Array], None]


class UnknownInstructionError(NotImplementedError):
    """An instruction, or a form of one, that the emulator does not execute."""


class SynchronizationError(Exception):
    """A shuffle or a barrier that not all of its threads reach."""


@dataclasses.dataclass
class Counts:
    """What a launch did.

    Attributes:
        instructions: instructions of warps, by name.
        host_requests: requests of warps to host memory, by their bytes.
        host_bytes_at_stores: bytes requested from host memory before each store to global memory.
        time: of the block that takes longest, where latencies were given.
    """

    instructions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    host_requests: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    host_bytes_at_stores: list[int] = dataclasses.field(default_factory=list)
    time: float = 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes that crossed the bus."""
        return sum(size * count for size, count in self.host_requests.items())


class Machine:
    """A kernel that can be launched; its registers are arrays over the threads of a block.

    Args:
        program: the kernel.
        shared: bytes of shared memory.

    Raises:
        UnknownInstructionError: the kernel has an instruction that is not known here.
    """

    def __init__(self, program: Program, shared: int) -> None:
        self.program, self._shared_bytes = program, shared
        self.threads = program.threads
        self._thread = np.arange(self.threads, dtype=np.uint32)
        self._warps = np.arange(self.threads) // WARP
        self._special = {"%tid.x": self._thread}
        for name in ("%ctaid.x", "%nctaid.x", "%ctaid.y", "%ctaid.z", "%tid.y", "%tid.z"):
            self._special[name] = np.zeros(self.threads, dtype=np.uint32)
        self._registers = {
            name: np.zeros(self.threads, dtype=_WORDS[kind]) for name, kind in program.registers.items()
        }
        self._parameters: dict[str, int] = {}
        self._memory = Memory()
        self._shared = np.zeros(shared, dtype=np.uint8)
        self._latencies: Latencies | None = None
        self._timeline: Timeline | None = None
        self.counts = Counts()
        self._steps: list[Step | None] = [self._compile(each) for each in program.instructions]

    # ------------------------------------------------------------ launch

    def launch(
        self,
        blocks: int,
        arguments: Sequence[int | float],
        memory: Memory,
        order: Sequence[int] | None = None,
        latencies: Latencies | None = None,
    ) -> Counts:
        """Run `blocks` blocks, in `order`; addresses and numbers in the order of the kernel's arguments.

        With `latencies`, also count the time of the block that takes longest.

        Raises:
            InvalidAccessError, RaceError, SynchronizationError: what the kernel did wrong.
        """
        self._parameters = {}
        for (name, kind), value in zip(self.program.parameters.items(), [*arguments, 0, 0], strict=True):
            bits = int(np.float32(value).view(np.uint32)) if kind == "f32" else int(value)
            self._parameters[name] = bits & ((1 << 64) - 1 if kind.endswith("64") else (1 << 32) - 1)
        self._memory, self.counts, self._latencies = memory, Counts(), latencies
        self._special["%nctaid.x"][:] = blocks
        read: list[Array] = []
        written: list[Array] = []
        for block in range(blocks) if order is None else order:
            for space in self._block(int(block)):
                read.append(space[0])
                written.append(space[1])
        self._check_blocks(read, written)
        return self.counts

    def _check_blocks(self, read: list[Array], written: list[Array]) -> None:
        """Nothing orders two blocks: what one writes, no other may read or write."""
        places = np.concatenate([*written, np.empty(0, dtype=np.uint64)])
        distinct, times = np.unique(places, return_counts=True)
        if (times > 1).any():
            raise RaceError(f"Byte {int(distinct[times > 1][0]):#x} was written by two blocks.")
        for number, part in enumerate(read):
            others = np.setdiff1d(np.intersect1d(part, distinct), written[number])
            if len(others):
                raise RaceError(f"Byte {int(others[0]):#x} was written by one block and read by another.")

    def _block(self, block: int) -> list[tuple[Array, Array]]:
        self._special["%ctaid.x"][:] = block
        for register in self._registers.values():
            register[:] = _UNSET & ((1 << 8 * register.itemsize) - 1) if register.dtype != np.bool_ else True
        self._shared[:] = 0xA5
        self._global, self._local = Accesses("global"), Accesses("shared")
        self._copies = AsyncCopies(self._shared, self._local)
        latencies = self._latencies
        timeline = Timeline(self._registers, self.threads // WARP, latencies) if latencies else None
        self._timeline = timeline
        touched: list[tuple[Array, Array]] = []
        place = np.zeros(self.threads, dtype=np.int64)
        alive, waiting = np.ones(self.threads, dtype=bool), np.zeros(self.threads, dtype=bool)
        for _ in range(_RUNAWAY):
            able = alive & ~waiting
            if not able.any():
                self._local.barrier()
                touched.append(self._global.barrier())
                if not alive.any():
                    if timeline is not None:
                        self.counts.time = max(self.counts.time, float(timeline.now.max()))
                    return [self._merged(touched)]
                if timeline is not None:
                    timeline.barrier()
                if len(np.unique(place[waiting])) > 1:
                    raise SynchronizationError("Threads of a block wait at different barriers.")
                waiting[:] = False
                continue
            at = int(place[able].min())
            here = able & (place == at)
            instruction, step = self.program.instructions[at], self._steps[at]
            warps = np.unique(self._warps[here])
            self.counts.instructions[".".join(instruction.parts)] += len(warps)
            if timeline is not None:
                timeline.issue(instruction, warps)
            place[here] = at + 1
            chosen = here
            if instruction.predicate is not None:
                name, negated = instruction.predicate
                chosen = here & (self._registers[name] ^ negated)
            if step is not None:
                if chosen.any():
                    step(chosen)
            elif instruction.parts[0] == "bra":
                place[chosen] = self.program.labels[instruction.operands[0]]
            elif instruction.parts[0] == "ret":
                alive &= ~chosen
            else:
                waiting |= chosen
        raise SynchronizationError(f"A block has not ended after {_RUNAWAY} instructions.")

    @staticmethod
    def _merged(touched: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        read = np.unique(np.concatenate([each[0] for each in touched]))
        return read, np.unique(np.concatenate([each[1] for each in touched]))

    # ------------------------------------------------------------ operands

    def _reader(self, operand: str, kind: str) -> Reader:
        """A function that returns the operand for all threads, as this type."""
        dtype = TYPES[kind]
        array = self._special.get(operand)
        if array is None:
            array = self._registers.get(operand)
        if array is None:
            bits = 0 if operand == "global_smem" else arithmetic.constant(operand)
            width = dtype.itemsize
            raw = (bits & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            value = np.full(self.threads, np.frombuffer(raw, dtype=dtype)[0], dtype=dtype)
            return lambda: value
        if array.itemsize < dtype.itemsize:  # a special register as 64 bits
            return lambda: array.astype(dtype)
        view = array.view(dtype)[:: array.itemsize // dtype.itemsize]
        return lambda: view

    def _writer(self, operand: str, kind: str) -> Writer:
        """A function that stores values of this type in the chosen threads' register."""
        if operand == "_":
            return lambda value, chosen: None
        register = self._registers[operand]
        if register.dtype == np.bool_:
            return lambda value, chosen: np.copyto(register, value, where=chosen)
        dtype = TYPES[kind]
        if register.itemsize == dtype.itemsize:
            view = register.view(dtype)
            return lambda value, chosen: np.copyto(view, value, where=chosen, casting="no")
        if register.itemsize < dtype.itemsize:
            raise UnknownInstructionError(f"{kind} into the {8 * register.itemsize} bits of {operand}")
        wide = register.view(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{register.itemsize}"))
        return lambda value, chosen: np.copyto(wide, value.astype(wide.dtype), where=chosen)

    def _predicate(self, operand: str) -> Reader:
        if operand in self._registers:
            register = self._registers[operand]
            return lambda: register
        value = np.full(self.threads, arithmetic.constant(operand) != 0)
        return lambda: value

    def _address(self, operand: str) -> Reader:
        """uint64 addresses of ``[base + offset]``."""
        base, _, offset = operand.strip("[] ").partition("+")
        wide = base.strip().startswith("%rd")
        read, more = self._reader(base.strip(), "u64" if wide else "u32"), np.int64(int(offset or "0", 0))
        return lambda: (read().astype(np.int64) + more).view(np.uint64)

    # ------------------------------------------------------------ instructions

    def _compile(self, instruction: Instruction) -> Step | None:
        """A function that executes the instruction; None for those that change who goes where."""
        name = instruction.parts[0]
        if name in ("bra", "ret") or instruction.parts[:2] == ("bar", "sync"):
            return None
        make: Callable[[Instruction], Step] | None = getattr(self, f"_do_{name}", None)
        try:
            if make is not None:
                return make(instruction)
            return self._arithmetic(instruction)
        except (KeyError, IndexError, ValueError, UnknownInstructionError) as error:
            raise UnknownInstructionError(f"{self.program.name}: {instruction}: {error}") from error

    def _arithmetic(self, instruction: Instruction) -> Step:
        operation, inputs, output = arithmetic.operation(instruction.parts)
        read: list[Reader] = [
            self._predicate(operand) if kind == "pred" else self._reader(operand, kind)
            for operand, kind in zip(instruction.operands[1:], inputs, strict=True)
        ]
        write = self._writer(instruction.operands[0], output)

        def step(chosen: Array) -> None:
            with np.errstate(all="ignore"):
                write(operation(*(each() for each in read)), chosen)

        return step

    def _do_mov(self, instruction: Instruction) -> Step:
        to, source = instruction.operands
        kind = instruction.parts[-1]
        if kind == "pred":
            truth, target = self._predicate(source), self._writer(to, kind)
            return lambda chosen: target(truth(), chosen)
        half = {8: "u32", 4: "u16"}.get(TYPES[kind].itemsize, "")
        if to.startswith("{"):
            whole = self._reader(source, kind)
            low, high = (self._writer(each, half) for each in listed(to))
            part = TYPES[half]

            def split(chosen: Array) -> None:
                halves = np.ascontiguousarray(whole()).view(part)
                low(halves[::2], chosen)
                high(halves[1::2], chosen)

            return split
        write = self._writer(to, kind)
        if source.startswith("{"):
            first, second = (self._reader(each, half) for each in listed(source))

            def join(chosen: Array) -> None:
                both = np.stack([first(), second()], axis=1)
                write(both.view(TYPES[kind])[:, 0], chosen)

            return join
        read = self._reader(source, kind)
        return lambda chosen: write(read(), chosen)

    def _do_ld(self, instruction: Instruction) -> Step:
        parts, kind = instruction.parts, instruction.parts[-1]
        if parts[1] == "param":
            name = instruction.operands[1].strip("[]")
            write, dtype = self._writer(instruction.operands[0], kind), TYPES[kind]

            def parameter(chosen: Array) -> None:
                raw = self._parameters[name].to_bytes(8, "little")[: dtype.itemsize]
                write(np.full(self.threads, np.frombuffer(raw, dtype=dtype)[0]), chosen)

            return parameter
        self._space(parts, {"volatile", "L1::evict_first", "L2::cache_hint", "v2", "v4"})
        writers = [self._writer(each, kind) for each in listed(instruction.operands[0])]
        if len(writers) != (4 if "v4" in parts else 2 if "v2" in parts else 1):
            raise UnknownInstructionError("number of registers")
        address, dtype = self._address(instruction.operands[1]), TYPES[kind]
        width, shared = dtype.itemsize * len(writers), "shared" in parts
        accesses = "_local" if shared else "_global"
        volatile = "volatile" in parts  # may see what others write meanwhile: not a race

        def load(chosen: Array) -> None:
            places, warps = address()[chosen], self._warps[chosen]
            if shared:
                data = self._shared[self._inside(places, width, instruction)]
            else:
                data, host = self._memory.load(places, width, str(instruction))
                if host.any():
                    self._count_requests(places[host], warps[host], width)
                if self._timeline is not None:
                    self._timeline.loaded(
                        instruction, warps, places, host=bool(host.any()), cached=not volatile
                    )
            if not volatile:
                getattr(self, accesses).note(places, width, warps, READ, instruction.line)
            values = np.zeros((self.threads, len(writers)), dtype=dtype)
            values[chosen] = data.view(dtype)
            for i, write in enumerate(writers):
                write(values[:, i], chosen)

        return load

    def _do_st(self, instruction: Instruction) -> Step:
        parts, kind = instruction.parts, instruction.parts[-1]
        self._space(parts, {"v2", "v4"})
        readers = [self._reader(each, kind) for each in listed(instruction.operands[1])]
        address, shared = self._address(instruction.operands[0]), "shared" in parts
        width = TYPES[kind].itemsize * len(readers)
        accesses = "_local" if shared else "_global"

        def store(chosen: Array) -> None:
            places, warps = address()[chosen], self._warps[chosen]
            data = np.stack([read()[chosen] for read in readers], axis=1).view(np.uint8)
            if shared:
                self._shared[self._inside(places, width, instruction)] = data
            else:
                self._memory.store(places, data, str(instruction))
                self.counts.host_bytes_at_stores.append(self.counts.host_bytes)
            getattr(self, accesses).note(places, width, warps, WRITE, instruction.line, data)

        return store

    def _do_cp(self, instruction: Instruction) -> Step:
        """Asynchronous copies: of 4, 8 or 16 bytes, the first so many from global memory and zeros after them."""
        kind = instruction.parts[1:]
        if kind in (("async", "commit_group"), ("async", "wait_group")):
            return self._group(instruction)
        if kind[0] != "async" or kind[2:] != ("shared", "global") or kind[1] not in ("ca", "cg"):
            raise UnknownInstructionError("form")
        to, source = (self._address(each) for each in instruction.operands[:2])
        width = int(instruction.operands[2], 0)
        size = self._reader(instruction.operands[3] if len(instruction.operands) > 3 else str(width), "u32")

        def copy(chosen: Array) -> None:
            sizes, warps = size()[chosen], self._warps[chosen]
            if not np.isin(sizes, (0, width)).all():
                raise UnknownInstructionError(f"{instruction}: a part of {width} bytes")
            places = self._inside(to()[chosen], width, instruction)
            data, some = np.zeros((len(sizes), width), dtype=np.uint8), sizes > 0
            if some.any():
                addresses = source()[chosen][some]
                data[some], host = self._memory.load(addresses, width, str(instruction))
                if host.any():
                    self._count_requests(addresses[host], warps[some][host], width)
                if self._timeline is not None:
                    self._timeline.copied(warps[some], addresses, host=bool(host.any()))
                self._global.note(addresses, width, warps[some], READ, instruction.line)
            self._copies.begin(places, data, warps, instruction.line, str(instruction))

        return copy

    def _group(self, instruction: Instruction) -> Step:
        left = None if instruction.parts[2] == "commit_group" else int(instruction.operands[0], 0)

        def close(chosen: Array) -> None:
            if not chosen.all():
                raise SynchronizationError(f"{instruction}: not all threads take part.")
            for each in (self._copies, self._timeline):
                if each is not None:
                    each.commit() if left is None else each.wait(left)

        return close

    def _do_stmatrix(self, instruction: Instruction) -> Step:
        """Rows of eight 16-bit words: thread 4 i + k of a warp has words 2 k and 2 k + 1 of row i."""
        if instruction.parts[1:] != ("sync", "aligned", "m8n8", "x1", "shared", "b16"):
            raise UnknownInstructionError("form")
        address = self._address(instruction.operands[0])
        read = self._reader(listed(instruction.operands[1])[0], "u32")

        def store(chosen: Array) -> None:
            if not chosen.all():
                raise SynchronizationError(f"{instruction}: not all threads take part.")
            lane = self._thread % WARP
            rows = address()[self._warps * WARP + lane // 4]
            places = rows + (lane % 4 * 4).astype(np.uint64)
            data = read()[:, None].view(np.uint8)
            self._shared[self._inside(places, 4, instruction)] = data
            self._local.note(places, 4, self._warps, WRITE, instruction.line, data)

        return store

    def _do_ldmatrix(self, instruction: Instruction) -> Step:
        """Four matrices: thread 8 m + i names row i of matrix m, words of which thread 4 i + k gets in register m."""
        if instruction.parts[1:] != ("sync", "aligned", "m8n8", "x4", "shared", "b16"):
            raise UnknownInstructionError("form")
        writers = [self._writer(each, "u32") for each in listed(instruction.operands[0])]
        address = self._address(instruction.operands[1])

        def load(chosen: Array) -> None:
            if not chosen.all():
                raise SynchronizationError(f"{instruction}: not all threads take part.")
            lane = self._thread % WARP
            for number, write in enumerate(writers):
                rows = address()[self._warps * WARP + 8 * number + lane // 4]
                places = rows + (lane % 4 * 4).astype(np.uint64)
                data = self._shared[self._inside(places, 4, instruction)]
                self._local.note(places, 4, self._warps, READ, instruction.line)
                write(data.view(np.uint32)[:, 0], chosen)

        return load

    def _do_atom(self, instruction: Instruction) -> Step:
        parts, kind = instruction.parts, instruction.parts[-1]
        if parts[1:4] != ("global", "gpu", "acq_rel"):
            raise UnknownInstructionError("order or space")
        combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[parts[4]]
        address, read = self._address(instruction.operands[1]), self._reader(instruction.operands[2], kind)
        write, dtype = self._writer(instruction.operands[0], kind), TYPES[kind]

        def change(chosen: Array) -> None:
            before = np.zeros(self.threads, dtype=dtype)
            places, values = address(), read()
            for thread in np.flatnonzero(chosen):
                one = places[thread : thread + 1]
                data, _ = self._memory.load(one, dtype.itemsize, str(instruction))
                before[thread] = data.view(dtype)[0, 0]
                with np.errstate(over="ignore"):
                    after = combine(before[thread], values[thread])
                self._memory.store(one, np.array([[after]], dtype=dtype).view(np.uint8), str(instruction))
            self._global.note(places[chosen], dtype.itemsize, self._warps[chosen], ATOMIC, instruction.line)
            if self._timeline is not None:
                self._timeline.loaded(
                    instruction, self._warps[chosen], places[chosen], host=False, cached=False
                )
            write(before, chosen)

        return change

    def _do_shfl(self, instruction: Instruction) -> Step:
        if len(instruction.parts) != 4 or instruction.parts[1] != "sync" or "|" in instruction.operands[0]:
            raise UnknownInstructionError("form")
        mode = instruction.parts[2]
        write = self._writer(instruction.operands[0], "b32")
        value, lane, clamp, members = (self._reader(each, "u32") for each in instruction.operands[1:])
        source = arithmetic.shuffles(mode)

        def shuffle(chosen: Array) -> None:
            self._all_members(chosen, members(), instruction)
            own = (self._thread % WARP).astype(np.int64)
            other = source(own, lane().astype(np.int64), clamp().astype(np.int64))
            other += self._warps * WARP
            if not chosen[other[chosen]].all():
                raise SynchronizationError(f"{instruction}: reads from a thread that takes no part.")
            write(value()[np.minimum(np.maximum(other, 0), self.threads - 1)], chosen)

        return shuffle

    def _do_redux(self, instruction: Instruction) -> Step:
        reductions = {"add": np.add, "min": np.minimum, "max": np.maximum}
        combine = reductions.get(instruction.parts[2])
        if combine is None or instruction.parts[1] != "sync" or instruction.parts[3:] != ("s32",):
            raise UnknownInstructionError("form")
        write = self._writer(instruction.operands[0], "s32")
        value, members = (
            self._reader(instruction.operands[1], "s32"),
            self._reader(instruction.operands[2], "u32"),
        )

        def reduce(chosen: Array) -> None:
            self._all_members(chosen, members(), instruction)
            values, found = value(), np.zeros(self._warps[-1] + 1, dtype=np.int32)
            for warp in np.unique(self._warps[chosen]):
                found[warp] = combine.reduce(values[chosen & (self._warps == warp)], dtype=np.int32)
            write(found[self._warps], chosen)

        return reduce

    def _do_bar(self, instruction: Instruction) -> Step:
        if instruction.parts != ("bar", "warp", "sync"):
            raise UnknownInstructionError("form")
        members = self._reader(instruction.operands[0], "u32")
        return lambda chosen: self._all_members(chosen, members(), instruction)

    def _do_createpolicy(self, instruction: Instruction) -> Step:
        return lambda chosen: None  # a hint to the cache, which the loads' results do not depend on

    # ------------------------------------------------------------ checks

    @staticmethod
    def _space(parts: tuple[str, ...], known: set[str]) -> None:
        rest = [part for part in parts[1:-1] if part not in known]
        if rest not in (["global"], ["shared"]):
            raise UnknownInstructionError(f"{rest} of a load or store")

    def _inside(self, places: Array, width: int, instruction: Instruction) -> Array:
        """int64 [n, width]: positions in shared memory."""
        first = places.astype(np.int64)
        if (first % width).any() or (first < 0).any() or (first + width > self._shared_bytes).any():
            raise InvalidAccessError(
                f"{instruction}: {width} bytes outside the {self._shared_bytes} of shared memory, or not aligned."
            )
        places: Array = first[:, None] + np.arange(width)
        self._copies.check(places, str(instruction))
        return places

    def _all_members(self, chosen: Array, members: Array, instruction: Instruction) -> None:
        """Raise unless all threads of the mask execute this together."""
        for warp in np.unique(self._warps[chosen]).tolist():
            threads = slice(warp * WARP, (warp + 1) * WARP)
            here = chosen[threads]
            bits = sum(1 << lane for lane in np.flatnonzero(here).tolist())
            wanted = {int(mask) & ((1 << WARP) - 1) for mask in members[threads][here]}
            if wanted != {bits}:
                masks = ", ".join(f"{mask:#x}" for mask in sorted(wanted))
                raise SynchronizationError(
                    f"{instruction}: lanes {bits:#x} of warp {warp} execute it, which names {masks}."
                )

    def _count_requests(self, places: Array, warps: Array, width: int) -> None:
        """What a warp's load asks of the bus: per line of 128 bytes, the sectors of 32 that it touches."""
        step = min(width, SECTOR)
        touched = places[:, None] + np.arange(0, width, step, dtype=np.uint64)
        sectors = np.unique(
            np.stack([np.repeat(warps, touched.shape[1]), touched.reshape(-1) // SECTOR]), axis=1
        )
        lines = np.unique(np.stack([sectors[0], sectors[1] // (LINE // SECTOR)]), axis=1, return_counts=True)[
            1
        ]
        for count in lines.tolist():
            self.counts.host_requests[count * SECTOR] += 1
