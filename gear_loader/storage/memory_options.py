"""`Memory`: how much memory a table takes, and how it lies there."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from gear_loader.errors import SchemaError
from gear_loader.storage.numa import Numa
from gear_loader.storage.pages import HugePages
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count, flag, one_of


@dataclasses.dataclass(frozen=True)
class Memory:
    """Options of a table's memory: ``Table.create(..., memory=gear.Memory("20GiB", huge_pages=True))``.

    Attributes:
        size: bytes of the whole region, index included: an int, or a text such as ``"20GiB"``. The table gets as many
            blocks as fit. With ``Table.create(device=)`` the bytes of the blocks alone, on the GPU. By default enough
            for `max_steps` steps in `max_trajectories` trajectories of any lengths.
        max_blocks: in place of `size`: number of blocks. For known lengths, `Table.required_blocks` gives the exact
            number and reserves less memory.
        mean_length: with ``block_steps="auto"``: expected mean length of the trajectories in steps, at least 1; by
            default ``max_steps / max_trajectories``.
        packed: whether columns of less than 128 bytes a step are interleaved in records (an array of structs), if there
            are two or more; ``"auto"`` does so. A step of all of them is then read from one place, and a block is
            padded once instead of once a column. A batch for a GPU reads whole records over the bus, even if it has few
            of their columns. False gives every column its own blocks.
        huge_pages: whether to use pages of 2 MiB. The CPU reads random rows from them 2 to 3 times as fast, and they
            are allocated and pinned faster. ``"auto"`` uses them where they are available: for a private table where
            the system allows ``MADV_HUGEPAGE``, for a named one on a tmpfs of Linux 6.1 or newer, or one that is
            mounted with ``huge=advise``, ``within_size`` or ``always``. True is an error where they are not. False does
            not ask for them. Where memory is fragmented, making them takes a second or two for each GB. A private table
            with them takes up to 2 MiB more for each column that is written. If ``$GEAR_LOADER_DIR`` is on a hugetlbfs
            of 2 MiB, named tables have no other pages.
        numa: NUMA node whose memory is used first; when it is full, the system uses others. ``"auto"`` takes that of
            the current GPU if CUDA is initialised, else the one that all GPUs of the machine share, if there is one.
            None leaves it to the system, which takes the node of the thread that allocates a page (for a named table
            the calling thread). On a machine with one node this has no effect.
        payload: bytes of the values of ragged columns, an int or a text; part of `size`, if that is given too. Tables
            with such columns need it. A trajectory takes 32 bytes more than its values, and up to 16 for each column;
            32 more for each gap between others that they are spread over. On eviction, a sixty-fourth of the steps
            leaves at once.
        prefixes: whether trajectories may begin with steps of others, which are stored once: `prefix` of `Table.add`.
            `max_steps` counts them for each trajectory; give `size` or `max_blocks`, for what is stored. The index then
            takes 40 bytes more for each trajectory, and 12 for each block that `max_steps` steps would take. Not with
            late columns that have a value for each step, mutable columns and `Table.create(device=)`; steps cannot be
            drawn by priority.

    Raises:
        SchemaError: an invalid value, or `size` and `max_blocks` together.
    """

    size: int | str | None = None
    max_blocks: int | None = None
    mean_length: float | None = None
    packed: bool | Literal["auto"] = "auto"
    huge_pages: HugePages = "auto"
    numa: Numa = "auto"
    payload: int | str | None = None
    prefixes: bool = False

    def __post_init__(self) -> None:
        if self.size is not None:
            byte_count("size", self.size)
            if self.max_blocks is not None:
                raise SchemaError(
                    f"size is {shown(self.size)} and max_blocks {shown(self.max_blocks)}; expected one of them."
                )
        if self.payload is not None:
            byte_count("payload", self.payload)
        flag("Memory prefixes", self.prefixes)
        for name in ("packed", "huge_pages"):
            if not isinstance(getattr(self, name), bool):
                one_of(name, getattr(self, name), ("auto",), ", True or False")

    @classmethod
    def of(cls, memory: Any) -> Memory:
        """The option `memory` of `Table.create`: None, bytes, a text with a unit, or a `Memory`."""
        if memory is None or isinstance(memory, Memory):
            return memory or cls()
        byte_count("memory", memory)
        return cls(memory)
