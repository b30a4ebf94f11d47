"""UCX from Python: `ucxx`, or `ucp` (ucx-py) where only that is installed, behind one set of calls.

Both give a worker, whose address another process needs to make an endpoint, and messages that a 64-bit tag matches.
The worker belongs to the event loop in which it was made. UCX asks its environment first: what the user has set as
UCX_NET_DEVICES or UCX_TLS counts, also against what is asked for here.

**ucxx.** Its asyncio layer waits for a message by asking again and again whether it has come, which takes a whole core
as long as a receive is open: 2.0 s of processor time in 2 s of waiting. So the worker is driven here, as UCX means it
to be: progress until there is nothing left to do, arm, sleep until its descriptor wakes the loop; 0.5 ms for the same
wait, at the same speed. That takes `ucxx._lib.libucxx`, the layer below its asyncio one; 0.52 has been used.

**ucx-py.** Written after the documentation of 0.45, the last one, and tested against a module with its signatures; it
has not been run against the real library. It has one context in a process: whatever came first decides its devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar

from gear_loader.errors import TransportError

__all__ = [
    "Library",
    "UcxPy",
    "Ucxx",
    "available",
    "before_another_ucx",
    "library_in_loop",
    "speaking_softly",
]

_environment = threading.RLock()
_LOOKS = 100  # before a worker goes to sleep while something is expected
_QUIET = ("UCX_LOG_FILE", "UCX_WARN_UNUSED_ENV_VARS")  # what `speaking_softly` sets
_SOUND = (1, 22)  # the first UCX that closes an endpoint without a registration cache and does not crash


class Library:
    """What a channel needs of UCX; one worker of one event loop.

    Attributes:
        name: the library with its version.
        loopback: whether UCX was told to keep to the loopback device.
    """

    name: str
    loopback: bool

    def __init__(self, *, loopback: bool) -> None:
        raise NotImplementedError

    @classmethod
    def title(cls) -> str:
        """The library with its version; loads it."""
        raise NotImplementedError

    @classmethod
    def ucx_version(cls) -> tuple[int, ...]:
        """The version of UCX itself; loads it."""
        raise NotImplementedError

    def address(self) -> bytes:
        """The worker's address, for `endpoint` in another process."""
        raise NotImplementedError

    async def endpoint(self, address: bytes) -> Any:
        """An endpoint to the worker that has this address. Errors show when it is used."""
        raise NotImplementedError

    async def send(self, endpoint: Any, buffer: Any, tag: int) -> None:
        """Send one message; the buffer may be written again when this returns."""
        raise NotImplementedError

    async def recv(self, endpoint: Any, buffer: Any, tag: int) -> None:
        """Receive one message into all of the buffer."""
        raise NotImplementedError

    def abort(self, endpoint: Any) -> None:
        """Close at once: what is in progress fails."""
        raise NotImplementedError


