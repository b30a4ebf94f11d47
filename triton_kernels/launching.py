"""Launches of kernels, and copies beside them: queued at once, or handed to what builds a graph of them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Builder", "copy", "hand_to", "launch"]


class Builder(Protocol):
    """What gets launches and copies, in their order, in the place of a stream."""

    def add_kernel(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        """A launch: what `launch` was given."""

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy: what `copy` was given."""


_builder: contextvars.ContextVar[Builder | None] = contextvars.ContextVar("builder", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel of Triton on the current stream of the current device. Does not wait for the GPU.

    Args:
        kernel: defined by `triton.jit`. grid: its programs. arguments: of the kernel, tensors and numbers. constants:
            its other parameters, and options such as ``num_warps``.
    """
    builder = _builder.get()
    if builder is None:
        kernel[grid](*arguments, **constants)
    else:
        builder.add_kernel(kernel, grid, arguments, constants)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor on the current stream. Does not wait for the GPU.

    Args:
        target, source: contiguous, of one dtype and shape, on one GPU; one of them may be pinned instead.
    """
    builder = _builder.get()
    if builder is None:
        target.copy_(source, non_blocking=True)
    else:
        builder.add_copy(target, source)


def hand_to(builder: Builder, queue: Callable[[], object]) -> None:
    """Call a function whose launches and copies go to `builder`: those of this call alone, whatever is raised in it.

    A context of its own ends with the call, in C: no exception, at any bytecode, leaves `builder` with other launches.
    """

    def run() -> None:
        _builder.set(builder)
        queue()

    contextvars.copy_context().run(run)
