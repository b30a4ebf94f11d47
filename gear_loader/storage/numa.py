"""NUMA nodes: which one a GPU is connected to, which one memory lies on, and preferring one for new memory.

A GPU reads host memory of its own node directly, and that of another node through the link between the processors.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import shown
from gear_loader.utils.notices import notice

Numa = int | Literal["auto"] | None

SYS = Path("/sys")
_CALLS = {  # numbers of mbind, get_mempolicy and move_pages
    "x86_64": (237, 239, 279),
    "aarch64": (235, 236, 239),
}
_PREFERRED = 1  # MPOL_PREFERRED: other nodes are used when this one is full
_MAX_NODES = 1024
_SAMPLES = 64  # pages of a file
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor; class of GPUs

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


# ---------------------------------------------------------------- nodes


def nodes_with_memory() -> list[int]:
    """Nodes with memory, ascending; empty on a system without NUMA."""
    try:
        text = (SYS / "devices/system/node/has_memory").read_text()
    except OSError:
        return []
    return _numbers(text)


def _numbers(text: str) -> list[int]:
    """The numbers of a list such as ``0-1,4``."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def check_numa(value: Any) -> int | None:
    """The node that an option `numa` means for new memory, or None for the system's own placement.

    Never initialises CUDA: before that, ``"auto"`` takes the node of all GPUs of the machine if it is the same.

    Raises:
        SchemaError: neither "auto", None, nor a node with memory.
    """
    if value is None:
        return None
    nodes = nodes_with_memory()
    if isinstance(value, str) and value == "auto":
        return _automatic() if len(nodes) > 1 else None
    if isinstance(value, bool) or not isinstance(value, int) or value not in (nodes or [0]):
        raise SchemaError(
            f"numa is {shown(value)}; expected 'auto', None, or a NUMA node with memory, of which this machine has "
            f"{nodes or [0]}."
        )
    return value


def _automatic() -> int | None:
    if torch.cuda.is_initialized():
        return node_of_gpu(torch.cuda.current_device())
    nodes = set(gpu_nodes().values())
    if len(nodes) > 1:
        notice(
            "numa",
            f"The GPUs of this machine are on the NUMA nodes {sorted(nodes)}, and CUDA is not initialised, so that "
            "numa='auto' does not know which of them will read the table, and places it on none. Call "
            "torch.cuda.set_device(...) and torch.cuda.init() before, or give numa=<node>.",
        )
    return nodes.pop() if len(nodes) == 1 else None


def gpu_nodes() -> dict[str, int]:
    """PCI address -> node of NVIDIA's GPUs, as far as the system knows them."""
    found = {}
    with contextlib.suppress(OSError):
        for device in sorted((SYS / "bus/pci/devices").iterdir()):
            with contextlib.suppress(OSError):
                kind = (device / "vendor").read_text(), (device / "class").read_text()
                if kind[0].strip() == _NVIDIA and kind[1].startswith(_DISPLAY):
                    node = node_of_address(device.name)
                    if node is not None:
                        found[device.name] = node
    return found


def node_of_address(address: str) -> int | None:
    """The node of a PCI device such as ``0000:4f:00.0``, or None if the system names none."""
    try:
        node = int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def node_of_gpu(index: int) -> int | None:
    """The node of a CUDA device, or None if it is not known. Initialises CUDA."""
    address, device = ctypes.create_string_buffer(32), ctypes.c_int()
    if torch.version.hip:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(address, 32, device):
            return None
    except (OSError, AttributeError):
        return None
    return node_of_address(address.value.decode().lower())


# ---------------------------------------------------------------- memory


def prefer(node: int, start: int, count: int) -> bool:
    """Let new pages of mapped memory be of a node; those of a named region for all processes.

    Logs a notice if the system refuses.

    Args:
        node: its number. start: address of a page. count: bytes.

    Returns:
        Whether the system has accepted it.
    """
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    code = _call(0, start, count, _PREFERRED, mask, _MAX_NODES, 0)
    if code:
        notice(
            "numa",
            f"The system does not let this process choose the NUMA node of memory (mbind: {os.strerror(code)}): pages "
            "lie on the node of the thread that allocates them. In a container, add the capability SYS_NICE.",
        )
    return not code


def nodes_of(addresses: Sequence[int]) -> dict[int, int]:
    """Node -> number of the pages at these addresses that lie on it; pages that this process has not used are left out.

    Empty if the system does not tell.
    """
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    status = (ctypes.c_int * len(addresses))()
    if _call(2, 0, len(addresses), pages, None, status, 0):
        return {}
    return dict(sorted(collections.Counter(node for node in status if node >= 0).items()))


def nodes_of_file(fd: int, count: int) -> dict[int, int]:
    """`nodes_of` up to 64 pages of a file of `count` bytes, which are read."""
    with mmap.mmap(fd, count, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as memory:
        places = range(0, count, max(mmap.PAGESIZE, count // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE))
        view = np.frombuffer(memory, dtype=np.uint8)
        view[:: places.step].sum()
        start = view.ctypes.data
        del view
        return nodes_of([start + place for place in places])


def _call(which: int, *arguments: Any) -> int:
    """Make one of the system calls in `_CALLS`; returns the error's number or 0."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return 38  # ENOSYS
    longs = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return ctypes.get_errno() if _syscall(ctypes.c_long(numbers[which]), *longs) < 0 else 0
