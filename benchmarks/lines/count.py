"""``python -m benchmarks.lines.count``: lines of the programs of this folder, as the table of docs/lines.md.

Counted are the lines of code that concern the buffer and its data, as the formatter lays them out. Not counted are
imports, the docstring, blank lines, comments, and statements marked ``# shared``, which are the same in each library:
the loop over the environment and the call of the learner.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAMS = {
    "dqn": "DQN, 3-step returns",
    "goals": "SAC with HER",
    "sequences": "R2D2 sequences by priority",
    "transformer": "offline decision transformer",
    "rlpd": "RLPD mixture",
}
LIBRARIES = {"gear": "ours", "sb3": "SB3", "torchrl": "TorchRL", "cpprb": "cpprb", "reverb": "Reverb"}


def count(path: Path) -> int:
    """Lines of a program that are counted."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            last = node.body[0].lineno - 1 if isinstance(node, ast.For | ast.If) else node.end_lineno
            span = range(node.lineno, (last or node.lineno) + 1)
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            shared = not isinstance(node, ast.FunctionDef) and any("# shared" in lines[at - 1] for at in span)
            if docstring or shared or isinstance(node, ast.Import | ast.ImportFrom):
                left_out.update(span)
    code = {at for at, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
    return len(code - left_out)


def counts() -> dict[tuple[str, str], int]:
    """(program, library) -> lines, of those that there are."""
    named = {
        (program, library): FOLDER / f"{program}_{library}.py"
        for program in PROGRAMS
        for library in LIBRARIES
    }
    return {name: count(path) for name, path in named.items() if path.exists()}


def table() -> str:
    """The table, in Markdown."""
    found = counts()
    rows = [["", *LIBRARIES.values()], ["---"] * (len(LIBRARIES) + 1)]
    for program, title in PROGRAMS.items():
        rows.append([title, *(str(found.get((program, library), "–")) for library in LIBRARIES)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("|  |", "| |")


if __name__ == "__main__":
    print(table())
