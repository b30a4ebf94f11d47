"""Checks of the options of `ReplayDataset` that are invalid with any table."""

from __future__ import annotations

import math
from typing import Any

from gear_loader.collection.output import check_output
from gear_loader.collection.windows import check_layout, check_windows, has_whole
from gear_loader.errors import SchemaError
from gear_loader.selection.selectors import Selector
from gear_loader.selection.step_budget import StepBudget
from gear_loader.storage.rules import check_seconds
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, flag, integer, one_of
from gear_loader.utils.devices import check_device

__all__ = ["check_options"]


def check_options(
    *,
    batch_size: Any,
    windows: Any,
    columns: Any,
    complete: Any,
    anchor: Any,
    selector: Any,
    seed: Any,
    device: Any,
    prefetch: Any,
    copy: Any,
    keep: Any,
    batches_per_epoch: Any,
    subset: Any,
    programs: Any,
    stream_priority: Any,
    scope: Any,
    rank: Any,
    world_size: Any,
    output: Any,
    layout: Any,
    max_steps: Any,
    lookahead: Any,
    too_long: Any,
    group: Any,
    group_size: Any,
    group_priority: Any,
    group_varies: Any,
    group_max_age: Any,
    balance: Any,
    micro_batches: Any,
    drop_last: Any,
    sample_info: Any,
    rate_limited: Any,
    **_: Any,
) -> None:
    """Raise SchemaError for an option of `ReplayDataset` that is invalid with any table."""
    if max_steps is None:
        at_least("batch_size", batch_size)
    check_windows(windows, columns)
    check_layout(layout, windows)
    one_of("anchor", anchor, ("uniform", "first", "last"))
    if selector is not None and not isinstance(selector, Selector):
        raise SchemaError(
            f"selector is {shown(selector)}; expected an object such as gear_loader.Uniform() or "
            "gear_loader.Prioritized()."
        )
    if selector is not None and selector.unit == "step" and anchor != "uniform":
        raise SchemaError(
            f"anchor={anchor!r} goes with a selector of trajectories; {selector!r} chooses the steps itself."
        )
    for name, value in (
        ("drop_last", drop_last),
        ("sample_info", sample_info),
        ("rate_limited", rate_limited),
    ):
        flag(name, value)
    integer("seed", seed)
    check_device(device)
    at_least("prefetch", prefetch, least=0)
    if copy is not None and not isinstance(copy, bool):
        raise SchemaError(
            f"copy is {shown(copy)}; expected None (memory is reused when nothing refers to the batch any longer), "
            "True "
            "(new memory for each batch) or False (memory is reused whatever refers to it)."
        )
    at_least("keep", keep)
    if batches_per_epoch is not None and not (
        isinstance(batches_per_epoch, float) and batches_per_epoch == math.inf
    ):
        at_least("batches_per_epoch", batches_per_epoch, otherwise=" or math.inf")
    if subset is not None and not callable(subset):
        raise SchemaError(
            f"subset is {shown(subset)}; expected a function of the sequence numbers (int64 [n])."
        )
    if programs is not None:
        at_least("programs", programs)
    if integer("stream_priority", stream_priority) > 0:
        raise SchemaError(
            f"stream_priority is {stream_priority}; expected 0, or a negative number to go first."
        )
    if (rank is None) != (world_size is None):
        raise SchemaError(
            f"rank {shown(rank)} of world_size {shown(world_size)}; expected both, with 0 <= rank < world_size."
        )
    if rank is not None and integer("rank", rank) not in range(at_least("world_size", world_size)):
        raise SchemaError(
            f"rank {rank} of world_size {world_size}; expected both, with 0 <= rank < world_size."
        )
    one_of("scope", scope, ("global", "local"))
    if balance is not None:
        one_of("balance", balance, ("steps", "squares"))
    at_least("micro_batches", micro_batches)
    check_output(output)
    _check_sizes(batch_size, layout, windows, max_steps, lookahead, too_long, selector)
    _check_packed(layout, windows, anchor, selector, output, complete)
    _check_group(group, group_size, group_priority, group_varies, group_max_age, selector)


def _check_sizes(
    batch_size: Any,
    layout: Any,
    windows: Any,
    max_steps: Any,
    lookahead: Any,
    too_long: Any,
    selector: Any,
) -> None:
    """Check the options of batches that have a number of steps instead of rows."""
    if max_steps is None:
        if not (isinstance(lookahead, int) and lookahead == 0) or not _is_text(too_long, "error"):
            raise SchemaError("lookahead or too_long was given without max_steps, to which they belong.")
        return
    if batch_size is not None:
        raise SchemaError(
            f"batch_size={shown(batch_size)} and max_steps={shown(max_steps)} were given; expected one of them."
        )
    if layout == "padded" and not has_whole(windows):
        raise SchemaError(
            "max_steps was given with windows of one length and layout='padded'; expected layout='packed' or 'jagged', "
            "or gear_loader.Whole()."
        )
    StepBudget.check(max_steps, lookahead, too_long, selector)


def _check_packed(layout: Any, windows: Any, anchor: Any, selector: Any, output: Any, complete: Any) -> None:
    """Check the options that packed batches do not go with."""
    if layout == "padded" and not has_whole(windows):
        return
    if output != "dict" and layout != "padded":
        raise SchemaError(
            f"output={output!r} was given with layout={layout!r}; expected 'dict': the columns of a packed batch "
            "differ in their first dimension."
        )
    if not has_whole(windows):
        return
    if complete is True:
        raise SchemaError("complete=True was given with whole trajectories, which always are; leave it out.")
    if anchor == "last" or (selector is not None and selector.unit == "step"):
        raise SchemaError(
            f"anchor={anchor!r} and selector={selector!r} were given with whole trajectories; expected a selector with "
            "unit='trajectory', and no anchor: theirs is step 0."
        )


def _check_group(group: Any, size: Any, priority: Any, varies: Any, max_age: Any, selector: Any) -> None:
    """Check the options of groups that are invalid with any table."""
    if group is None:
        if size is not None or varies is not None or max_age is not None or not _is_text(priority, "max"):
            raise SchemaError(
                "group_size, group_priority, group_varies or group_max_age was given without group, to which they "
                "belong."
            )
        return
    if size is None:
        raise SchemaError(f"group={shown(group)} was given without group_size; give both.")
    if max_age is not None:
        check_seconds("group_max_age", max_age)
    if selector is not None and selector.unit == "step":
        raise SchemaError(f"group={group!r} was given with {selector!r}; expected unit='trajectory'.")


def _is_text(value: Any, text: str) -> bool:
    return isinstance(value, str) and value == text
