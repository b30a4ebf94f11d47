"""Cases that `make test` runs, and cases that are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def mostly_long(values: Iterable[Any], *kept: Any, ids: Iterable[str] | None = None) -> list[Any]:
    """Parameters of which `make test` runs those in `kept`; the others are marked long.

    Args:
        values: the parameters of a test; a tuple is several arguments.
        kept: values that `make test` runs too.
        ids: names of the parameters, one for each value.
    """
    values = list(values)
    names = list(ids) if ids is not None else [None] * len(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"not among the values: {missing}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=() if value in kept else pytest.mark.long,
        )
        for value, name in zip(values, names, strict=True)
    ]


def kernel_and_twin(kernel: Any, twin: Any, name: str = "run") -> Any:
    """Parametrise an argument by a kernel, where Triton interprets it, and by its twin in plain torch."""
    compiled = pytest.mark.skipif(torch.cuda.is_available(), reason="it is compiled here")
    return pytest.mark.parametrize(name, [pytest.param(kernel, marks=compiled), twin], ids=["kernel", "twin"])


def points(some: int) -> Callable[..., Any]:
    """Parametrise `every`: each point of an operation is a long test, every so-manieth point a short one."""
    return pytest.mark.parametrize(
        "every",
        [pytest.param(some, id="some points"), pytest.param(1, id="every point", marks=pytest.mark.long)],
    )
