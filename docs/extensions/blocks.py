"""The directive ``mermaid`` for block diagrams, as a table of HTML: pages need no script, and no network."""

from __future__ import annotations

import html
import re

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

_BLOCK = re.compile(r'\w+\["([^"]*)"\]:(\d+)')


class BlockDiagram(Directive):
    """``block-beta`` with rows of ``name["text"]:columns``; anything else is an error."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        kind, columns, *rows = (line.strip() for line in self.content if line.strip())
        if kind != "block-beta" or not columns.startswith("columns ") or not all(map(_BLOCK.search, rows)):
            raise self.error("A drawing is not a block diagram (block-beta) of rows of blocks.")
        cells = (
            "".join(f'<td colspan="{width}">{html.escape(text)}</td>' for text, width in _BLOCK.findall(row))
            for row in rows
        )
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        return [nodes.raw("", f'<table class="blocks">{table}</table>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mermaid", BlockDiagram)
    return {"parallel_read_safe": True}
