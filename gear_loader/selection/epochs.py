"""Notices about trajectories as items: an epoch that is short for the table, and lengths that differ."""

from __future__ import annotations

import itertools

import numpy as np

from gear_loader.selection.samplers import Sampler
from gear_loader.utils.arrays import Array
from gear_loader.utils.notices import notice

_number = itertools.count()


def notice_short_epoch(
    sampler: Sampler, *, batches: int, batch_size: int, trajectories: int, steps: int, widest: int
) -> bool:
    """Log a notice if an epoch reads a small part of the table; return whether it did.

    Args:
        sampler: the sampler; with ``unit="step"`` an epoch is never short.
        batches, batch_size: of an epoch on all ranks together.
        trajectories, steps: what is drawn from.
        widest: steps of the longest window. Windows that together can cover half of the steps are enough.
    """
    rows = batches * batch_size
    if sampler.unit == "step" or 10 * rows >= steps or 2 * rows * widest >= steps:
        return False
    notice(
        f"short-epoch-{next(_number)}",
        f"An epoch has {batches:,} batch{'es' if batches > 1 else ''} of {batch_size:,}: {sampler!r} draws "
        f"trajectories, and an epoch draws as many as there are ({trajectories:,}), whatever their length "
        f"({steps:,} steps, or {-(-steps // batch_size):,} batches of single steps). Give batches_per_epoch= for "
        'longer epochs, or a sampler with unit="step", whose epoch draws as many steps as there are.',
    )
    return True


def notice_uneven_lengths(sampler: Sampler, lengths: Array) -> bool:
    """Log a notice if the shorter half of the trajectories has few of the steps; return whether it did.

    Args:
        sampler: a default, which draws trajectories. lengths: int64 [n], of trajectories.
    """
    half = len(lengths) // 2
    share = np.sort(lengths)[:half].sum() / max(lengths.sum(), 1)
    if half < 4 or share >= 0.25:
        return False
    notice(
        f"uneven-lengths-{next(_number)}",
        f"{sampler!r}, the default for windows of several steps, draws trajectories whatever their length: half of "
        f"the rows are of the shorter half of the trajectories, which has {share:.1%} of the steps. Give "
        'sampler=gear_loader.Uniform(unit="step") to draw all steps equally often, or gear_loader.Uniform() if '
        "this is meant.",
    )
    return True
