"""UCX from Python: `ucxx`, or `ucp` (ucx-py) where only that is installed, behind one set of calls.

Both provide a worker, whose address another process needs to create an endpoint, and messages matched by a 64-bit tag.
The worker belongs to the event loop that created it. Environment variables of the user, such as UCX_NET_DEVICES and
UCX_TLS, take precedence over the options given here.

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
import gc
import importlib
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar

from gear_loader.errors import TransportError

_environment = threading.RLock()
_LOOKS = 100  # polls without progress before a worker sleeps while a request is pending
_QUIET = ("UCX_LOG_FILE", "UCX_WARN_UNUSED_ENV_VARS")  # variables that `quiet_environment` sets
_SOUND = (1, 22)  # first UCX that can close an endpoint without a registration cache and not crash


class Ucxx:
    """A worker of ucxx of one event loop, in blocking progress mode, as a channel uses it.

    Attributes:
        name: the library with its version.
        loopback: whether UCX is restricted to the loopback device.
    """

    # By process, loopback and the user's settings. Contexts are kept for the life of the process: another UCX, such as
    # NIXL's, replaces the memory hooks, and a context created after that has no registration cache.
    _contexts: ClassVar[dict[tuple[Any, ...], Any]] = {}

    @classmethod
    def context(cls, loopback: bool) -> Any:
        """The UCX context of this process, created by the first call."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
        for name in _QUIET:
            settings.pop(name, None)
        key = os.getpid(), loopback, frozenset(settings.items())
        if key not in cls._contexts:
            api = _imported("ucxx._lib.libucxx")
            cls._contexts[key] = api.UCXContext(_options(loopback, cls.ucx_version()))
        return cls._contexts[key]

    @classmethod
    def title(cls) -> str:
        """Name and version of the library; loads it."""
        with quiet_environment():
            return f"ucxx-{_imported('ucxx').__version__}"

    @classmethod
    def ucx_version(cls) -> tuple[int, ...]:
        """Version of UCX itself; loads it."""
        return tuple(_imported("ucxx").get_ucx_version())

    def __init__(self, *, loopback: bool) -> None:
        self.name = self.title()
        try:
            self._api = _imported("ucxx._lib.libucxx")
            self._array = _imported("ucxx._lib.arr").Array
            types = _imported("ucxx.types")
            self._tag, self._full = types.Tag, types.TagMaskFull
            self._context = self.context(loopback)
            self._worker = self._api.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
            self._worker.init_blocking_progress_mode()
            descriptor = self._worker.epoll_file_descriptor
        except (AttributeError, ImportError, TypeError) as error:
            raise TransportError(
                f"{self.title()} lacks required functions ({error}). Install version 0.52: "
                "pip install 'ucxx-cu12==0.52.*'."
            ) from error
        self.loopback = loopback
        # Incomplete requests and their buffers, which UCX may still read or write.
        self._pending: dict[Any, tuple[asyncio.Future[None], Any]] = {}
        self._soon = False
        asyncio.get_running_loop().add_reader(descriptor, self._wake)

    def address(self) -> bytes:
        """Address of the worker, for `endpoint` in another process."""
        return memoryview(self._worker.address).tobytes()

    async def endpoint(self, address: bytes) -> Any:
        """Create an endpoint to the worker of this address. Errors appear at its first use."""
        remote = self._api.UCXAddress.create_from_buffer(address)
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, remote, True)

    async def send(self, endpoint: Any, buffer: Any, tag: int) -> None:
        """Send one message; the buffer may be reused after the return."""
        await self._finish(endpoint.tag_send(self._array(buffer), self._tag(tag)), buffer)

    async def recv(self, endpoint: Any, buffer: Any, tag: int) -> None:
        """Receive one message that fills the buffer."""
        await self._finish(endpoint.tag_recv(self._array(buffer), self._tag(tag), self._full), buffer)

    def abort(self, endpoint: Any) -> None:
        """Close immediately; pending operations fail."""
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
        """Make progress until the worker can be armed; then its descriptor wakes the loop again.

        A message arrives in fragments, and polling between two of them is cheaper than sleeping: 1 MiB over shared
        memory takes 0.11 ms instead of 0.36 ms; 8 MiB with both sides on one core 1.6 ms instead of 9 ms (2 cores).
        """
        self._soon = False
        looks = _LOOKS
        while True:
            if self._worker.progress_once():
                looks = _LOOKS
            if self._settle():
                self._wake_soon()  # waiting coroutines run first
                return
            if looks and self._pending:
                looks -= 1
                os.sched_yield()  # the other side may run on the same core
            elif self._worker.arm():
                return

    def _settle(self) -> bool:
        """Complete the futures of finished requests; returns whether there were any."""
        complete = [request for request in self._pending if request.completed]
        for request in complete:
            done, _ = self._pending.pop(request)
            if not done.done():
                done.set_result(None)
        return bool(complete)


