"""The messages of docs/why.md are those of the library: each is what one of its string templates can say."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gear_loader as gear

ROOT = Path(__file__).resolve().parents[1]
SHORTEST = 16  # letters that a template needs, so that none fits everything


def pattern(node: ast.AST) -> str:
    """What a string can be, as a regular expression: of other values than texts any characters."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(pattern, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return pattern(node.left) + pattern(node.right)
    return ".*?"


def written() -> Iterator[str]:
    for path in (ROOT / "gear_loader").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found = pattern(node)
                if len(re.sub(r"\W|\.\*\?", "", found)) >= SHORTEST:
                    yield found


@functools.cache  # and only where these tests run: each worker collects them
def templates() -> list[str]:
    """Those whose letters are all on the page: few, of thousands, have to be compiled."""
    page = " ".join(PAGE.split())
    return [
        each
        for each in set(written())
        if all(re.sub(r"\\(.)", r"\1", part, flags=re.S) in page for part in each.split(".*?"))
    ]


PAGE = (ROOT / "docs/why.md").read_text("utf-8")
MESSAGES = [" ".join(each.split()) for each in re.findall(r"^```text\n(.*?)^```", PAGE, re.S | re.M)]


def is_known(message: str) -> bool:
    return any(re.fullmatch(each, message) for each in templates())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_message_of_the_page_is_one_of_the_library(message: str) -> None:
    assert is_known(message)


def test_the_test_itself() -> None:
    assert not is_known(MESSAGES[0].replace("first use", "first try"))
    assert not is_known(MESSAGES[0] + " And more.")


def test_every_symptom_of_the_first_table_has_a_section() -> None:
    sections = re.findall(r"^## (.*)", PAGE, re.M)
    assert len(sections) >= 14
    for section in sections[:-2]:
        body = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
        assert "**What to do.**" in body, section


def test_messages_that_are_cheap_to_provoke() -> None:
    columns = {"obs": gear.Column(torch.float32, (4,))}
    table = gear.Table.create(columns, max_steps=200, max_trajectories=3)
    for _ in range(3):
        index = table.add({"obs": torch.rand(50, 4)})
    with pytest.raises(gear.errors.TableFullError) as full:
        table.add({"obs": torch.rand(50, 4)})
    assert str(full.value) == next(each for each in MESSAGES if each.startswith("The table is full"))
    table.remove([index])
    with pytest.raises(gear.errors.StaleIndexError) as stale:
        table[index]
    assert str(stale.value).replace(f"Index {index}", "Index 0") in MESSAGES
    with pytest.raises(gear.errors.SchemaError) as dtype:
        table.add({"obs": torch.rand(5, 4).double().numpy()})
    assert str(dtype.value) in MESSAGES
    with pytest.raises(gear.errors.SchemaError) as shape:
        table.add({"obs": torch.rand(5, 3)})
    assert str(shape.value) in MESSAGES
    table.clear()
    with pytest.raises(gear.errors.TableEmptyError) as empty:
        gear.ReplayDataset(table, batch_size=2, windows=gear.Window(2), device="cpu").sample()
    assert str(empty.value) in MESSAGES
