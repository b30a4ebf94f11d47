"""The option objects of `ReplayDataset`, and the checks of options that are invalid with any table."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from gear_loader.collection.output import check_output
from gear_loader.collection.windows import check_layout, check_windows, has_whole
from gear_loader.dataset.transforming import transforms_of
from gear_loader.errors import SchemaError
from gear_loader.selection.grouping import Groups
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.step_budget import Steps
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, flag, integer, one_of
from gear_loader.utils.device_option import check_device


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """How many batches are prepared ahead, and how long their memory is kept: ``prefetch=gear.Prefetch(2, copy=True)``.

    Attributes:
        batches: batches prepared ahead, see `ReplayDataset`. 0 disables prefetching.
        keep: batches after which memory is reused; at least 1. See the validity of a batch in `ReplayDataset`.
        copy: whether each batch gets new memory: None only if references to earlier ones require it; True always, which
            costs a copy within GPU memory, or on the CPU an allocation per batch; False never.
        max_bytes: most bytes of the batches that a server (`gear_loader.connect`) sends ahead: fewer than `batches` are
            asked for if they would take more, each as much as the server expects, or as the largest so far; none ahead
            if one takes more. Of tables of this machine it means nothing.

    Raises:
        SchemaError: an invalid value.
    """

    batches: int = 2
    keep: int = 2
    copy: bool | None = None
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        at_least("prefetch", self.batches, least=0)
        at_least("max_bytes", self.max_bytes)
        at_least("keep", self.keep)
        if self.copy is not None and not isinstance(self.copy, bool):
            raise SchemaError(
                f"copy is {shown(self.copy)}; expected None (memory is reused when nothing refers to the batch any "
                "longer), True (new memory for each batch) or False (memory is reused whatever refers to it)."
            )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and the share of it that gathering takes: ``device=gear.Gpu("cuda:1", programs=8)``.

    Attributes:
        device: as `device` of `ReplayDataset`.
        programs: programs of the gather kernel, each of which occupies a multiprocessor; by default 8, or 16 if the
            size of a step is not a multiple of 4 bytes, which fill the bus; see docs/gpu.md.
        stream_priority: of the side stream that prepares batches, as for `torch.cuda.Stream`: -1 gives its kernels the
            next free multiprocessors, before blocks of training kernels that are queued already. Beside products of
            matrices and a transformer on a H100 it made no difference.
        decode: whether the GPU decodes jpegs of one shape (``codec="jpeg"``) of a `Table`, by torchvision (nvJPEG),
            whose values are close to the CPU's. What it cannot decode, the CPU does. On the CPU it means nothing.

    Raises:
        SchemaError: an invalid value, or torchvision is not installed.
    """

    device: str | torch.device = "auto"
    programs: int | None = None
    stream_priority: int = 0
    decode: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        if flag("decode", self.decode) and importlib.util.find_spec("torchvision") is None:
            raise SchemaError(
                "Gpu(decode=True) needs torchvision, which is not installed. Install that of this torch, with CUDA: "
                "https://pytorch.org/get-started"
            )
        if self.programs is not None:
            at_least("programs", self.programs)
        if integer("stream_priority", self.stream_priority) > 0:
            raise SchemaError(
                f"stream_priority is {self.stream_priority}; expected 0, or a negative number to go first."
            )