class UcxPy:
    """`Ucxx` with ucx-py."""

    _started_with: tuple[int, bool] | None = None  # process, loopback

    @classmethod
    def title(cls) -> str:
        with quiet_environment():
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
                    env_takes_precedence=False,  # `_options` omits settings made by the environment
                    blocking_progress_mode=True,
                )
            except RuntimeError as error:
                raise TransportError(
                    f"ucx-py was started in this process by other code, with other settings ({error}). "
                    "Let Gear Loader start it, or use ucxx, which supports several contexts: "
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
        """Wait for an operation. If cancelled, it continues, and keeps its buffer, until the endpoint is closed."""
        task = asyncio.ensure_future(work)
        self._kept.add(task)
        task.add_done_callback(self._done)
        await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._kept.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it


Library = Ucxx | UcxPy


@contextlib.contextmanager
def quiet_environment(**more: str) -> Iterator[None]:
    """Set environment variables for the start of UCX, unless the user has set them.

    The log of UCX goes to standard error. Warnings about unknown variables are off unless the user has set UCX_*
    variables, because ucxx sets one itself.
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
    """Options for UCX of this version. The user's environment takes precedence, except for the registration cache."""
    # With error handling, UCX does not use shared memory by default. Here the TCP stream detects a dead peer.
    options = {"POSIX_ERROR_HANDLING": "y", **({"NET_DEVICES": "lo"} if loopback else {})}
    found = {key: value for key, value in options.items() if f"UCX_{key}" not in os.environ}
    if version < _SOUND:
        # Without a registration cache, such a UCX crashes (SIGSEGV) when an endpoint is closed while a large message to
        # a stopped peer is in flight (openucx/ucx#11467). By default UCX starts without a cache where its memory hooks
        # do not work; "y" makes it refuse to start.
        found["RCACHE_ENABLE"] = "y"
    return found


def _imported(name: str) -> Any:
    """Import a module of ucxx, with garbage collection paused.

    A collection while its extension was being initialised has ended the process (SIGABRT), twice in some hundred
    imports in processes with much garbage.
    """
    if name in sys.modules:
        return sys.modules[name]
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def before_another_ucx() -> None:
    """Create ucxx's contexts, if ucxx is loaded, before another library starts its own UCX in this process.

    Afterwards ucxx could not be started any more. (If it is loaded later, it can.)
    """
    if "ucxx" not in sys.modules:
        return
    with quiet_environment(), contextlib.suppress(Exception):  # an error is raised again by the next use
        for loopback in (True, False):
            Ucxx.context(loopback)


def available() -> type[Library]:
    """The library to use: ucxx, or else ucx-py.

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
    """The worker of the running event loop, created by the first call.

    Args:
        loopback: restrict UCX to the loopback device, unless the user has set UCX_NET_DEVICES.

    Raises:
        TransportError: the process was forked after the first call, or UCX does not start.
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
            with quiet_environment():
                workers[loopback] = kind(loopback=loopback)
        except (ImportError, TransportError):
            raise
        except Exception as error:
            raise TransportError(f"UCX cannot start: {error}. {_remedy(kind.ucx_version())}") from error
    return workers[loopback]


def _remedy(version: tuple[int, ...]) -> str:
    """Remedies for a UCX that does not start, for errors."""
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
