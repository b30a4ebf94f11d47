"""Functions by the kind of an address, ``kind:rest``: those of this package, of callers, and of installed packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from gear_loader.errors import GearError
from gear_loader.utils.arrays import shown

_KIND = re.compile(r"[a-z][a-z0-9_-]+")


class Registry:
    """Kinds of addresses and their functions.

    Args:
        group: of entry points, whose names are kinds, and which name functions. what: a function in errors, such as
            ``"opener"``. error: what is raised. known: kind -> function, or ``"module:name"``, imported on first use.
            suffixes: suffix of a file -> the kind that it needs no prefix for.
    """

    def __init__(
        self,
        group: str,
        what: str,
        error: type[GearError],
        known: Mapping[str, str],
        suffixes: Mapping[str, str],
    ) -> None:
        self.group, self.what, self.error, self.suffixes = group, what, error, dict(suffixes)
        self.known: dict[str, Callable[..., Any] | str] = dict(known)

    def register(self, kind: str, function: Callable[..., Any]) -> None:
        """Add a kind: lower-case letters, digits, ``-`` and ``_``, at least two.

        Raises:
            GearError: `error`: an invalid kind, or one that is known already.
        """
        if not isinstance(kind, str) or not _KIND.fullmatch(kind) or not callable(function):
            raise self.error(
                f"kind {shown(kind)} and {self.what} {shown(function)} were received; expected a name such as 'mine', "
                "and a function."
            )
        if kind in self.known:
            raise self.error(
                f"The kind {kind!r} is known already; expected a new one, other than {list(self.known)}."
            )
        self.known[kind] = function

    def kinds(self) -> list[str]:
        """The kinds that are known, those of installed packages too."""
        return sorted(
            {*self.known, *(point.name for point in importlib.metadata.entry_points(group=self.group))}
        )

    def split(self, address: str) -> tuple[str, str]:
        """The kind of an address, and what follows the colon; no kind of a path, or an address such as ``s3://...``."""
        kind, colon, rest = address.partition(":")
        named = colon and _KIND.fullmatch(kind) and not rest.startswith("//")
        return (kind, rest) if named else ("", address)

    def by_suffix(self, path: str) -> str:
        """The kind of a file; an empty text of others."""
        return self.suffixes.get(os.path.splitext(path)[1].lower(), "")

    def function(self, kind: str) -> Callable[..., Any] | None:
        """The function of a kind; None if it is not known.

        Raises:
            GearError: `error`: an entry point that is no function. ImportError: its package cannot be imported.
        """
        found = self.known.get(kind)
        if isinstance(found, str):
            module, _, name = found.partition(":")
            found = getattr(importlib.import_module(module), name)
        if found is None and kind:
            for point in importlib.metadata.entry_points(group=self.group, name=kind):
                found = point.load()
                if not callable(found):
                    raise self.error(
                        f"The entry point {point.value!r} of the kind {kind!r} is {shown(found)}; expected a function."
                    )
                break
        made: Callable[..., Any] | None = found
        return made


def option_names(function: Callable[..., Any], skipped: int) -> tuple[list[str], bool]:
    """The options of a function after its first `skipped` arguments, and whether it takes any other."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C without a signature
        return [], True
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [each.name for each in parameters[skipped:] if each.kind in named]
    return own, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
