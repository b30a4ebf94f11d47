"""Tensors of the stand-in's devices: real bytes in host memory, whose operations are queued on streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from .memory import View

if TYPE_CHECKING:
    from .cuda import Cuda

_DETACHED = {torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default}
_SIZED_BY_VALUES = {
    "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "repeat_interleave"
}  # fmt: skip
_LIKE = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def allow_cuda_devices() -> None:
    """Let a PyTorch without CUDA index tensors of CUDA devices: the guard that sets the device does nothing."""
    torch._C._ensureCUDADeviceGuardSet()
    cuda, meta, kinds = 1, 14, 20
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * kinds).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[cuda]:
        guards[cuda] = guards[meta]


class DeviceTensor(torch.Tensor):
    """A tensor of a stand-in's device.

    Attributes:
        bytes_: the same memory as a tensor of the host, which only queued operations may touch.
    """

    bytes_: torch.Tensor
    where: torch.device
    cuda_: Cuda
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def make(cuda: Cuda, memory: torch.Tensor, device: torch.device) -> DeviceTensor:
        made = torch.Tensor._make_subclass(
            DeviceTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
        )
        made.bytes_, made.where, made.cuda_ = memory, device, cuda
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:
            return args[0].where
        if torch.is_inference_mode_enabled():  # which skips the layer that takes composed functions apart
            made = function.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        ours = next(each for each in _leaves((args, kwargs or {})) if isinstance(each, DeviceTensor))
        return _Call(ours.cuda_, ours.where, function, args, kwargs or {}).run()

    def record_stream(self, stream: Any) -> None:
        self.cuda_.record_stream(self, stream)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.where} device type tensor to numpy.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, {self.where})"

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        raise RuntimeError("cannot pin a tensor of a GPU; only dense CPU tensors can be pinned")


def device_empty(
    cuda: Cuda, shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype, device: torch.device
) -> DeviceTensor:
    """New memory of the current stream's pool."""
    shape, stride = tuple(shape), tuple(stride)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    count = (last + 1) * dtype.itemsize if all(shape) else 0
    memory = cuda.memory.allocate(count, cuda.current_stream(device))
    return DeviceTensor.make(cuda, memory.view(dtype).as_strided(shape, stride), device)


