"""Building graphs of the work that fills a batch, with a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks_common import in_child

from gear_loader.kernels.launching import copy, launch
from gear_loader.utils import driver as drivers
from gear_loader.utils.launch_graph import RepeatedWork, build, join, packed_arguments

STREAM: Any = types.SimpleNamespace(cuda_stream=77, device=None)


class Library:
    """The driver: what it is called with; `codes` are what calls return, 0 if they are not named."""

    def __init__(self, **codes: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.codes = codes
        self.raises = ""

    def _called(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        if name == self.raises:
            self.raises = ""
            raise KeyboardInterrupt
        return self.codes.get(name, 0)

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        graph._obj.value = 5
        return self._called("create")

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: Any, count: int, given: Any) -> int:
        node._obj.value = 10 + len(self.calls)
        kernel: drivers.KernelNode = given._obj
        values = [ctypes.c_int64.from_address(kernel.kernelParams[place]).value for place in range(2)]
        shape = kernel.gridDimX, kernel.gridDimY, kernel.blockDimX, kernel.sharedMemBytes
        return self._called("kernel", graph.value, before._obj.value if count else None, *shape, *values)

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 3
        return 0

    def cuGraphAddMemcpyNode(
        self, node: Any, graph: Any, before: Any, count: int, given: Any, context: Any
    ) -> int:
        node._obj.value = 10 + len(self.calls)
        sides = given._obj.srcHost, given._obj.dstHost, given._obj.WidthInBytes
        return self._called("copy", before._obj.value if count else None, *sides, context.value)

    def cuGraphAddChildGraphNode(self, node: Any, graph: Any, before: Any, count: int, child: int) -> int:
        node._obj.value = 10 + len(self.calls)
        return self._called("child", before._obj.value if count else None, child)

    def cuGraphInstantiateWithFlags(self, handle: Any, graph: ctypes.c_void_p, flags: int) -> int:
        handle._obj.value = 6
        return self._called("instantiate", graph.value, flags)

    def cuGraphDestroy(self, graph: Any) -> int:
        return self._called("destroy", getattr(graph, "value", graph))

    def cuGraphExecDestroy(self, handle: int) -> int:
        return self._called("free", handle)

    def cuGraphLaunch(self, handle: int, stream: int) -> int:
        return self._called("launch", handle, stream)


class Kernel:
    """A kernel of an address and a number, as Triton compiles it; `needs`: more metadata, None if it is interpreted."""

    arg_names = ("p_out", "count", "BLOCK")

    __name__ = "kernel"

    def __init__(self, needs: dict[str, Any] | None) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self._needs = needs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launched.append((grid, *arguments, constants))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        if self._needs is None:
            return None
        given = {"name": "kernel", "num_warps": constants["num_warps"], "shared": 1024}
        metadata = types.SimpleNamespace(**given | self._needs)
        signature = {"p_out": "*i64", "count": "i64", "BLOCK": "constexpr"}
        source = types.SimpleNamespace(signature=signature)
        return types.SimpleNamespace(run=self.launched.append, function=9, metadata=metadata, src=source)


def driver(monkeypatch: pytest.MonkeyPatch, **codes: int) -> Library:
    library = Library(**codes)
    monkeypatch.setattr(drivers, "library", lambda: library)
    return library


def numbers(value: int) -> torch.Tensor:
    return torch.full((4,), value, dtype=torch.int64, device="cpu")


def names(library: Library) -> list[str]:
    return [call[0] for call in library.calls]


BUILT = ["create", "copy", "kernel", "instantiate"]


class Work:
    """A copy and a launch; `fails` once. `needs`: as of `Kernel`."""

    def __init__(self, needs: dict[str, Any] | None = {}) -> None:  # noqa: B006
        self.kernel, self.out, self.host = Kernel(needs), numbers(0), numbers(7)
        self.queued = 0
        self.fails: BaseException | None = None

    def queue(self) -> None:
        self.queued += 1
        copy(self.out, self.host)
        error, self.fails = self.fails, None
        if error is not None:
            raise error
        launch(self.kernel, (3,), self.out, 2**40, BLOCK=8, num_warps=4)


def test_equal_work_is_built_the_second_time_and_launched_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, work, repeated = driver(monkeypatch), Work(), RepeatedWork()
    repeated.run("rows", work.queue, STREAM)
    assert work.kernel.launched == [((3,), work.out, 2**40, {"BLOCK": 8, "num_warps": 4})]
    assert not library.calls
    work.out.zero_()
    for _ in range(2):
        repeated.run("rows", work.queue, STREAM)
    out, host = work.out.data_ptr(), work.host.data_ptr()
    assert library.calls == [
        ("create",),
        ("copy", None, host, out, 32, 3),
        ("kernel", 5, 11, 3, 1, 128, 1024, out, 2**40),
        ("instantiate", 5, 0),
        ("launch", 6, 77),
        ("launch", 6, 77),
    ]
    assert work.queued == 2
    assert not work.out.any()  # nothing was done while it was built
    library.calls.clear()
    repeated.run(None, work.queue, STREAM)  # a part of a batch
    repeated.run("rows", work.queue, STREAM)
    assert (work.queued, library.calls) == (3, [("launch", 6, 77)])
    # Other work is queued, and forgets what was built.
    library.calls.clear()
    repeated.run("draw", work.queue, STREAM)
    assert library.calls == [("free", 6), ("destroy", 5)]
    repeated.run("rows", work.queue, STREAM)
    assert (work.queued, names(library)) == (5, ["free", "destroy"])


def test_a_graph_keeps_the_tensors_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    work, repeated = Work(), RepeatedWork()
    for _ in range(2):
        repeated.run("draw", work.queue, STREAM)
    kept = [weakref.ref(work.out), weakref.ref(work.host)]
    del work
    gc.collect()
    assert all(each() is not None for each in kept)
    repeated.run("other", lambda: None, STREAM)
    gc.collect()
    assert [each() for each in kept] == [None, None]


NEEDS: dict[str, dict[str, Any] | None] = {
    "interpreted": None,
    "scratch": {"global_scratch_size": 1},
    "profiled": {"profile_scratch_size": 1},
    "clusters": {"num_ctas": 2},
}


@pytest.mark.parametrize("failing", ["create", "copy", "kernel", "instantiate", *NEEDS])
def test_work_that_cannot_be_built_is_queued_each_time(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, work = driver(monkeypatch, **{failing: 900}), Work(NEEDS.get(failing, {}))
    repeated = RepeatedWork()
    for number in range(4):
        repeated.run("rows", work.queue, STREAM)
        assert len(work.kernel.launched) == number + 1
    assert names(library).count("create") == names(library).count("destroy") == 1
    assert "launch" not in names(library)


@pytest.mark.parametrize("where", ["create", "copy", "kernel", "instantiate", "queue"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_nothing_of_a_graph(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any point of it: what is launched next is launched."""
    library, work, repeated = driver(monkeypatch), Work(), RepeatedWork()
    repeated.run("rows", work.queue, STREAM)
    if where == "queue":
        work.fails = error()
    else:
        error, library.raises = KeyboardInterrupt, where
    with pytest.raises(error):
        repeated.run("rows", work.queue, STREAM)
    assert names(library).count("destroy") == 1
    launch(work.kernel, (1,), work.out, 1, BLOCK=8, num_warps=4)
    assert len(work.kernel.launched) == 2
    library.calls.clear()
    repeated.run("rows", work.queue, STREAM)
    assert names(library) == [*BUILT, "launch"]


