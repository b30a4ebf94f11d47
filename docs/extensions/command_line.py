"""The directive ``command-line``: every command of a Typer application, with its arguments and options."""

from __future__ import annotations

import importlib

import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx


class CommandLine(Directive):
    """``.. command-line:: module:application program``"""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].partition(":")
        group = typer.main.get_command(getattr(importlib.import_module(module), name))
        return [self._section(command, self.arguments[1]) for command in group.commands.values()]

    def _section(self, command: typer.core.TyperCommand, program: str) -> nodes.section:
        title = f"{program} {command.name}"
        context = command.make_context(title, [], resilient_parsing=True)
        usage = " ".join([title, *command.collect_usage_pieces(context)])
        rows = [record for each in command.params if (record := each.get_help_record(context)) is not None]
        section = nodes.section(ids=[nodes.make_id(title)])
        section += [
            nodes.title(text=title),
            nodes.paragraph(text=command.help),
            nodes.literal_block(usage, usage),
        ]
        section += nodes.definition_list(
            "",
            *(
                nodes.definition_list_item(
                    "",
                    nodes.term("", "", nodes.literal(text=declared)),
                    nodes.definition("", nodes.paragraph(text=text)),
                )
                for declared, text in rows
            ),
        )
        return section


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
