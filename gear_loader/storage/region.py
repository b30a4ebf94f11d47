"""The mapped memory of a table: private, or shared under a name; pinned for a GPU on request."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
import weakref
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch

from gear_loader.errors import PrivateTableError, RegionError, TableClosedError
from gear_loader.storage import numa, pages, shared_memory
from gear_loader.storage.counters import BELL
from gear_loader.storage.device_memory import DeviceMemory
from gear_loader.storage.device_server import BlockClient, BlockServer
from gear_loader.storage.layout import HEADER_LIMIT, Layout, round_up
from gear_loader.storage.lock import IndexLock
from gear_loader.storage.pinning import Pinning, unregister
from gear_loader.storage.shared_memory import guarded, region_path
from gear_loader.utils import driver
from gear_loader.utils.descriptors import Descriptor, open_descriptor
from gear_loader.utils.mutex import uninterrupted
from gear_loader.utils.notices import notice

_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19  # MADV_WIPEONFORK and MADV_KEEPONFORK, missing in `mmap`
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_LOG_BYTES = 1 << 20
"""Largest memory behind a region that is kept for the next log."""
_ATTACH_TIMEOUT = 10.0  # seconds; removing or inspecting a region takes milliseconds


def _size(count: int) -> str:
    return f"{count:,} bytes ({count / 2**30:.2f} GiB)"


def _write_header(memory: mmap.mmap, offset: int, layout: Layout) -> None:
    """Write the header of a new region that begins at `offset` of mapped memory."""
    header = layout.preamble().ljust(64, b"\0") + layout.header[64:]
    memory[offset : offset + len(header)] = header


class _Mapping:
    """The memory of one region in this process, shared by all tables of this process that use it.

    One descriptor and one mapping per file, because closing a second descriptor would release the record lock; see
    `gear_loader.storage.lock`.
    """

    registry: ClassVar[dict[tuple[int, int], _Mapping]] = {}
    every: ClassVar[weakref.WeakSet[_Mapping]] = weakref.WeakSet()
    released: ClassVar[collections.deque[_Mapping | None]] = collections.deque()

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        name: str,
        file: Descriptor | None,
        key: tuple[int, int] | None,
    ) -> None:
        self.memory: mmap.mmap | None = memory
        self.offset = offset  # of the region in the memory
        self._file = file
        self.fd = fd = None if file is None else file.fileno()
        self.key = key
        self.users = 1
        self.left: weakref.ref[mmap.mmap] | None = (
            None  # the memory after its last user, while views of it exist
        )
        self.lock = IndexLock(name, fd)
        self.fill_lock = IndexLock(f"those who fill write-once columns of {name}", fd, place=1)
        self._log: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)  # see `Region.log`
        self._log_place = 0  # where it begins in the file
        self.pinned: bool | None = None  # False if CUDA refuses
        self.pinning: Pinning | None = None  # in progress; counts as a user, so that its memory stays mapped
        self.registered: list[int] = []
        self.devices: set[int] = set()  # GPUs whose kernels read it
        self.device_memory: DeviceMemory | None = None  # of the blocks, if this process has them on a GPU
        self.block_server: BlockServer | None = None  # of these, for other processes
        self.block_client: BlockClient | None = None  # if another process has them
        self.is_parents = False  # private memory that forked children do not receive
        self.is_lost = False  # such memory of the parent process
        self.every.add(self)

    @classmethod
    def make(
        cls,
        path: str,
        name: str,
        layout: Layout,
        huge: pages.HugePages,
        node: int | None,
        device_memory: DeviceMemory | None,
    ) -> _Mapping:
        """Create a file of zeros with its header, and link it to its name when complete: no partial file remains."""
        memory, count = None, pages.file_bytes(layout.region_bytes)
        file = open_descriptor(shared_memory.DIRECTORY, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        fd, server = file.fileno(), None
        try:
            os.ftruncate(fd, count)  # so that a tmpfs allocates huge pages within the file's size
            memory, offset = pages.map_file(fd, count)
            if node is not None:
                numa.prefer(node, pages.address_of(memory) + offset, count)
            pages.prepare_file(fd, memory, offset, count, huge)
            _write_header(memory, offset, layout)  # not by write(), which a hugetlbfs lacks
            fcntl.flock(fd, fcntl.LOCK_SH)  # marks it as used, see `gear_loader.storage.shared_memory`
            info = os.fstat(fd)
            mapping = cls(memory, offset, name, file, key := (info.st_dev, info.st_ino))
            if device_memory is not None:
                mapping.device_memory = device_memory
                mapping.block_server = server = BlockServer(device_memory, layout, key)
            with guarded():
                # /proc/self/fd holds symbolic links, which os.link() follows only if a directory is given. An absolute
                # path does not use the directory.
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
                mapping.remember()
            return mapping
        except BaseException:
            if server is not None:
                server.close()
            if memory is not None:
                memory.close()
            file.close()
            raise

    @classmethod
    def open(cls, path: str, name: str) -> tuple[_Mapping, Layout] | None:
        """Map the file at `path`, or reuse this process's mapping of it; None if the caller must back off and retry."""
        with guarded():
            info = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                raise RegionError(f"{name} is not a regular file. Choose another name or remove it.")
            mapping = cls.registry.get((info.st_dev, info.st_ino))
            if mapping is not None:
                memory = mapping.mapped()
                if memory is not None:
                    assert mapping.fd is not None
                    layout = Layout.read(os.pread(mapping.fd, HEADER_LIMIT, 0), info.st_size, name)
                    mapping.memory, mapping.left = memory, None
                    mapping.users += 1
                    return mapping, layout
                mapping.forget()
            file = open_descriptor(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            fd = file.fileno()
            try:
                if not shared_memory.hold(fd, path):
                    file.close()
                    return None
                info = os.fstat(fd)
                shared_memory.check_own(info, name)
                layout = Layout.read(os.pread(fd, HEADER_LIMIT, 0), info.st_size, name)
                memory, offset = pages.map_file(fd, pages.file_bytes(layout.region_bytes))
            except BaseException:
                file.close()
                raise
            # Another file may have replaced it since os.stat(), but not one that this process has mapped: this process
            # links its files under the guard.
            mapping = cls(memory, offset, name, file, (info.st_dev, info.st_ino))
            mapping.remember()
            return mapping, layout

    def remember(self) -> None:
        """Register the mapping; the caller holds the guard."""
        assert self.key is not None
        assert self.key not in self.registry
        assert self.fd is not None
        self.registry[self.key] = self
        shared_memory.descriptors[self.key] = self.fd

    def release(self) -> None:
        """Drop one user. The garbage collector may call it at any point, so it never waits."""
        self.released.append(self)
        self.sweep()

    @classmethod
    def sweep(cls) -> None:
        """Unmap memory without users, unless the guard is held: its holder then sweeps after releasing it."""
        while cls.released and shared_memory.guard.acquire(blocking=False):
            try:
                while cls.released:
                    mapping = cls.released.popleft()
                    if mapping is not None:
                        mapping.users -= 1
                        if not mapping.users:
                            mapping.unmap()
                        elif mapping.users == 1 and mapping.pinning is not None:
                            mapping.pinning.stop()  # it is the last user, and releases the mapping as it ends
                for mapping in list(cls.registry.values()):
                    if mapping.mapped() is None:
                        mapping.forget()
            finally:
                shared_memory.guard.release()

    def unmap(self) -> None:
        """Unregister and unmap memory without users; the caller holds the guard."""
        if self.devices:
            for device in sorted(self.devices):
                torch.cuda.synchronize(device)  # kernels may still be reading
            with torch.cuda.device(min(self.devices)):
                unregister(self.registered)
            self.devices.clear()
        for each in (self.block_server, self.block_client):
            if each is not None:
                each.close()
        self.block_server = self.block_client = None
        if self.device_memory is not None and not self.is_lost:
            torch.cuda.synchronize(self.device_memory.device)
            self.device_memory = None
        self.pinned = None
        self.lock.hear(None)
        memory, self.memory = self.memory, None
        assert memory is not None
        if self.is_lost:
            _lost.append(memory)  # not unmapped: its addresses may be in use for other memory here
            return
        try:
            memory.close()
        except BufferError:  # a view exists; the memory is unmapped with the last view
            # The file stays registered and is not mapped a second time until then.
            if self.key is not None:
                self.left = weakref.ref(memory, self.on_unmapped)
            return
        self.forget()

    def mapped(self) -> mmap.mmap | None:
        """The memory while users or views of it exist, else None."""
        return self.left() if self.left is not None else self.memory

    @classmethod
    def on_unmapped(cls, _: weakref.ref[mmap.mmap]) -> None:
        cls.released.append(None)
        cls.sweep()

    def forget(self) -> None:
        """Unregister an unmapped file and close its descriptor; the caller holds the guard."""
        self.left = None
        if self.key is not None:
            self.registry.pop(self.key, None)
            shared_memory.descriptors.pop(self.key, None)
        if self._file is not None:
            self._file.close()
            self._file = self.fd = None

    def log(self, region_bytes: int, count: int) -> np.ndarray[Any, Any]:
        """`Region.log`."""
        if self.fd is None:
            if len(self._log) < count:
                self._log = np.empty(count, dtype=np.uint8)
            return self._log
        if len(self._log) < count:
            self._log_place = pages.file_bytes(region_bytes)
            size = pages.file_bytes(max(count, _LOG_BYTES // 4))
            memory, offset = pages.map_file(self.fd, size, self._log_place)
            self._log = np.frombuffer(memory, dtype=np.uint8, count=size, offset=offset)
        if os.fstat(self.fd).st_size < self._log_place + len(self._log):  # else another process has made it
            os.posix_fallocate(self.fd, self._log_place, len(self._log))
        return self._log

    def trim_log(self) -> None:
        """`Region.trim_log`."""
        if len(self._log) > _LOG_BYTES:
            self._log = np.empty(0, dtype=np.uint8)
            if self.fd is not None:
                os.ftruncate(self.fd, self._log_place)

    def pin(self, base: int, total: int, device: int) -> None:
        """Begin to register the memory with CUDA in a thread; the caller holds the guard."""
        self.keep_from_children()
        try:
            self.pinning = Pinning(base, total, device, lambda pinned: self.on_pinned(pinned, device))
            self.users += 1
            self.pinning.start()
        except BaseException:
            self.users -= self.pinning is not None
            self.pinning = None
            self.keep_from_children(undo=True)
            raise

    def on_pinned(self, pinned: bool | None, device: int) -> None:
        assert self.pinning is not None
        if pinned:
            self.registered = self.pinning.registered
            self.devices.add(device)
        if not self.registered:
            self.keep_from_children(undo=True)
        self.pinned, self.pinning = pinned, None
        self.release()

    def keep_from_children(self, *, undo: bool = False) -> None:
        """Exclude private memory from forks, or include it again.

        Otherwise the kernel copies pinned private pages into each child, or a parent that writes to a page shared with
        a child writes to a copy that the GPU does not read.
        """
        if self.fd is not None or self.memory is None:  # a fork does not copy shared memory
            return
        self.is_parents = True
        undo = undo and self.device_memory is None
        wipe, drop = (_KEEP_ON_FORK, mmap.MADV_DOFORK) if undo else (_WIPE_ON_FORK, mmap.MADV_DONTFORK)
        try:
            self.memory.madvise(wipe)
        except OSError:  # an older kernel
            with contextlib.suppress(OSError):
                self.memory.madvise(drop)
        self.is_parents = not undo  # last, for a fork in between

    @classmethod
    def after_fork(cls) -> None:
        for mapping in list(cls.every):
            mapping.is_lost |= mapping.is_parents and mapping.memory is not None
            # A child does not inherit registrations with CUDA.
            mapping.pinned, mapping.registered, mapping.devices = None, [], set()
            if mapping.block_server is not None:  # of the parent, which is asked for blocks from now on
                mapping.block_server.leave()
                _left.append((mapping.block_server, mapping.device_memory))  # neither is freed here
                mapping.block_server = mapping.device_memory = None
            if mapping.pinning is not None:  # the thread, which is a user, is the parent's
                mapping.pinning = None
                mapping.released.append(mapping)


_lost: list[mmap.mmap] = []
_left: list[Any] = []
os.register_at_fork(after_in_child=_Mapping.after_fork)
shared_memory.afterwards.append(_Mapping.sweep)


class Region:
    """A mapping of a layout's bytes, with the lock of its index.

    Created by `create` or `attach`.

    Attributes:
        bytes: uint8 [region bytes], view of the whole region; None after `close`.
    """

    def __init__(self, mapping: _Mapping, layout: Layout, name: str | None) -> None:
        self.layout = layout
        self.name = name
        self.lock = mapping.lock
        self.fill_lock = mapping.fill_lock
        assert mapping.memory is not None
        self.bytes: np.ndarray[Any, Any] | None = np.frombuffer(
            mapping.memory, dtype=np.uint8, count=layout.region_bytes, offset=mapping.offset
        )
        self._mapping = mapping
        if mapping.fd is not None:
            self.lock.hear(self.array("counters")[BELL:].ctypes.data)
        self._release = weakref.finalize(self, mapping.release)
        self._release.atexit = False

    # ---------------------------------------------------------------- create, attach, remove

    @classmethod
    def create(
        cls,
        layout: Layout,
        name: str | None,
        *,
        huge_pages: pages.HugePages = "auto",
        node: int | None = None,
        device: torch.device | None = None,
    ) -> Region:
        """Map a new region of zeros and write its header.

        A named region gets its name when it is complete. Its memory is reserved at once, so that a full `/dev/shm` is
        an error here and not a crash later.

        Args:
            layout: places of the index and the columns.
            name: name of the region, or None.
            huge_pages: as for `Table.create`.
            node: NUMA node whose memory is preferred, or None.
            device: GPU on which the blocks lie, with its index; None: they lie in the region.

        Raises:
            RegionError: the name is taken, there is not enough memory, huge pages were asked for and cannot be had, or
                $GEAR_LOADER_DIR cannot hold tables.
        """
        if name is None:
            device_memory = None if device is None else DeviceMemory(layout, device)
            try:
                memory, offset = pages.map_private(layout.region_bytes)
            except (OSError, OverflowError, ValueError) as error:
                raise RegionError(
                    f"A table of {_size(layout.region_bytes)} cannot be mapped ({error}). "
                    "Lower max_steps, max_trajectories or max_blocks."
                ) from error
            pages.prepare_private(memory, huge_pages)
            if node is not None:
                numa.prefer(node, pages.address_of(memory) + offset, layout.region_bytes)
            _write_header(memory, offset, layout)
            mapping = _Mapping(memory, offset, "a private table", None, None)
            if device_memory is not None:
                mapping.device_memory = device_memory
                mapping.keep_from_children()
            return cls(mapping, layout, None)._with_host_part()

        path = region_path(name)
        if os.path.lexists(path):
            raise RegionError(_exists(name))
        if layout.region_bytes > pages.space_of_files()[1]:
            raise RegionError(_too_large(layout.region_bytes))
        device_memory = None if device is None else DeviceMemory(layout, device)
        try:
            given = f"Table {name!r} ({path})", layout, huge_pages, node, device_memory
            mapping = _Mapping.make(path, *given)
        except FileExistsError as error:
            raise RegionError(_exists(name)) from error
        except RegionError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise RegionError(_too_large(layout.region_bytes)) from error
            raise RegionError(
                f"Table {name!r} cannot be made in {shared_memory.DIRECTORY}: {error}."
            ) from error
        # "unknown": /proc cannot be read, as by a process with no file descriptors left
        if (kind := shared_memory.filesystem()) not in (*_MEMORY_FILESYSTEMS, "unknown"):
            notice(
                "directory",
                f"Named tables lie in {shared_memory.DIRECTORY}, which is {kind} and not tmpfs: the system also writes "
                "them to its storage, which is slow. Let GEAR_LOADER_DIR name a directory on a tmpfs.",
            )
        return cls(mapping, layout, name)._with_host_part()

    def _with_host_part(self) -> Region:
        """This new region, whose host part is pinned if it has one; else RegionError, and it is gone."""
        memory, pinned = self.device_memory, True
        if self.layout.host_blocks:
            assert memory is not None
            try:
                pinned = self.pin(memory.device) and self.is_pinned
            except BaseException:
                pinned = False
                raise
            finally:
                if not pinned:
                    self._discard()
        if not pinned:
            raise RegionError(
                f"The host part of a table in the memory of {self.layout.device} cannot be pinned, so kernels do not "
                "write there; `gear-loader doctor` says why. Leave host out: a Disk with a size can be below the GPU."
            )
        return self

    def _discard(self) -> None:
        if self.name is not None:
            self.unlink()
        self.close()

    @classmethod
    def attach(cls, name: str) -> Region:
        """Map an existing region.

        Raises:
            RegionError: no region has that name, the file is not a table of this version, it belongs to another user
                or others may write to it, or another process keeps it locked.
        """
        path = region_path(name)
        deadline = time.monotonic() + _ATTACH_TIMEOUT
        try:
            while (opened := _Mapping.open(path, f"Table {name!r} ({path})")) is None:
                if time.monotonic() > deadline:
                    raise RegionError(
                        f"Table {name!r} has been locked for over {_ATTACH_TIMEOUT:g} s, perhaps by a process that is "
                        f"removing it. That process may be stopped; `fuser {path}` names it."
                    )
                time.sleep(1e-3)
        except FileNotFoundError as error:
            raise RegionError(
                f"There is no table named {name!r}; tables on this machine: {shared_memory.region_names() or 'none'}. "
                f"Create it with Table.create(..., name={name!r})."
            ) from error
        except RegionError:
            raise
        except OSError as error:
            raise RegionError(f"Table {name!r} cannot be attached: {error}.") from error
        return cls(*opened, name)

    def unlink(self) -> None:
        """Remove a region's name. Its memory is freed when the last process unmaps it.

        Raises:
            RegionError: the region has been removed already; another one may have its name.
        """
        assert self.name is not None
        path = region_path(self.name)
        try:
            info = os.stat(path, follow_symlinks=False)
            if (info.st_dev, info.st_ino) != self._mapping.key:
                raise RegionError(
                    f"Table {self.name!r} has been removed already; the one that has its name now is another. "
                    f"Table.attach({self.name!r}).unlink() removes that."
                )
            os.unlink(path)
        except FileNotFoundError as error:
            raise RegionError(f"There is no table named {self.name!r} to remove.") from error

    # ---------------------------------------------------------------- views

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """The index array `name` as a numpy view."""
        offset, dtype, shape = self.layout.arrays[name]
        count = int(np.prod(shape))
        return self._view()[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)

    def blocks(self, name: str) -> torch.Tensor:
        """The blocks that hold column `name`, perhaps with others: uint8 ``[blocks, block_stride]``, where they lie."""
        if (memory := self.device_memory) is not None:
            self._view()
            return memory.blocks(name)
        return torch.from_numpy(self._host_blocks(name))

    def host_blocks(self, name: str) -> torch.Tensor:
        """`blocks` of the host part of a table on a GPU: those before the GPU's, in numbers, too."""
        return torch.from_numpy(self._host_blocks(name))

    def _host_blocks(self, name: str) -> np.ndarray[Any, Any]:
        layout = self.layout
        assert layout.device is None or layout.host_blocks
        column = layout.columns[name]
        count = (layout.host_blocks or layout.num_blocks) * column.block_stride
        return self._view()[column.base : column.base + count].reshape(-1, column.block_stride)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """The steps of column `name`, uint8 ``[blocks, block_steps, step_bytes]``; of a column per trajectory one."""
        column = self.layout.columns[name]
        count = 1 if self.layout.schema[name].trajectory else self.layout.block_steps
        steps = self._host_blocks(name)[:, : count * column.step_stride].reshape(
            -1, count, column.step_stride
        )
        return steps[:, :, column.inside : column.inside + column.step_bytes]

    def payload(self) -> np.ndarray[Any, Any]:
        """The values of ragged columns, int64 [n]; see `gear_loader.storage.operations.extents`."""
        first = self.layout.payload_offset
        return self._view()[first : first + self.layout.payload].view(np.int64)

    def column_place(self, name: str) -> np.ndarray[Any, Any]:
        """Where column `name` lies, int64 [5], as `gear_loader.native.copying.copy_rows` takes it: address of its first
        step, bytes from block to block, of a step, and from step to step in a block, and steps of a block.

        The address is 0 if the blocks lie on a GPU: no loop of the CPU takes it. With a host part it is there."""
        place = self.layout.columns[name]
        sizes = place.block_stride, place.step_bytes, place.step_stride, self.layout.block_steps
        first = 0
        if self.layout.device is None or self.layout.host_blocks:
            first = self.column(name).ctypes.data
        return np.array([first, *sizes], dtype=np.int64)

    def _view(self) -> np.ndarray[Any, Any]:
        view = self.bytes  # read once: another thread may close the region
        if view is None or self._mapping.is_lost:
            raise self.absence()
        return view

    @property
    def device_memory(self) -> DeviceMemory | None:
        """Where the blocks lie, if this process has them in the memory of a GPU; None also after `close`."""
        return None if self.bytes is None else self._mapping.device_memory

    def block_client(self) -> BlockClient:
        """What reads the blocks, if another process has them in the memory of a GPU."""
        mapping = self._mapping
        assert mapping.key is not None
        if mapping.block_client is None:
            mapping.block_client = BlockClient(self.layout, mapping.key, str(self.name))
        return mapping.block_client

    @property
    def is_lost(self) -> bool:
        """Whether it is a private region that the parent process had pinned before the fork."""
        return self._mapping.is_lost

    def absence(self) -> TableClosedError | PrivateTableError:
        """The error for a region that is closed or lost in a fork."""
        if self.is_lost:
            return PrivateTableError(
                f"This process ({os.getpid()}) was forked from one that had pinned this private table for a GPU, and "
                "has no copy of it. Create the table with a name, Table.create(..., name='replay'), which forked "
                "processes share; or fork before the first batch is drawn for a GPU."
            )
        return TableClosedError(f"The table {self.name or '(private)'} is closed; attach or create it again.")

    # ---------------------------------------------------------------- beyond the region

    def log(self, count: int) -> np.ndarray[Any, Any]:
        """Memory of `count` bytes or more behind the region, uint8, for `gear_loader.storage.edit_log`.

        The same for all processes, until `trim_log`. The caller holds the lock.

        Raises:
            RegionError: there is no room for it.
        """
        try:
            return self._mapping.log(self.layout.region_bytes, count)
        except OSError as error:
            raise RegionError(
                f"{_size(count)} are needed for values that are overwritten ({error}). Nothing was changed. Overwrite "
                f"fewer steps in a row, or enlarge {shared_memory.DIRECTORY}."
            ) from error

    def trim_log(self) -> None:
        """Free the memory of a large log; the caller holds the lock."""
        self._mapping.trim_log()

    # ---------------------------------------------------------------- pinning

    @property
    def is_pinned(self) -> bool:
        """Whether this process has registered the region with CUDA."""
        return bool(self._mapping.registered)

    @property
    def is_pinning(self) -> bool:
        """Whether a thread of this process is registering the region with CUDA."""
        return self._mapping.pinning is not None

    def pin(self, device: torch.device | None = None, *, wait: bool = True) -> bool:
        """Register the region with CUDA in this process, so that kernels can read it; idempotent. A GPU that reads host
        memory as it is needs no registration.

        A thread does it, which allocates and locks every page. The region can be read and written meanwhile, and
        closed: the thread then unregisters and unmaps it. Does not wait for the GPU. Forked processes do not receive a
        private region whose pinning has begun: there every use of it raises PrivateTableError.

        Args:
            device: GPU whose kernels read the region; by default the current one.
            wait: wait for the thread, with a progress bar where there is a terminal.

        Returns:
            Whether it is pinned. False without a GPU, or if CUDA refuses; a notice gives the reason. Without `wait`
            also False while the thread is at work. False for another GPU than that on which the blocks lie.

        Raises:
            GpuError: no progress for two minutes.
        """
        mapping = self._mapping
        if mapping.pinned is False:
            return False
        if not torch.cuda.is_available():
            notice(
                "pin",
                "No CUDA device: tables lie in plain host memory and batches are gathered on the CPU.",
            )
            return False
        if torch.version.hip:
            notice(
                "pin",
                f"This is PyTorch for ROCm ({torch.version.hip}): batches are gathered on the CPU and copied to the "
                "GPU. The kernels that would read the table there have run on GPUs of NVIDIA only.",
            )
            return False
        index = None if device is None else device.index
        index = torch.cuda.current_device() if index is None else index
        if self.layout.device is not None:
            has_blocks = mapping.device_memory is not None
            if not has_blocks or index != torch.device(self.layout.device).index:
                return False
        if index in mapping.devices:
            return True
        base, total = self._view().ctypes.data, round_up(self.layout.region_bytes, mmap.PAGESIZE)
        while mapping.pinned is None:
            with guarded():
                if mapping.pinned is None and mapping.pinning is None:
                    with torch.cuda.device(index):
                        torch.cuda.init()
                    uninterrupted(lambda: mapping.pin(base, total, index))
                pinning = mapping.pinning
            if not wait:
                break
            if pinning is not None:
                pinning.wait()
        if not mapping.pinned or not (mapping.registered or driver.reads_pageable_memory(index)):
            return index in mapping.devices
        with guarded():
            mapping.devices.add(index)
        return True

    def using(self) -> contextlib.AbstractContextManager[Any]:
        """Keep the memory mapped, and registered with CUDA, until the block ends, whoever closes the table meanwhile.

        For work of a GPU that the block queues: unmapping waits for it. Gives the memory of blocks on a GPU.

        Raises:
            TableClosedError, PrivateTableError: the region is closed, or lost in a fork.
        """
        return _Using(self, self._mapping)

    @property
    def pinned_bounds(self) -> list[int]:
        """Addresses at which one registration with CUDA ends and the next begins, ascending.

        Kernels may read across them; a copy by the driver must not span two registrations.
        """
        return sorted(self._mapping.registered)[1:]

    def close(self) -> None:
        """Release the region; its last user in this process unregisters and unmaps it. Idempotent."""
        self.bytes = None
        self._release()


class _Using:
    """One more user of a region's mapping; see `Region.using`.

    A class, because generators cost more than the rest. What an exception interrupts ends with its last reference.
    """

    __slots__ = ("_mapping", "_region", "_taken")

    def __init__(self, region: Region, mapping: _Mapping) -> None:
        self._region, self._mapping, self._taken = region, mapping, False

    def __enter__(self) -> Any:
        mapping, region = self._mapping, self._region
        try:
            with shared_memory.guard:
                if region.bytes is None or mapping.is_lost:
                    raise region.absence()
                mapping.users += 1
                self._taken = True
        finally:
            if mapping.released:  # meanwhile, by the garbage collector
                mapping.sweep()
        return mapping.device_memory

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        mapping = self._mapping
        with shared_memory.guard:
            if (
                self._taken and mapping.users > 1 and mapping.pinning is None
            ):  # others use it, and nothing ends
                self._taken = False
                mapping.users -= 1
        if self._taken:
            self._give_back()
        elif mapping.released:  # meanwhile, by the garbage collector
            mapping.sweep()

    def __del__(self) -> None:
        if self._taken:
            self._give_back()

    def _give_back(self) -> None:
        if self._taken:
            self._taken = False
            self._mapping.release()


def _exists(name: str) -> str:
    return (
        f"There is already a table named {name!r}. Use it with Table.attach({name!r}), remove it with "
        f"Table.attach({name!r}).unlink(), or choose another name."
    )


def _too_large(count: int) -> str:
    enlarge = f"(in Docker: --shm-size; else: mount -o remount,size=... {shared_memory.DIRECTORY})"
    if pages.huge_pages_of_files() == "hugetlb":
        enlarge = "(sysctl vm.nr_hugepages=..., as root)"
    return (
        f"A named table of {_size(count)} does not fit into {shared_memory.DIRECTORY}, which has "
        f"{_size(pages.space_of_files()[1])} free. Lower max_steps, max_trajectories or max_blocks, remove tables that "
        f"are no longer used (`gear-loader ls` and `gear-loader rm`), or enlarge it {enlarge}, or let GEAR_LOADER_DIR "
        "name a directory on a larger tmpfs."
    )
