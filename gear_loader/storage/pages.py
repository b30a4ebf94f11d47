"""Pages of a region's memory: where they are mapped, whether they are huge, and when they are allocated.

Huge pages are of 2 MiB, the system's transparent ones. A private region has them where the system allows MADV_HUGEPAGE.
Those of a named one belong to its file: a tmpfs mounted with ``huge=within_size`` or ``huge=always`` allocates them
itself, one with ``huge=advise`` where memory is first touched through an advised mapping. On any other tmpfs, Linux 6.1
and newer makes a huge page of the pages that are there (MADV_COLLAPSE). It copies them, so only the first of each 2 MiB
is allocated before: 2 GiB then take 0.30 s instead of 0.24 s in small pages (3.3 s if all were there), and are written
first in 0.22 s instead of 1.3 s or more. Files on a hugetlbfs consist of huge pages that the system has set aside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from gear_loader.errors import RegionError
from gear_loader.storage import shared_memory
from gear_loader.storage.layout import round_up
from gear_loader.utils.descriptors import open_descriptor
from gear_loader.utils.formatting import size

HugePages = bool | Literal["auto"]
HUGE_PAGE = 1 << 21
"""Bytes of a huge page, and the alignment of every region in memory."""
_POPULATE_WRITE, _COLLAPSE = (
    23,
    25,
)  # MADV_POPULATE_WRITE (Linux 5.14), MADV_COLLAPSE (6.1), missing in `mmap`
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PER_THREAD = 1 << 27  # bytes; fewer are not worth a thread
_MOST_THREADS = 8
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_RESERVED = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


# ---------------------------------------------------------------- mapping


def map_private(count: int) -> tuple[mmap.mmap, int]:
    """Map private memory of zeros; returns it, and the offset of its first `count` bytes that begin on a huge page.

    Raises:
        OSError, OverflowError, ValueError: the system refuses.
    """
    memory = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, -address_of(memory) % HUGE_PAGE


def map_file(fd: int, count: int, first: int = 0) -> tuple[mmap.mmap, int]:
    """Map `count` bytes of a file, shared, from `first` on, a multiple of its pages; returns as `map_private`.

    The file lies in the place of a part of private memory, because `mmap` takes no address. Closing that memory unmaps
    both. It holds no descriptor of the file.

    Raises:
        OSError, OverflowError, ValueError: the system refuses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, count + HUGE_PAGE, flags=flags)
    start = address_of(memory)
    offset = -start % HUGE_PAGE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    shared = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(start + offset, count, protection, shared, fd, first) != start + offset:
        code = ctypes.get_errno()
        memory.close()
        raise OSError(code, os.strerror(code))
    return memory, offset