def test_without_a_driver_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "library", lambda: None)
    assert build(lambda: pytest.fail("queued")) is None

    def no_library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.undo()
    monkeypatch.setattr(drivers.ctypes, "PyDLL", no_library)
    assert drivers.library.__wrapped__() is None


def test_arguments_are_packed_as_kernels_take_them() -> None:
    signature = {"p": "*i64", "i": "i32", "n": "i64", "x": "fp32", "one": "constexpr", "WORD": "constexpr"}
    given = numbers(0), -3, 2**62, 0.1, 1
    packed = packed_arguments(signature, list(signature), given)
    assert [ctypes.sizeof(each) for each in packed] == [8, 4, 8, 4, 8, 8]
    values = [each.value for each in packed]
    assert values == [given[0].data_ptr(), -3, 2**62, ctypes.c_float(0.1).value, None, None]


def test_structures_are_laid_out_as_the_headers_say(tmp_path: Path) -> None:
    triton, compiler = pytest.importorskip("triton"), shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    structures = {"CUDA_KERNEL_NODE_PARAMS_v2": drivers.KernelNode, "CUDA_MEMCPY3D": drivers.CopyNode}
    lines = [
        f'printf("%zu %zu ", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
        for name, kind in structures.items()
        for field, *_ in kind._fields_
    ]
    source = tmp_path / "layout.c"
    body = "".join(lines)
    source.write_text(
        f"#include <cuda.h>\n#include <stdio.h>\n#include <stddef.h>\nint main() {{ {body} return 0; }}"
    )
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    subprocess.run([compiler, f"-I{headers}", source, "-o", tmp_path / "layout"], check=True)
    found = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.split()
    expected = [
        number
        for kind in structures.values()
        for field in kind._fields_
        for number in (getattr(kind, field[0]).offset, getattr(kind, field[0]).size)
    ]
    assert [*map(int, found)] == expected


def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, launch=700)
    graph = build(lambda: None)
    assert graph is not None
    with pytest.raises(RuntimeError, match="cuGraphLaunch returned 700"):
        graph.launch(STREAM)


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_graph_is_freed_in_the_process_that_built_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver(monkeypatch)
    graphs = [build(lambda: None)]

    def freed() -> str:
        graphs.clear()
        gc.collect()
        return str([call for call in library.calls if call[0] in ("free", "destroy")])

    assert in_child(freed) == "[]"
    assert freed() == "[('free', 6), ('destroy', 5)]"


def test_a_graph_of_two_is_made_of_their_nodes_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library, work = driver(monkeypatch), Work()
    parts = [build(work.queue), build(lambda: None)]
    assert all(part is not None for part in parts)
    library.calls.clear()
    joined = join(*parts)  # type: ignore[arg-type]
    assert joined is not None
    assert library.calls == [("create",), ("child", None, 5), ("child", 11, 5), ("instantiate", 5, 0)]
    parts.clear()
    gc.collect()
    assert "free" not in names(library)
    library.codes["child"] = 900
    library.calls.clear()
    assert join(joined) is None
    assert names(library) == ["create", "child", "destroy"]