class Ucxx(Library):
    """A worker of ucxx that sleeps while there is nothing to do."""

    # By process, loopback and the user's settings. They are kept: when another UCX has begun in the process, as NIXL's,
    # its memory hooks take the place of this one's, and a new context has no registration cache.
    _contexts: ClassVar[dict[tuple[Any, ...], Any]] = {}

    @classmethod
    def context(cls, loopback: bool) -> Any:
        """The UCX context of this process, made by the first call."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        for name in _QUIET:
            settings.pop(name, None)
        key = os.getpid(), loopback, frozenset(settings.items())
        if key not in cls._contexts:
            api = importlib.import_module("ucxx._lib.libucxx")
            cls._contexts[key] = api.UCXContext(_options(loopback, cls.ucx_version()))
        return cls._contexts[key]

    @classmethod
    def title(cls) -> str:
        with speaking_softly():
            return f"ucxx-{importlib.import_module('ucxx').__version__}"

    @classmethod
    def ucx_version(cls) -> tuple[int, ...]:
        return tuple(importlib.import_module("ucxx").get_ucx_version())

    def __init__(self, *, loopback: bool) -> None:
        self.name = self.title()
        try:
            self._api = importlib.import_module("ucxx._lib.libucxx")
            self._array = importlib.import_module("ucxx._lib.arr").Array
            types = importlib.import_module("ucxx.types")
            self._tag, self._full = types.Tag, types.TagMaskFull
            self._context = self.context(loopback)
            self._worker = self._api.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            self._worker.init_blocking_progress_mode()
            descriptor = self._worker.epoll_file_descriptor
        except (AttributeError, ImportError, TypeError) as error:
            raise TransportError(
                f"{self.title()} has not the calls that are needed ({error}). Version 0.52 has: "
                "pip install 'ucxx-cu12==0.52.*'."
            ) from error
        self.loopback = loopback
        # What UCX may still write into or read from: requests that are not complete, with their buffers.
        self._pending: dict[Any, tuple[asyncio.Future[None], Any]] = {}
        self._soon = False
        asyncio.get_running_loop().add_reader(descriptor, self._wake)

    def address(self) -> bytes:
        return memoryview(self._worker.address).tobytes()

    async def endpoint(self, address: bytes) -> Any:
        remote = self._api.UCXAddress.create_from_buffer(address)
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, remote, True)

    async def send(self, endpoint: Any, buffer: Any, tag: int) -> None:
        await self._finish(endpoint.tag_send(self._array(buffer), self._tag(tag)), buffer)

    async def recv(self, endpoint: Any, buffer: Any, tag: int) -> None:
        await self._finish(endpoint.tag_recv(self._array(buffer), self._tag(tag), self._full), buffer)

    def abort(self, endpoint: Any) -> None:
        endpoint.close_blocking(period=10**8, max_attempts=1)  # nanoseconds
        endpoint.remove_close_callback()
        self._settle()

    async def _finish(self, request: Any, buffer: Any) -> None:
        if not request.completed:
            self._worker.progress()
        if not request.completed:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._pending[request] = done, buffer
            self._wake_soon()
            await done
        request.check_error()

    def _wake_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        """Do what there is to do, until the worker can be armed: then its descriptor wakes the loop again.

        A message comes in fragments. To sleep between two of them costs more than to look again: 1 MiB in shared memory
        takes 0.11 ms so, and 0.36 ms otherwise; 8 MiB with both sides on one core 1.6 ms and 9 ms (2 cores).
        """
        self._soon = False
        looks = _LOOKS
        while True:
            if self._worker.progress_once():
                looks = _LOOKS
            if self._settle():
                self._wake_soon()  # those who waited first
                return
            if looks and self._pending:
                looks -= 1
                os.sched_yield()  # the other side may be on the same core
            elif self._worker.arm():
                return

    def _settle(self) -> bool:
        """Tell those whose requests are complete; whether there were any."""
        complete = [request for request in self._pending if request.completed]
        for request in complete:
            done, _ = self._pending.pop(request)
            if not done.done():
                done.set_result(None)
        return bool(complete)


class UcxPy(Library):
    """ucx-py in blocking progress mode."""

    _started_with: tuple[int, bool] | None = None  # process, loopback

    @classmethod
    def title(cls) -> str:
        with speaking_softly():
            return f"ucx-py-{importlib.import_module('ucp').__version__}"

    @classmethod
    def ucx_version(cls) -> tuple[int, ...]:
        return tuple(importlib.import_module("ucp").get_ucx_version())

    def __init__(self, *, loopback: bool) -> None:
        self.name = self.title()
        self._ucp = importlib.import_module("ucp")
        started = UcxPy._started_with
        if started is None or started[0] != os.getpid():
            try:
                self._ucp.init(
                    options=_options(loopback, self.ucx_version()),
                    env_takes_precedence=False,  # `_options` leaves out what the environment may decide
                    blocking_progress_mode=True,
                )
            except RuntimeError as error:
                raise TransportError(
                    f"ucx-py has been started in this process already ({error}), with settings of somebody else. "
                    "Let Gear Loader start it, or use ucxx, which knows several contexts: "
                    "pip install '.[ucx]' (in a clone of Gear Loader)."
                ) from error
            UcxPy._started_with = os.getpid(), loopback
        elif started[1] != loopback and "UCX_NET_DEVICES" not in os.environ:
            raise TransportError(
                f"ucx-py runs in this process with {'the loopback device only' if started[1] else 'all devices'}, and "
                f"{'others are' if started[1] else 'only that is'} wanted now; it has one context in a process. Set "
                "UCX_NET_DEVICES before the first connection, or use ucxx: pip install '.[ucx]' (in a clone of Gear "
                "Loader)."
            )
        self.loopback = loopback
        self._kept: set[asyncio.Task[Any]] = set()

    def address(self) -> bytes:
        return memoryview(self._ucp.get_worker_address()).tobytes()

    async def endpoint(self, address: bytes) -> Any:
        remote = self._ucp.get_ucx_address_from_buffer(address)
        return await self._ucp.create_endpoint_from_worker_address(remote, endpoint_error_handling=True)

    async def send(self, endpoint: Any, buffer: Any, tag: int) -> None:
        await self._finish(endpoint.send(buffer, tag=tag, force_tag=True))

    async def recv(self, endpoint: Any, buffer: Any, tag: int) -> None:
        await self._finish(endpoint.recv(buffer, tag=tag, force_tag=True))

    def abort(self, endpoint: Any) -> None:
        endpoint.abort()

    async def _finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for it. If that is cancelled it goes on, and holds its buffer, until the endpoint is closed."""
        task = asyncio.ensure_future(work)
        self._kept.add(task)
        task.add_done_callback(self._done)
        await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._kept.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: nobody may be waiting any more