def address_of(memory: mmap.mmap) -> int:
    """Address of the first byte of mapped memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ---------------------------------------------------------------- what the system allows


def huge_pages_of_memory() -> bool:
    """Whether private memory can have huge pages."""
    return _chosen("enabled") in ("always", "madvise")


def huge_pages_of_files() -> str:
    """How the directory of named tables gives huge pages to files.

    Returns:
        The mount option ``huge=`` of a tmpfs: ``"never"``, ``"advise"``, ``"within_size"`` or ``"always"``;
        ``"deny"`` or ``"force"`` if the system's ``shmem_enabled`` overrules it; ``"hugetlb"`` on a hugetlbfs;
        ``"never"`` for other file systems.
    """
    if shared_memory.filesystem() == "hugetlbfs":
        return "hugetlb"
    overruled = _chosen("shmem_enabled")
    if overruled in ("deny", "force"):
        return overruled
    options = shared_memory.mount_options() if shared_memory.filesystem() == "tmpfs" else []
    return next((each[5:] for each in options if each.startswith("huge=")), "never")


def file_bytes(count: int) -> int:
    """Size of the file of a named region of `count` bytes: whole pages of its file system.

    Raises:
        RegionError: the directory is on a hugetlbfs of pages other than 2 MiB.
    """
    if shared_memory.filesystem() != "hugetlbfs":
        return round_up(count, mmap.PAGESIZE)
    page = os.statvfs(shared_memory.DIRECTORY).f_bsize
    if page != HUGE_PAGE:
        raise RegionError(
            f"GEAR_LOADER_DIR is {shared_memory.DIRECTORY!r}, a hugetlbfs with pages of {size(page)}; expected pages "
            "of 2 MiB: mount -t hugetlbfs -o pagesize=2M none <directory>, as root."
        )
    return round_up(count, page)


def space_of_files() -> tuple[int, int]:
    """Bytes of the file system of named tables, and those that new files may take.

    Raises:
        OSError: the directory is not there.
    """
    info = os.statvfs(shared_memory.DIRECTORY)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    if shared_memory.filesystem() != "hugetlbfs":
        return total, free
    there, unused, reserved = (
        int((_RESERVED / name).read_text()) * HUGE_PAGE
        for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
    )
    # Mounted without size= it shows 0.
    return (min(total, there), min(free, unused - reserved)) if total else (there, unused - reserved)


def _chosen(setting: str) -> str:
    """The value in brackets of a setting such as ``always [madvise] never``."""
    with contextlib.suppress(OSError):
        for word in (_SETTINGS / setting).read_text().split():
            if word.startswith("["):
                return word.strip("[]")
    return ""


# ---------------------------------------------------------------- allocation


def prepare_private(memory: mmap.mmap, huge: HugePages) -> None:
    """Choose the pages of private memory, which the system allocates as they are written.

    Raises:
        RegionError: `huge` is True and the system has none.
    """
    if huge is True and not huge_pages_of_memory():
        raise RegionError(
            "huge_pages=True was given, but the system gives no huge pages to private memory. Allow them "
            f"(echo madvise > {_SETTINGS}/enabled, as root), or use huge_pages='auto'."
        )
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)


def prepare_file(fd: int, memory: mmap.mmap, offset: int, count: int, huge: HugePages) -> None:
    """Allocate the pages of a new file that `map_file` has mapped.

    Args:
        fd: the file, of `count` bytes. memory, offset: as returned by `map_file`.

    Raises:
        RegionError: `huge` is True and not all whole huge pages can be had.
        OSError: there is no space.
    """
    start = address_of(memory) + offset
    mode = huge_pages_of_files()
    if mode == "hugetlb":
        os.posix_fallocate(fd, 0, count)
        return
    huge = huge if count >= HUGE_PAGE else False
    if huge:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, offset, round_up(count, mmap.PAGESIZE))
        if mode == "advise":  # huge if touched through this mapping, but not if reserved by the call below
            populate(start, count)
        elif mode == "never" and shared_memory.filesystem() == "tmpfs":
            for first in range(0, count - HUGE_PAGE + 1, HUGE_PAGE):  # an empty one cannot be collapsed
                os.posix_fallocate(fd, first, mmap.PAGESIZE)
            collapse(start, count, whole=huge is True)
    os.posix_fallocate(fd, 0, count)
    if huge is not True:
        return
    missing, code = collapse(start, count)
    if missing and not (code == errno.EINVAL and mode in ("advise", "within_size", "always", "force")):
        why = (
            f"this system cannot make them (Linux 6.1 or newer can, unless {_SETTINGS}/shmem_enabled is 'deny')"
            if code == errno.EINVAL
            else f"the memory is too fragmented or too full ({os.strerror(code)})"
        )
        raise RegionError(
            f"huge_pages=True was given, but {size(missing)} of {size(count)} are not in huge pages: {why}. "
            f"mount -o remount,huge=advise {shared_memory.DIRECTORY} (as root) lets tables have them from their "
            "creation; or use huge_pages='auto'."
        )


def files_get_huge_pages() -> bool:
    """Whether named tables get huge pages on this machine: one is made, and thrown away."""
    try:
        with open_descriptor(shared_memory.DIRECTORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600) as file:
            os.ftruncate(file.fileno(), HUGE_PAGE)
            memory, offset = map_file(file.fileno(), HUGE_PAGE)
            with memory:
                prepare_file(file.fileno(), memory, offset, HUGE_PAGE, huge=True)
    except (OSError, RegionError):
        return False
    return True


def populate(start: int, count: int) -> bool:
    """Allocate all pages of mapped memory without a change of its contents, in several threads.

    Other threads and processes may read and write the memory meanwhile.

    Returns:
        Whether all are allocated. Linux before 5.14 cannot.
    """
    end = start + count
    return not _in_threads(start, end, lambda begin, stop: _advise(begin, stop - begin, _POPULATE_WRITE))


def collapse(start: int, count: int, *, whole: bool = True) -> tuple[int, int]:
    """Turn the whole huge pages' worth of mapped memory into huge pages, in several threads.

    Other threads and processes may read and write the memory meanwhile.

    Args:
        whole: go on after a page for which there is no memory; it may take the system milliseconds to know.

    Returns:
        Bytes that are not in huge pages, at least, and the last error's number or 0.
    """
    start, end = round_up(start, HUGE_PAGE), (start + count) // HUGE_PAGE * HUGE_PAGE
    missing: list[int] = []

    def work(begin: int, stop: int) -> int:
        code = _advise(begin, stop - begin, _COLLAPSE)
        if whole and code not in (0, errno.EINVAL):  # one page without memory ends the call: ask for each
            pages = range(begin, stop, HUGE_PAGE)
            missing.extend(page for page in pages if _advise(page, HUGE_PAGE, _COLLAPSE))
        elif code:
            missing.extend(range(begin, stop, HUGE_PAGE))
        return code

    code = _in_threads(start, end, work)
    return len(missing) * HUGE_PAGE, code if missing else 0


def _advise(start: int, count: int, advice: int) -> int:
    """Call madvise without the GIL; returns the error's number or 0."""
    return ctypes.get_errno() if _libc.madvise(start, count, advice) else 0


def _in_threads(start: int, end: int, work: Callable[[int, int], int]) -> int:
    """Call `work` for pieces of a range in several threads; returns an error's number that one returned, or 0."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), max(1, (end - start) // _PER_THREAD))
    piece = round_up(-(-(end - start) // threads), HUGE_PAGE)
    codes: list[int] = []
    started = [
        threading.Thread(
            target=lambda begin=begin: codes.append(work(begin, min(begin + piece, end))),
            name="gear-loader-pages",
            daemon=True,
        )
        for begin in range(start + piece, end, piece)
    ]
    for thread in started:
        thread.start()
    if start < end:
        codes.append(work(start, min(start + piece, end)))
    for thread in started:
        thread.join()
    return next(filter(None, codes), 0)