class _Call:
    """One operation on tensors of a device."""

    def __init__(
        self, cuda: Cuda, device: torch.device, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.cuda, self.device, self.function = cuda, device, function
        self.args, self.kwargs = args, kwargs
        self.name = function._schema.name.split("::")[1]

    def run(self) -> Any:
        schema = self.function._schema
        if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
            return self._view()
        if self.name == "copy_":
            return self._copy(*self.args, **self.kwargs)
        if self.name == "_to_copy" and torch.device(self.kwargs.get("device") or self.device).type == "cpu":
            return self._to_host()
        if self.function in _DETACHED or self._sized_by_values():
            return self._at_once()
        return self._queued()

    def _sized_by_values(self) -> bool:
        if self.name in ("index", "index_put_", "_index_put_impl_"):
            return any(part is not None and part.dtype == torch.bool for part in self.args[1])
        return self.name in _SIZED_BY_VALUES

    def _map(self, convert: Callable[[torch.Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with `convert` applied to tensors, and for the host's devices."""

        def each(value: Any) -> Any:
            return convert(value) if isinstance(value, torch.Tensor) else value

        kwargs = {key: value for key, value in self.kwargs.items() if key not in ("device", "pin_memory")}
        return _mapped(each, self.args), _mapped(each, kwargs)

    def _view(self) -> Any:
        args, kwargs = self._map(lambda value: value.bytes_ if isinstance(value, DeviceTensor) else value)
        with torch.no_grad():
            made = self.function(*args, **kwargs)
        return _mapped(lambda part: DeviceTensor.make(self.cuda, part, self.device), made)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        cuda = self.cuda
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            return self._queued()  # type: ignore[no-any-return]
        if isinstance(target, DeviceTensor):
            if source.dtype != target.dtype:
                source = source.to(target.dtype)
            cuda.upload(source.expand(target.shape), target, non_blocking=non_blocking)
        else:
            assert isinstance(source, DeviceTensor)
            cuda.download(source, target, non_blocking=non_blocking)
        return target

    def _to_host(self) -> torch.Tensor:
        source, options = self.args[0], self.kwargs
        non_blocking = bool(options.get("non_blocking"))
        made = torch.empty(source.shape, dtype=options.get("dtype") or source.dtype, device="cpu")
        if non_blocking:
            made = self.cuda.pinned(made.shape, made.dtype)
        self.cuda.download(source, made, non_blocking=non_blocking)
        return made

    def _at_once(self) -> Any:
        """Wait for the stream, because the host needs the values, or their number."""
        self.cuda.current_stream(self.device).synchronize()
        args, kwargs = self._map(lambda value: View.of(value).tensor())
        made = self.function(*args, **kwargs)
        return _mapped(self._on_device, made) if self.function not in _DETACHED else made

    def _on_device(self, value: Any) -> Any:
        return self.cuda.to_device(value, self.device) if isinstance(value, torch.Tensor) else value

    def _queued(self) -> Any:
        def shape_only(value: torch.Tensor) -> torch.Tensor:
            if (
                value.dim()
                and not isinstance(value, DeviceTensor)
                and self.name not in ("index", "index_put_")
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found cpu and {self.device}"
                )
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

        function, schema = self.function, self.function._schema
        mutated = [
            given
            for given, argument in zip(self.args, schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        mutated += [
            self.kwargs[argument.name]
            for argument in schema.arguments
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name in self.kwargs
        ]
        args, kwargs = self._map(shape_only)
        if mutated:
            function(*args, **kwargs)  # which checks the arguments
            outs, result = [], mutated[0] if len(mutated) == 1 else tuple(mutated)
        else:
            result = _mapped(
                lambda part: (
                    device_empty(self.cuda, part.shape, part.stride(), part.dtype, self.device)
                    if isinstance(part, torch.Tensor)
                    else part
                ),
                function(*args, **kwargs),
            )
            outs = [View.of(part) for part in _leaves(result) if isinstance(part, torch.Tensor)]
        if self.name in _EMPTY:
            return result

        def argument_of(value: torch.Tensor) -> Any:
            return View.of(value) if isinstance(value, DeviceTensor) else value.clone()

        given = self._map(argument_of)
        inputs = [each for each in _leaves(given) if isinstance(each, View)]
        written = [View.of(part) for part in mutated]

        def run() -> None:
            args, kwargs = _mapped(lambda value: value.tensor() if isinstance(value, View) else value, given)
            for view, value in zip(outs, _leaves(function(*args, **kwargs)), strict=False):
                view.tensor().copy_(value)

        reads = [view for view in inputs if view not in written]
        values = [each.tolist() if isinstance(each, torch.Tensor) else each for each in _leaves(given)]
        self.cuda.launch(
            self.device, self.name, run, reads=reads, writes=written + outs, arguments=values + outs
        )
        return result


def _leaves(value: Any) -> Iterator[Any]:
    """What lies in nested tuples, lists and dicts, in order; a view is one thing."""
    if type(value) in (tuple, list, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples, lists and dicts with `convert` applied to what lies in them."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(convert, each) for each in value])
    if type(value) is dict:
        return {key: _mapped(convert, each) for key, each in value.items()}
    return convert(value)


class CudaFunctions(TorchFunctionMode):
    """What makes tensors of devices, or of pinned memory, in one thread."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._factories = _device_constructors()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is torch.Tensor.pin_memory:
            return self._cuda.pinned_copy(args[0])
        if function is torch.Tensor.is_pinned:
            return not isinstance(args[0], DeviceTensor) and self._cuda.memory.is_pinned(View.of(args[0]))
        if function in (torch.Tensor.to, torch.Tensor.cuda):
            return self._to(function, args, options)
        if function is torch.where and len(args) == 3:  # a number would become a tensor of the device
            args = [
                part if isinstance(part, torch.Tensor) else torch.tensor(part, device="cpu") for part in args
            ]
        like = function in _LIKE and "device" in options and not isinstance(args[0], DeviceTensor)
        if like or function in self._factories:
            return self._make(function, args, options)
        return function(*args, **options)

    def _make(self, function: Any, args: Any, options: dict[str, Any]) -> Any:
        device = options.get("device")
        if device is None:
            set_here = [
                mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)
            ]
            device = set_here[-1].device if set_here else "cpu"
        device = self._cuda.device_of(device)
        options["device"] = "cpu" if device.type == "cuda" else device
        pinned = options.pop("pin_memory", False)
        made = function(*args, **options)
        if pinned:
            assert device.type == "cpu", "Only dense CPU tensors can be pinned"
            empty = function.__name__ in _EMPTY
            return self._cuda.pinned(made.shape, made.dtype) if empty else self._cuda.pinned_copy(made)
        if device.type != "cuda":
            return made
        if function.__name__ in _EMPTY:
            return device_empty(self._cuda, made.shape, made.stride(), made.dtype, device)
        if function.__name__ in ("tensor", "as_tensor", "asarray"):
            return self._cuda.to_device(made, device)
        return self._cuda.filled(made, device)

    def _to(self, function: Any, args: Any, options: dict[str, Any]) -> Any:
        tensor, *rest = args
        if function is torch.Tensor.cuda:
            rest, function = [rest[0] if rest else "cuda"], torch.Tensor.to
        named = [each for each in rest if isinstance(each, (str, torch.device))]
        rest = [each for each in rest if each not in named]
        device = options.pop("device", named[0] if named else None)
        target = None if device is None else self._cuda.device_of(device)
        if target is None or target.type != "cuda":
            if target is not None:
                options["device"] = target
            return function(tensor, *rest, **options)
        if isinstance(tensor, DeviceTensor):
            assert tensor.where == target, "copies from GPU to GPU are not played"
            return function(tensor, *rest, **options) if rest or options else tensor
        non_blocking = options.pop("non_blocking", False)
        if (rest or options) and {*rest, *options.values()} - {True, False}:
            tensor = function(tensor, *rest, **options)
        return self._cuda.to_device(tensor, target, non_blocking=non_blocking)
