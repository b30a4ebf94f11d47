"""Cases that `make test` runs, and cases that are left to `make test-all`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def mostly_long(
    values: Iterable[Any], *kept: Any, ids: Iterable[str] | None = None, sample: int = 1
) -> list[Any]:
    """Parameters of which `make test` runs those in `kept`; the others are marked long.

    Args:
        values: the parameters of a test; a tuple is several arguments.
        kept: values that `make test` runs too.
        ids: names of the parameters, one for each value.
        sample: of the others, every `sample`-th runs in CI; the rest are marked exhaustive too.
    """
    values = list(values)
    names = list(ids) if ids is not None else [None] * len(values)
    missing = [value for value in kept if value not in values]
    assert not missing, f"not among the values: {missing}"
    found, others = [], itertools.count()
    for value, name in zip(values, names, strict=True):
        marks = [] if value in kept else [pytest.mark.long]
        if marks and next(others) % sample:
            marks.append(pytest.mark.exhaustive)
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name, marks=marks))
    return found


def exhaustive_but(kept: Any, *others: Any) -> list[Any]:
    """Parameters of a long test: CI runs the first, `make test-all` the others too; a tuple is several arguments."""
    given = [each if isinstance(each, tuple) else (each,) for each in (kept, *others)]
    return [pytest.param(*each, marks=[pytest.mark.exhaustive] * (i > 0)) for i, each in enumerate(given)]


def amounts(short: Any, long: Any, exhaustive: Any, timeout: float = 300) -> list[Any]:
    """Parameters of one test: how much of something `make test` tries, CI, and `make test-all` alone."""
    marks = [pytest.mark.long, pytest.mark.exhaustive, pytest.mark.timeout(timeout)]
    return [short, pytest.param(long, marks=pytest.mark.long), pytest.param(exhaustive, marks=marks)]


def examples(most: int) -> int:
    """How many examples hypothesis tries of a test: `most`, and in `make test` a fifth of them."""
    from hypothesis import settings  # which may not be installed

    return max(3, most * min(50, settings.default.max_examples) // 50)


def needs(*packages: str) -> None:
    """Skip the tests of a module where one of these packages is not installed. None of them is imported."""
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)


def kernel_and_twin(kernel: Any, twin: Any, name: str = "run") -> Any:
    """Parametrise an argument by a kernel, where Triton interprets it, and by its twin in plain torch."""
    compiled = pytest.mark.skipif(torch.cuda.is_available(), reason="it is compiled here")
    return pytest.mark.parametrize(name, [pytest.param(kernel, marks=compiled), twin], ids=["kernel", "twin"])


def points(some: int, more: int | None = None) -> Callable[..., Any]:
    """Parametrise `every`: every `some`-th point of an operation is a short test, every `more`-th a long one.

    That of each point is for make test-all alone. `more` is a third of `some` by default; 0 leaves it out.
    """
    more = max(2, some // 3) if more is None else more
    long = [pytest.param(more, id="more points", marks=pytest.mark.long)] if more else []
    all_of_them = pytest.param(1, id="every point", marks=[pytest.mark.long, pytest.mark.exhaustive])
    return pytest.mark.parametrize("every", [pytest.param(some, id="some points"), *long, all_of_them])
