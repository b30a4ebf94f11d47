"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The function ``__getattr__`` of a package's ``__init__``.

    Args:
        package: its name. modules: public name -> module that defines it, relative to the package.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
