"""Checks of options."""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.errors import SchemaError

__all__ = ["at_least", "byte_count", "integer"]

_UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; SchemaError if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SchemaError(f"{name} is {value!r}; expected an integer.")
    return int(value)


def at_least(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Return `value` as an int; SchemaError if it is not an integer of at least `least`.

    Args:
        otherwise: other accepted values, for the error.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise SchemaError(f"{name} is {value!r}; expected an integer of at least {least}{otherwise}.")
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
        f"{name} is {value!r}; expected a number of bytes, at least 1, or a text with a unit ({', '.join(_UNITS)}), "
        "such as '20GiB'."
    )
