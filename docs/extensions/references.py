"""Docstrings as pages: names in single backticks become links, and the build fails on one that leads nowhere.

A docstring writes `name` for parameters, attributes and everything else that has a name. The rule:

1. A parameter of the documented function or class is code.
2. A name of the package, of Python or of an installed library is a link where a page describes it, else code. It is
   looked for in the class, in `public_modules`, in the module and in `known_modules`, and as a full name.
3. Any other name is code, unless it looks like a reference (it has a capital letter or a dot, or ends in parentheses):
   then it is a warning, which `make docs` turns into an error.

A public name (in `__all__` of a module of `public_modules`) that no page describes is a warning too.

Sections such as ``Args:`` are read by Sphinx's Napoleon, which is called here, because its own hook takes the words
before a colon for a type, in the docstring of a property and below ``Returns:``. A line of a section may have several
entries: ``ValueError: an empty text. OSError: no such file.``
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import PycodeError
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

_logger = logging.getLogger(__name__)
_BACKTICKED = re.compile(r"(?<![`:\w\\])`([^`\n]+)`(?![`_])")
_SECTIONS = Config(napoleon_custom_sections=[("Attributes", "params_style")])
_ENTRIES = re.compile(r"(Args|Attributes|Raises):")
_ENTRY = re.compile(r"(?<=\. )(\w+): ")
_NAME = re.compile(r"\.?[^\W\d]\w*(\.[^\W\d]\w*)*(\(\))?")


class _Docstring(GoogleDocstring):
    def _consume_returns_section(self, preprocess_types: bool = False) -> list[tuple[str, str, list[str]]]:
        return [("", "", self._dedent(self._consume_to_next_section()))]


def exists(name: str) -> bool:
    """Whether a module, or something in a module, has this full name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if inspect.isclass(found) and not hasattr(found, part):
                return part == parts[-1] and any(_declares(base, part) for base in found.__mro__)
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def _declares(owner: type, attribute: str) -> bool:
    """Whether the class annotates or documents this attribute, in its body or in `__init__`."""
    try:
        source = ModuleAnalyzer.for_module(owner.__module__)
        source.analyze()
    except PycodeError:
        return False
    where = owner.__qualname__, attribute
    return where in source.annotations or where in source.attr_docs


def full_name(name: str, scopes: list[str]) -> str | None:
    """The first of scope.name that exists; None if there is none."""
    tried = [f"{scope}.{name}" for scope in scopes] + [name, f"builtins.{name}"]
    return next((each for each in tried if exists(each)), None)


def _scopes(name: str, found: Any, app: Sphinx) -> list[str]:
    """Where a name in the docstring of `name` is looked for."""
    around = [name.rsplit(".", count)[0] for count in range(name.count("."))]
    module = getattr(getattr(found, "fget", found), "__module__", None)
    return [*around, *app.config.public_modules, *([module] if module else []), *app.config.known_modules]


def _parameters(found: Any) -> set[str]:
    try:
        return set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return set()


def _literal(lines: list[str]) -> Iterator[bool]:
    """For each line, whether it lies in a literal block: indented, after a paragraph that ends in `::`."""
    block: int | None = None  # the indent of the paragraph before the block
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        yield block is not None
        if block is None and line.rstrip().endswith("::"):
            block = indent


def _single_entries(lines: list[str], parameters: set[str], owner: str) -> Iterator[str]:
    """The lines of a docstring, where each entry of its sections begins a line."""
    kind = indent = None
    for line in lines:
        if line.strip() and not line.startswith(" "):
            kind, indent = (found[1] if (found := _ENTRIES.fullmatch(line)) else None), None
        elif kind and line.strip():
            indent = indent or " " * (len(line) - len(line.lstrip()))
            begun = 0
            for found in _ENTRY.finditer(line):
                name = found[1]
                if (
                    name in parameters
                    or (kind == "Raises" and name.endswith("Error"))
                    or (kind == "Attributes" and exists(f"{owner}.{name}"))
                ):
                    yield (indent if begun else "") + line[begun : found.start()].rstrip()
                    begun = found.start()
            line = (indent if begun else "") + line[begun:]
        yield line


def read_docstring(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Rewrite one docstring: its sections as fields, its backticked names as references or code."""
    parameters = _parameters(found)
    scopes = _scopes(name, found, app)

    def rewritten(match: re.Match[str]) -> str:
        text = match[1]
        plain = text.removeprefix(".").removesuffix("()")
        if not _NAME.fullmatch(text) or plain in parameters:
            return f"``{text}``"
        target = full_name(plain, [name] if text.startswith(".") else scopes)
        if target is not None:
            return f":py:obj:`{text} <{target}>`"
        if text != text.lower() or "." in text or text.endswith("()"):
            _logger.warning("docstring of %s: `%s` leads nowhere", name, text)
        return f"``{text}``"

    kind = "method" if what in ("attribute", "data", "property") else what
    entries = list(_single_entries(lines, parameters, name))
    fields = _Docstring(entries, _SECTIONS, app, kind, name, found, options).lines()
    lines[:] = [
        line if literal else _BACKTICKED.sub(rewritten, line)
        for line, literal in zip(fields, _literal(fields), strict=True)
    ]


def accept_undescribed(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """What exists without a page (a class of torch, an internal function) stays code; the rest is a warning."""
    if node.get("refdomain") != "py":
        return None
    module, owner = node.get("py:module"), node.get("py:class")
    # Annotations of a class whose module loads what they name later, if at all, are looked for in that module.
    home = (
        getattr(getattr(importlib.import_module(module), owner, None), "__module__", None)
        if module and owner
        else None
    )
    scopes = [*filter(None, [module, home]), *app.config.known_modules]
    return content if full_name(node["reftarget"], scopes) is not None else None


def hide_constructor(
    app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str, returned: str
) -> tuple[str, None] | None:
    """No signature for a class that other calls make."""
    return ("", None) if what == "class" and found.__name__ in app.config.made_by_calls else None


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Every public name has a description."""
    described = env.domains["py"].data["objects"]
    for module in app.config.public_modules:
        for name in importlib.import_module(module).__all__:
            if f"{module}.{name}" not in described:
                _logger.warning("%s.%s is public, and no page describes it", module, name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("public_modules", [], "env")
    app.add_config_value("known_modules", [], "env")
    app.add_config_value("made_by_calls", [], "env")
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("missing-reference", accept_undescribed)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}
