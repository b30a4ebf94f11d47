"""Put the emulator in the place of the kernels: what launches one runs its compiled code.

`install` replaces the kernels of `gear_loader.kernels` for the rest of the process. A launch may access its tensors,
the columns and outputs of the plan whose table it was given, and the memory of tables that exist.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import aot
import aot_common
import numpy as np
import torch

from gear_loader.kernels import (
    append,
    gather,
    items,
    neighbors,
    packed,
    place,
    priority,
    split,
    store,
    uniform,
    uniform_reference,
)
from gear_loader.kernels.append_plan import AppendPlan
from gear_loader.kernels.packed_plan import PackedPlan
from gear_loader.kernels.plan import GatherPlan, PlacePlan
from gear_loader.kernels.split_plan import SplitPlan
from gear_loader.storage.region import Region

from .machine import Counts, Machine
from .memory import Memory
from .ptx import parse
from .timing import Latencies

ARCH = 90
uniform_kernel = uniform.uniform_kernel
_MODULES = (append, gather, items, neighbors, packed, place, priority, split, store, uniform)

LAUNCHES: collections.Counter[str] = collections.Counter()
"""How often each variant ran."""

COUNTS: dict[str, Counts] = collections.defaultdict(Counts)
"""What all launches of a variant did."""

PLANS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Plans whose columns and outputs launches may access."""

_regions: weakref.WeakSet[Region] = weakref.WeakSet()
_random = np.random.default_rng(0)


@functools.cache
def machine(name: str, version: str, kernels: tuple[str, ...] = ()) -> Machine:
    """The compiled kernel of a variant of tests/tools/aot.py."""
    report = aot_common.reports((version, ARCH, kernels))[name]
    return Machine(parse(report["ptx"]), report["shared"])


def launch(
    runner: Machine,
    name: str,
    blocks: int,
    arguments: tuple[Any, ...],
    memory: Memory | None = None,
    latencies: Latencies | None = None,
) -> Counts:
    """Run a kernel with the arguments of its launcher, blocks in random order; returns what it did."""
    memory = Memory() if memory is None else memory
    values: list[int | float] = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            memory.add_tensor(argument, f"argument {i}")
            values.append(argument.data_ptr())
        else:
            values.append(argument)
    done = runner.launch(blocks, values, memory, _random.permutation(blocks).tolist(), latencies)
    LAUNCHES[name] += 1
    COUNTS[name].instructions.update(done.instructions)
    COUNTS[name].host_requests.update(done.host_requests)
    return done


class EmulatedKernel:
    """Stands for a kernel: ``kernel[grid](*arguments, **constants)`` runs the variant that has these constants."""

    def __init__(self, function: str, interpreted: Any, find: Callable[[str], Machine | None]) -> None:
        self._interpreted, self._find = interpreted, find
        self._variants = [each for each in aot.VARIANTS if _function(each.kernel) == function]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreted, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **constants: Any) -> Any:
            wanted = [each for each in self._variants if each.constants.items() <= constants.items()]
            assert len(wanted) == 1, f"no compiled variant has the constants {constants}"
            runner = self._find(wanted[0].name)
            if runner is None:
                return self._interpreted[grid](*arguments, **constants)
            memory = Memory()
            for region in list(_regions):
                if region.bytes is not None:
                    memory.add(region.bytes.ctypes.data, region.bytes.nbytes, "a table", host=True)
            _add_plan(memory, arguments)
            if wanted[0].kernel is uniform_kernel:
                *_, address, held, _ = arguments[0].tolist()
                size = 8 * (uniform_reference.HEADER + uniform_reference.ARRAYS * held)
                memory.add(address, size, "what is drawn from")
            return launch(runner, wanted[0].name, grid[0], arguments, memory)

        return run


def _add_plan(memory: Memory, arguments: tuple[Any, ...]) -> None:
    """Allow access to what a plan's table, or the work of packed batches, names by address."""
    table = arguments[0]
    for plan in list(PLANS):
        if isinstance(plan, PackedPlan):  # several plans may be the sources of a launch
            if plan.position is arguments[-1]:
                for one in plan.columns:
                    if one.source is not None:
                        memory.add_tensor(one.source, "a source", host=True)
                    memory.add_tensor(one.out, "an output")
            continue
        tables = [each[-1] for each in plan.launches] if isinstance(plan, GatherPlan) else [plan.device_table]
        if all(each is not table for each in tables):
            continue
        if isinstance(plan, AppendPlan):
            for place in plan.columns:
                memory.add_tensor(place.rows, "rows")
                memory.add_tensor(place.image, "images")
                memory.add_tensor(place.target, "blocks", host=True)
            continue
        if isinstance(plan, SplitPlan):
            for part in plan.columns:
                memory.add_tensor(part.records, "records")
                memory.add_tensor(part.out, "an output")
            continue
        for mask in getattr(plan, "masks", ()):
            memory.add_tensor(mask.out, "a mask")
        for column in getattr(plan, "columns", ()):
            memory.add_tensor(column.source, "a source", host=True)
            memory.add_tensor(column.out, "an output")
            if column.mask is not None:
                memory.add_tensor(column.mask, "a mask")
        for out in getattr(plan, "outs", ()):
            memory.add_tensor(out, "an output")


def _function(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def install(version: str = aot_common.INSTALLED, kernels: tuple[str, ...] = ()) -> None:
    """Replace the kernels whose variants' names begin with one of `kernels`, or all."""

    def find(name: str) -> Machine | None:
        if kernels and not name.startswith(kernels):
            return None
        return machine(name, version, kernels)

    functions = {_function(each.kernel) for each in aot.VARIANTS}
    for module in _MODULES:
        for name in functions:
            kernel = vars(module).get(name)
            if kernel is not None and kernel.fn.__module__ == module.__name__:
                setattr(module, name, EmulatedKernel(name, kernel, find))
    _remember(AppendPlan, PLANS)
    _remember(GatherPlan, PLANS)
    _remember(PlacePlan, PLANS)
    _remember(SplitPlan, PLANS)
    _remember(PackedPlan, PLANS)
    _remember(Region, _regions)


def _remember(kind: Any, known: weakref.WeakSet[Any]) -> None:
    """Add every object of a class to `known` when it is made."""
    init = kind.__init__

    @functools.wraps(init)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        known.add(self)

    kind.__init__ = remembering
