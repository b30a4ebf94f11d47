"""A pytest plugin for Tianshou's own tests: the replay buffers that they import are ours."""

from __future__ import annotations

import tianshou.data

from gear_loader.integrations import tianshou as ours

for each in ours.__all__:
    assert issubclass(getattr(ours, each), getattr(tianshou.data, each))
    setattr(tianshou.data, each, getattr(ours, each))
