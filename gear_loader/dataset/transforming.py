"""The `transform` of a dataset: what is called with each batch, its random numbers, and its states."""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.windows import ROW_KEYS
from gear_loader.errors import SchemaError
from gear_loader.selection.random import raw
from gear_loader.utils.arrays import Array, shown

Transform = Callable[..., Any]
_STREAM = 0x7472616E  # of random numbers; the number of a slice is added


class Moment(NamedTuple):
    """How many batches have been delivered: those of an epoch, after `done` of them, and those of `sample`."""

    epoch: int
    done: int
    samples: int


def transforms_of(transform: Any) -> tuple[Transform, ...]:
    """The callables of the option `transform`.

    Raises:
        SchemaError: one is not callable.
    """
    if transform is None:
        return ()
    each = (
        tuple(transform)
        if isinstance(transform, Sequence) and not isinstance(transform, str)
        else (transform,)
    )
    wrong = [one for one in each if not callable(one)]
    if wrong:
        raise SchemaError(
            f"transform is {shown(transform)}; expected a function that takes a batch and returns it, a sequence of "
            "them, or None. gear_loader.transforms has some."
        )
    return each


def evaluating(transform: Any) -> tuple[Transform, ...]:
    """The transforms of validation, test and prediction."""
    return tuple(one.evaluation() if hasattr(one, "evaluation") else one for one in transforms_of(transform))


class Transforms:
    """Calls transforms one after another.

    Args:
        transform: the option of the dataset, checked.
        names: of the windows; those of built-in transforms are checked, up to the first function.
        history: batches before the last one whose states are kept, because a trainer fetches ahead.

    Raises:
        SchemaError: a transform names an unknown column.
    """

    def __init__(self, transform: Any, names: Iterable[str], history: int) -> None:
        self.calls = [(one, _asks(one)) for one in transforms_of(transform)]
        self._stateful: list[Any] = [
            one for one, _ in self.calls if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        ]
        self._states: collections.deque[tuple[Moment, list[Any]]] = collections.deque(maxlen=history + 1)
        known = [*names, *ROW_KEYS, "mask"]
        for one, _ in self.calls:
            if not hasattr(one, "columns"):
                break  # it may add names
            for name in one.columns:
                if not any(name == each or name.startswith(f"{each}.") for each in known):
                    raise SchemaError(f"{one!r} names {name!r}; expected one of the windows, {known}.")

    def __len__(self) -> int:
        return len(self.calls)

    def check_worker(self) -> None:
        """Raise SchemaError if a `DataLoader` worker cannot apply them: states that follow the order of batches."""
        moving = [one for one in self._stateful if not getattr(one, "frozen", False)]
        if moving:
            raise SchemaError(
                f"{moving[0]!r} changes its state with each batch, and a DataLoader worker sees some batches only; "
                "use num_workers=0 (batches are prefetched anyway), or set its `frozen`."
            )

    def __call__(
        self,
        batch: Batch,
        *,
        seed: int,
        slice_number: int,
        epoch: int,
        number: int,
        names: Callable[[Batch], tuple[Array, ...]],
    ) -> Batch:
        """The transformed batch. seed, epoch and number identify the draw.

        Args:
            names: returns what identifies the batch's rows, on the host, for a transform with `takes_names`.
        """
        generator: torch.Generator | None = None
        for one, asks in self.calls:
            if asks:
                if generator is None:
                    stream = _STREAM + (slice_number << 32)
                    word = raw(1, seed=seed, stream=stream, epoch=epoch, step=number)
                    generator = torch.Generator("cpu")
                    generator.manual_seed(int(word[0] >> 1))
                told = {"names": names(batch)} if getattr(one, "takes_names", False) else {}
                found = one(batch, generator=generator, **told)
            else:
                found = one(batch)
            if not isinstance(found, (dict, Mapping)):
                raise SchemaError(
                    f"The transform {shown(one)} returned {shown(found)}; expected the batch, a dict."
                )
            batch = found if isinstance(found, Batch) else Batch(found)
        return batch

    # ---------------------------------------------------------------- states

    def record(self, moment: Callable[[], Moment]) -> None:
        """Keep the states after a delivered batch; `moment` tells when."""
        if self._stateful:
            self._states.append((moment(), [_copied(one.state_dict()) for one in self._stateful]))

    def state_dict(self) -> list[dict[str, Any]]:
        """The states after each of the last batches, with their moments; empty if no transform has a state."""
        stateful = self._stateful
        if not stateful:
            return []
        kept = list(self._states) or [(Moment(0, 0, 0), [one.state_dict() for one in stateful])]
        return [{**moment._asdict(), "states": _copied(states, on_host=True)} for moment, states in kept]

    def load_state_dict(self, saved: Any, moment: Moment) -> None:
        """Go on with the states at a moment: those after the last batch that was delivered before it.

        Raises:
            SchemaError: the states are of other transforms.
        """
        stateful = self._stateful
        counts = {len(each["states"]) for each in saved}
        if counts - {len(stateful)} or (stateful and not saved):
            raise SchemaError(
                f"The state holds those of {max(counts, default=0)} transforms; this dataset has {len(stateful)} with "
                "a state. Make the dataset with the transforms of the saved one."
            )
        if not stateful:
            return
        at = [each for each in saved if Moment(each["epoch"], each["done"], each["samples"]) <= moment]
        at = [each for each in at if each["samples"] <= moment.samples] or list(saved)
        chosen = at[-1]
        for one, state in zip(stateful, chosen["states"], strict=True):
            one.load_state_dict(_copied(state))
        self._states.clear()
        self._states.append((moment, [_copied(one.state_dict()) for one in stateful]))


def _asks(transform: Transform) -> bool:
    """Whether it has an argument ``generator``."""
    try:
        return "generator" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # of C
        return False


def _copied(value: Any, *, on_host: bool = False) -> Any:
    """A copy of a state; `on_host`: with tensors of the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu" if on_host else value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(part, on_host=on_host) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(part, on_host=on_host) for part in value)
    return copy.deepcopy(value)
