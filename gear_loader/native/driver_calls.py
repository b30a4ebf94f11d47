"""Calls of CUDA's driver by compiled loops (numba), which get the addresses of its functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def call(_context: Any, _function: Any, _one: Any, _two: Any, _three: Any, _four: Any) -> Any:
    """Call a function of C at an address with up to four handles, addresses or small numbers; the answer is int32.

    Those that it does not take are zeros in registers that it does not read.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 4)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(*[types.int64] * 5), codegen
