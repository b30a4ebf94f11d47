"""Read PTX as Triton writes it: parameters, registers, labels and instructions."""

from __future__ import annotations

import dataclasses
import re

_OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,\s]+)\s*(?:,|$)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)<(\d+)>")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)$")
_PREDICATE = re.compile(r"@(!?)(%?\w+)\s+(.*)", re.S)
_LABEL = re.compile(r"^([$\w]+):$")
_COMMENT = re.compile(r"//.*")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        parts: its name, taken apart: ``["ld", "global", "b32"]``.
        operands: as written; a list in braces is one.
        predicate: register that decides, and whether it does so negated; None without one.
        line: line of the text, from 1.
    """

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: tuple[str, bool] | None
    line: int

    def __str__(self) -> str:
        return f"{'.'.join(self.parts)} {', '.join(self.operands)} (line {self.line})"


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel's text.

    Attributes:
        threads: threads of a block.
        parameters: name -> type.
        registers: name -> type; predicates have the type "pred".
        labels: name -> number of the instruction that follows.
    """

    name: str
    threads: int
    parameters: dict[str, str]
    registers: dict[str, str]
    labels: dict[str, int]
    instructions: tuple[Instruction, ...]


def parse(text: str) -> Program:
    """Read the only kernel of a PTX file.

    Raises:
        ValueError: a line that is none of what Triton writes.
    """
    lines = [(number, _COMMENT.sub("", line).strip()) for number, line in enumerate(text.splitlines(), 1)]
    begin = next(i for i, (_, line) in enumerate(lines) if line.startswith(".visible .entry"))
    entry = re.search(r"\.entry (\w+)", lines[begin][1])
    threads = re.search(r"\.reqntid (\d+)", text)
    if entry is None or threads is None:
        raise ValueError("No .entry with .reqntid was found.")
    body = next(i for i in range(begin, len(lines)) if lines[i][1] == "{")
    parameters = {}
    for _, line in lines[begin:body]:
        if line.startswith(".param"):
            words = line.rstrip(",").split()
            parameters[words[-1]] = words[1].lstrip(".")

    registers: dict[str, str] = {}
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for number, line in lines[body + 1 :]:
        if line.startswith(".section"):
            break
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        for statement in line.split(";"):
            _statement(statement.strip(), number, registers, instructions)
    instructions.append(Instruction(("ret",), (), None, 0))
    return Program(entry[1], int(threads[1]), parameters, registers, labels, tuple(instructions))


def _statement(text: str, number: int, registers: dict[str, str], out: list[Instruction]) -> None:
    text = re.sub(r"^\{\s*(?=\.reg|[a-z@]|$)", "", text) if not text.startswith("{ %") else text
    if text in ("", "}", "{") or text.startswith((".loc", ".pragma", ".file")):
        return
    several = _REGISTERS.match(text)
    if several:
        registers.update({f"{several[2]}{i}": several[1] for i in range(int(several[3]))})
        return
    one = _REGISTER.match(text)
    if one:
        registers[one[2]] = one[1]
        return
    predicate = None
    found = _PREDICATE.match(text)
    if found:
        predicate, text = (found[2], found[1] == "!"), found[3]
    name, _, rest = text.replace("\t", " ").partition(" ")
    operands = [each.strip() for each in _OPERAND.findall(rest.strip())]
    if not re.fullmatch(r"[a-z][\w.:]*", name) or name.startswith("."):
        raise ValueError(f"Line {number} of the PTX is not understood: {text!r}.")
    out.append(Instruction(tuple(name.split(".")), tuple(operands), predicate, number))


def listed(operand: str) -> list[str]:
    """The parts of an operand in braces, or the operand."""
    return [part.strip() for part in operand.strip("{} ").split(",")]