@dataclasses.dataclass(frozen=True)
class Draws:
    """What is drawn, and how draws are counted: ``draws=gear.Draws(subset=lambda n: n % 10 > 0)``.

    Attributes:
        anchor: ``"uniform"`` over the trajectory's steps, ``"first"`` or ``"last"``. A sampler with ``unit="step"``
            chooses the anchors itself.
        complete: draw only anchors whose windows are wholly inside the trajectory, its final step included. An `NStep`
            with `next` needs a following step, so that every row has an observation to bootstrap from; the last step of
            a trajectory without a final step is therefore left out, even if it terminates. A trajectory that has no
            such anchor is never drawn; `ReplayDataset.stats` counts them. ``"end"``: windows may begin before the
            trajectory, as stacks of frames do, but not end after it.
        stride: draw sequences: only the anchors 0, `stride`, 2 * `stride`, ... of each trajectory, up to the first one
            whose windows reach the trajectory's end. With `complete`, each `stride`-th of the complete anchors. Needs a
            sampler with ``unit="step"``, which is then the default. Drawing by priority needs a table whose
            `block_steps` is at most the stride. Without `complete`, an anchor needs in columns with final steps as many
            steps more as their windows are longer than others: ``{"obs": Window(9), "action": Window(8)}`` draws no
            sequence without its second observation.
        subset: function of sequence numbers (int64 [n], the order of insertion into the table that stored the
            trajectories first) that returns bool [n]: whether they belong to this dataset. `ReplayDataModule` uses it
            to split training and validation.
        drop_last: without replacement: skip the last batch if it is not full (over `Shards`: on all ranks).
        sample_info: whether batches carry ``sample_info``. Draws are counted by such datasets, and by all if the table
            has `max_times_sampled`; then, on a GPU, the host draws by priority.
        rate_limited: wait for the table's rate limiter and count for it. False for validation.

    Raises:
        SchemaError: an invalid value.
    """

    anchor: Literal["uniform", "first", "last"] = "uniform"
    complete: bool | Literal["end"] = False
    stride: int | None = None
    subset: Callable[[Array], Array] | None = None
    drop_last: bool = False
    sample_info: bool = False
    rate_limited: bool = True

    def __post_init__(self) -> None:
        one_of("anchor", self.anchor, ("uniform", "first", "last"))
        if self.complete != "end" and not isinstance(self.complete, bool):
            raise SchemaError(f"complete is {shown(self.complete)}; expected True, False or 'end'.")
        for name in ("drop_last", "sample_info", "rate_limited"):
            flag(name, getattr(self, name))
        if self.stride is not None:
            at_least("stride", self.stride)
        if self.subset is not None and not callable(self.subset):
            raise SchemaError(
                f"subset is {shown(self.subset)}; expected a function of the sequence numbers (int64 [n])."
            )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How ranks share the batches: ``ranks=gear.Ranks("local")``.

    Attributes:
        scope: with `Shards`: ``"global"`` draws the same batch over all shards on every rank, `world_size` times as
            large as in one process, and each rank gets its slice; ``"local"`` draws from this rank's shard alone,
            communicates only at the start of an iteration, and corrects importance weights for the shard's share of all
            priorities at that time.
        rank, world_size: without `Shards`: by default those of `torch.distributed` if it is initialised, else 0 of 1.
        balance: with packed batches over all `Shards`: how rows are distributed to ranks. ``"steps"``: about equal
            numbers of steps; ``"squares"``: about equal sums of squared row lengths, for models dominated by attention.
            Each rank has `batch_size` rows, or with `Steps` the same number of batches. None: slices of the batch; with
            `Steps` the same as ``"steps"``.
        prefer_local: over all `Shards`: each rank gets rows of its own node as far as they suffice for as many rows a
            rank, so that few rows cross the network. The ranks together have the same rows. A rank's own batch is then
            no random sample of all shards: this suits gradients that are averaged over the ranks, but for example not
            batch normalisation of each rank. Not with `balance` or `Steps`.
        micro_batches: with `Steps` over all `Shards`: batches of each rank that are one training step. They are planned
            together and distributed so that the ranks' work in the step is about equal: see `balance`. The last step of
            an epoch may have fewer; batches are split so that all ranks have the same number, and if each has only one
            row, the shortest repeat.

    Raises:
        SchemaError: an invalid value.
    """

    scope: Literal["global", "local"] = "global"
    rank: int | None = None
    world_size: int | None = None
    balance: Literal["steps", "squares"] | None = None
    micro_batches: int = 1
    prefer_local: bool = False

    def __post_init__(self) -> None:
        one_of("scope", self.scope, ("global", "local"))
        if (self.rank is None) != (self.world_size is None):
            raise SchemaError(
                f"rank {shown(self.rank)} of world_size {shown(self.world_size)}; expected both, with "
                "0 <= rank < world_size."
            )
        if self.rank is not None and integer("rank", self.rank) not in range(
            at_least("world_size", self.world_size)
        ):
            raise SchemaError(
                f"rank {self.rank} of world_size {self.world_size}; expected both, with 0 <= rank < world_size."
            )
        if self.balance is not None:
            one_of("balance", self.balance, ("steps", "squares"))
        at_least("micro_batches", self.micro_batches)
        flag("prefer_local", self.prefer_local)


def check_options(
    *,
    batch_size: Any,
    windows: Any,
    columns: Any,
    sampler: Any,
    groups: Any,
    draws: Any,
    seed: Any,
    device: Any,
    prefetch: Any,
    batches_per_epoch: Any,
    ranks: Any,
    output: Any,
    layout: Any,
    transform: Any,
    **_: Any,
) -> None:
    """Raise SchemaError for options of `ReplayDataset` that are invalid with any table."""
    for name, value, kind in (("draws", draws, Draws), ("ranks", ranks, Ranks)):
        if not isinstance(value, kind):
            raise SchemaError(f"{name} is {shown(value)}; expected gear_loader.{kind.__name__}(...).")
    if not isinstance(batch_size, Steps):
        at_least("batch_size", batch_size, otherwise=" or gear_loader.Steps(...)")
    check_windows(windows, columns)
    check_layout(layout, windows)
    anchor = draws.anchor
    if sampler is not None and not isinstance(sampler, Sampler):
        raise SchemaError(
            f"sampler is {shown(sampler)}; expected an object such as gear_loader.Uniform() or "
            "gear_loader.Prioritized()."
        )
    if sampler is not None and sampler.unit == "step" and anchor != "uniform":
        raise SchemaError(
            f"anchor={anchor!r} goes with a sampler of trajectories; {sampler!r} chooses the steps itself."
        )
    if draws.stride is not None and (
        anchor != "uniform" or groups is not None or (sampler is not None and sampler.unit != "step")
    ):
        raise SchemaError(
            f"Draws(stride={draws.stride}) was given with sampler={sampler!r}, anchor={anchor!r} and "
            f"groups={groups!r}; expected a sampler with unit='step', and neither of the others."
        )
    integer("seed", seed)
    if not isinstance(device, Gpu):
        check_device(device)
    if not isinstance(prefetch, Prefetch):
        at_least("prefetch", prefetch, least=0, otherwise=" or gear_loader.Prefetch(...)")
    if batches_per_epoch is not None and not (
        isinstance(batches_per_epoch, float) and batches_per_epoch == math.inf
    ):
        at_least("batches_per_epoch", batches_per_epoch, otherwise=" or math.inf")
    check_output(output)
    transforms_of(transform)
    if isinstance(batch_size, Steps):
        if layout == "padded" and not has_whole(windows):
            raise SchemaError(
                f"batch_size={batch_size!r} was given with windows of one length and layout='padded'; expected "
                "layout='packed' or 'jagged', or gear_loader.Whole()."
            )
        batch_size.check_sampler(sampler)
    _check_packed(layout, windows, anchor, sampler, output, bool(draws.complete) or draws.stride is not None)
    if groups is None:
        return
    if not isinstance(groups, Groups):
        raise SchemaError(f"groups is {shown(groups)}; expected None or gear_loader.Groups(column, size).")
    if sampler is not None and sampler.unit == "step":
        raise SchemaError(f"{groups!r} was given with {sampler!r}; expected unit='trajectory'.")


def _check_packed(layout: Any, windows: Any, anchor: Any, sampler: Any, output: Any, complete: bool) -> None:
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
    if complete:
        raise SchemaError(
            "Draws(complete=True), or stride, was given with whole trajectories, which always are; leave it out."
        )
    if anchor == "last" or (sampler is not None and sampler.unit == "step"):
        raise SchemaError(
            f"anchor={anchor!r} and sampler={sampler!r} were given with whole trajectories; expected a sampler with "
            "unit='trajectory', and no anchor: theirs is step 0."
        )
