"""Checks of options."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.utils.arrays import shown

_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


LARGEST = 2**62
"""Largest integer of an option."""


def one_of(
    name: str, value: Any, choices: Iterable[str], otherwise: str = "", error: type[GearError] = SchemaError
) -> Any:
    """Return `value` if it is one of these strings; else raise `error`.

    Args:
        otherwise: other accepted values, for the error.
    """
    if isinstance(value, str) and value in choices:
        return value
    *first, last = map(repr, choices)
    listed = f"{', '.join(first)} or {last}" if first else last
    raise error(f"{name} is {shown(value)}; expected {listed}{otherwise}.")


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; else SchemaError."""
    if not isinstance(value, bool):
        raise SchemaError(f"{name} is {shown(value)}; expected True or False.")
    return value


def finite(value: Any) -> bool:
    """Whether a value is a finite number, of Python or numpy, that is no bool."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        return number and math.isfinite(value)
    except OverflowError:  # an integer beyond a float's range
        return False


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; SchemaError if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SchemaError(f"{name} is {shown(value)}; expected an integer.")
    return int(value)


def at_least(
    name: str, value: Any, least: int = 1, otherwise: str = "", error: type[GearError] = SchemaError
) -> int:
    """Return `value` as an int; raise `error` if it is not an integer of at least `least`, or too large.

    Args:
        otherwise: other accepted values, for the error.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= LARGEST:
        most = " and at most 2**62" if isinstance(value, int) and value > LARGEST else ""
        raise error(f"{name} is {shown(value)}; expected an integer of at least {least}{most}{otherwise}.")
    return int(value)


def byte_count(name: str, value: Any) -> int:
    """Return a number of bytes, an integer or a text such as ``"1.5GiB"``, as an int of at least 1; or SchemaError."""
    if isinstance(value, str):
        text = value.strip()
        unit = next((unit for unit in reversed(_UNITS) if text.endswith(unit)), None)
        number = text[: len(text) - len(unit or "")].strip().replace(".", "", 1)
        if unit is not None and number.isascii() and number.isdigit():
            found = int(float(text[: -len(unit)]) * (1 << _UNITS[unit]))
            if 1 <= found < 2**62:
                return found
    elif not isinstance(value, bool) and isinstance(value, (int, np.integer)) and 1 <= value < 2**62:
        return int(value)
    raise SchemaError(
        f"{name} is {shown(value)}; expected a number of bytes, at least 1, or a text with a unit "
        f"({', '.join(_UNITS)}), such as '20GiB'."
    )


def check_gamma(gamma: Any) -> None:
    """Raise SchemaError unless this can discount a step."""
    if not finite(gamma) or not 0 <= gamma <= 1:
        raise SchemaError(f"gamma is {shown(gamma)}; expected a number from 0 to 1.")
