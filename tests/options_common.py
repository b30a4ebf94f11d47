"""Options of datasets and tables by their flat names, as tests that vary one at a time write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gear_loader as gear

_GROUPS = {
    "group": "column",
    "group_size": "size",
    "group_priority": "priority",
    "group_varies": "varies",
    "group_max_age": "max_age",
}


def _taken(options: dict[str, Any], kind: type) -> dict[str, Any]:
    """The options that are attributes of `kind`, taken out of `options`."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: options.pop(name) for name in names if name in options}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `ReplayDataset` as its objects."""
    options = dict(flat)
    groups = {new: options.pop(old) for old, new in _GROUPS.items() if old in options}
    if groups.get("column") is not None:
        options["groups"] = gear.Groups(**groups)
    if draws := _taken(options, gear.Draws):
        options["draws"] = dataclasses.replace(options.get("draws", gear.Draws()), **draws)
    if ranks := _taken(options, gear.Ranks):
        options["ranks"] = gear.Ranks(**ranks)
    if (steps := _taken(options, gear.Steps)).get("max_steps") is not None:
        options["batch_size"] = gear.Steps(**steps)
    kept = {name: options.pop(name) for name in ("keep", "copy") if name in options}
    if kept:
        options["prefetch"] = gear.Prefetch(options.get("prefetch", 2), **kept)
    share = {name: options.pop(name) for name in ("programs", "stream_priority") if name in options}
    if share:
        options["device"] = gear.Gpu(options.get("device", "auto"), **share)
    return options


def nested_table(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `Table.create` as its objects."""
    options = dict(flat)
    if limits := _taken(options, gear.Limits):
        options["limits"] = gear.Limits(**limits)
    if memory := _taken(options, gear.Memory):
        options["memory"] = gear.Memory(options.pop("memory", None), **memory)
    return options