@contextlib.contextmanager
def speaking_softly(**more: str) -> Iterator[None]:
    """While UCX is loaded and started, and looks up such things: its log goes to standard error, not to the output.

    It does not warn of variables that it does not know either, unless the user has set some: ucxx sets one.

    Args:
        more: other variables to be set meanwhile, unless the user has.
    """
    variables = {"UCX_LOG_FILE": "stderr", **more}
    if not any(name.startswith("UCX_") and name != "UCX_NET_DEVICES" for name in os.environ):
        variables["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    with _environment:
        ours = {name: value for name, value in variables.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name in ours:
                os.environ.pop(name, None)


def _options(loopback: bool, version: tuple[int, ...]) -> dict[str, str]:
    """What UCX of this version is to do. The user's environment comes first, but for what would end the process."""
    # Where UCX is to notice that the other side has died it leaves shared memory aside, unless told otherwise. Here the
    # connection's stream notices.
    options = {"POSIX_ERROR_HANDLING": "y", **({"NET_DEVICES": "lo"} if loopback else {})}
    found = {key: value for key, value in options.items() if f"UCX_{key}" not in os.environ}
    if version < _SOUND:
        # Started without a registration cache, such a UCX ends the process by SIGSEGV when an endpoint is closed while
        # a large message to a peer that has stopped is under way (openucx/ucx#11467). By default it does start without
        # one where its memory hooks do not work; so it refuses to start.
        found["RCACHE_ENABLE"] = "y"
    return found


def before_another_ucx() -> None:
    """Make ucxx's contexts if it is loaded, before another library starts a UCX of its own in this process.

    Afterwards it could not be started any more. (Where it is loaded later, it can.)
    """
    if "ucxx" not in sys.modules:
        return
    with speaking_softly(), contextlib.suppress(Exception):  # who needs a context asks for it again
        for loopback in (True, False):
            Ucxx.context(loopback)


def available() -> type[Library]:
    """The library that is used here: ucxx before ucx-py.

    Raises:
        ImportError: neither is installed.
    """
    if importlib.util.find_spec("ucxx") is not None:
        return Ucxx
    if importlib.util.find_spec("ucp") is not None:
        return UcxPy
    raise ImportError("neither ucxx nor ucp (ucx-py) is installed")


_in_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, Library]] = (
    weakref.WeakKeyDictionary()
)
_process = os.getpid()


def library_in_loop(kind: type[Library], *, loopback: bool) -> Library:
    """The worker of the running event loop, made by the first call.

    Args:
        loopback: keep UCX's own sockets to the loopback device, unless the user has set UCX_NET_DEVICES.

    Raises:
        TransportError: the process has been forked since the first call; UCX will not start.
    """
    global _process
    if os.getpid() != _process:
        if _in_loops:
            raise TransportError(
                f"UCX was started in process {_process}, of which this one, {os.getpid()}, is a fork; it cannot be "
                "used here. Start processes by spawning: multiprocessing.get_context('spawn')."
            )
        _process = os.getpid()
    workers = _in_loops.setdefault(asyncio.get_running_loop(), {})
    if loopback not in workers:
        try:
            with speaking_softly():
                workers[loopback] = kind(loopback=loopback)
        except (ImportError, TransportError):
            raise
        except Exception as error:
            raise TransportError(f"UCX cannot start: {error}. {_remedy(kind.ucx_version())}") from error
    return workers[loopback]


def _remedy(version: tuple[int, ...]) -> str:
    """What to do about a UCX that does not start."""
    text = (
        "`gear-loader doctor` shows what it finds; UCX_TLS and UCX_NET_DEVICES may name what is not there, and "
        "transport='socket' does without UCX."
    )
    if version < _SOUND:
        text += (
            f" UCX {'.'.join(map(str, version))} is not started without its registration cache, because it could end "
            "the process later; it has none if UCX_MEM_EVENTS or UCX_MEM_MMAP_HOOK_MODE turn its memory hooks off "
            f"(unset them), or if another library's hooks are in the way. UCX {'.'.join(map(str, _SOUND))} needs no "
            "cache."
        )
    return text
