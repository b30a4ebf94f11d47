"""The options of a dataset as JSON, for the server that draws for it: data that are validated, no code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.n_step import NStep
from gear_loader.collection.windows import Whole
from gear_loader.dataset.options import Draws, Ranks
from gear_loader.errors import SchemaError, TransportError
from gear_loader.selection.grouping import Groups
from gear_loader.selection.samplers import Fifo, Lifo, LinearSchedule, Prioritized, TopK, Uniform
from gear_loader.selection.step_budget import Steps
from gear_loader.storage.dtypes import torch_dtypes
from gear_loader.storage.schema import Window
from gear_loader.transport.message_schema import kind_of, shown

_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(Window, Whole, NStep, Steps, Groups, Draws, Ranks),
        *(Uniform, Fifo, Lifo, Prioritized, TopK, LinearSchedule),
    )
}
_FIELDS = {name: tuple(inspect.signature(each).parameters) for name, each in _CLASSES.items()}
_OPTIONS = frozenset(
    (
        *("batch_size", "windows", "columns", "sampler", "groups", "draws"),
        *("seed", "batches_per_epoch", "ranks", "layout", "keep"),
    )
)
_MOST_DEPTH = 8


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a `ReplayDataset` for a message.

    Raises:
        SchemaError: one holds a function, or an object of another class.
    """
    return {name: _packed(name, value) for name, value in options.items()}


def _packed(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_packed(name, each) for each in value]
    if isinstance(value, Mapping):
        return {"map": {key: _packed(name, each) for key, each in value.items()}}
    kind = type(value).__name__
    if _CLASSES.get(kind) is type(value):
        return {
            "of": kind,
            "fields": {field: _packed(field, getattr(value, field)) for field in _FIELDS[kind]},
        }
    raise SchemaError(
        f"{name} is {shown(value)}; expected a value that a server can be sent, since it draws: no function, and of "
        f"classes only gear_loader's {', '.join(_CLASSES)}."
    )


def options_from_json(packed: Any) -> dict[str, Any]:
    """The options of a message from an untrusted source.

    Raises:
        TransportError: invalid. SchemaError: a value that an option's class refuses.
    """
    if not isinstance(packed, dict) or not _OPTIONS.issuperset(packed):
        raise TransportError(
            f"Options of a dataset are {kind_of(packed)}; expected some of {sorted(_OPTIONS)}."
        )
    return {name: _parsed(value, 0) for name, value in packed.items()}


def _parsed(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth < _MOST_DEPTH and isinstance(value, list):
        return [_parsed(each, depth + 1) for each in value]
    if depth < _MOST_DEPTH and isinstance(value, dict):
        if set(value) == {"dtype"} and str(value["dtype"]) in torch_dtypes():
            return torch_dtypes()[str(value["dtype"])]
        if set(value) == {"map"} and isinstance(value["map"], dict):
            return {key: _parsed(each, depth + 1) for key, each in value["map"].items()}
        kind, fields = str(value.get("of")), value.get("fields")
        known = set(value) == {"of", "fields"} and kind in _CLASSES
        if known and isinstance(fields, dict) and set(fields).issubset(_FIELDS[kind]):
            return _made(kind, {name: _parsed(each, depth + 1) for name, each in fields.items()})
    raise TransportError(f"An option of a dataset is {kind_of(value)}, which no option can be.")


def _made(kind: str, given: dict[str, Any]) -> Any:
    if kind == "NStep" and isinstance(given.get("next"), list):
        pairs = all(isinstance(each, list) and len(each) == 2 for each in given["next"])
        given["next"] = (
            {str(name): window for name, window in given["next"]} if pairs else tuple(given["next"])
        )
    try:
        return _CLASSES[kind](**given)
    except TypeError as error:
        raise TransportError(f"An option of a dataset is no {kind} ({shown(str(error))}).") from None
