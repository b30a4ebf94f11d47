"""torch, imported when an attribute of it is first used.

Clients of a server take this `torch`, so that they start without it: a process that has not imported torch holds no
tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard


class _LazyTorch:
    """Has the attributes of torch, which is imported when one is first used."""

    def __getattr__(self, name: str) -> Any:
        import torch as loaded

        value = getattr(loaded, name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _LazyTorch()


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor. Does not import torch."""
    return "torch" in sys.modules and isinstance(value, torch.Tensor)
