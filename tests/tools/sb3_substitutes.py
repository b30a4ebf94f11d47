"""A pytest plugin for stable-baselines3's own tests: its replay buffers are ours, wherever it has them.

python -m pytest -p sb3_substitutes stable_baselines3-2.9.2/tests/test_buffers.py
"""

from __future__ import annotations

import sys

import stable_baselines3  # noqa: F401 (loads the modules that are changed)

from gear_loader.integrations import sb3

OURS = {name: getattr(sb3, name) for name in sb3.__all__}


def substitute() -> int:
    """Replace the classes in all modules of stable-baselines3; return in how many places."""
    places = 0
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "stable_baselines3":
            for each in OURS.keys() & vars(module).keys():
                setattr(module, each, OURS[each])
                places += 1
    return places


assert substitute() >= 2 * len(OURS)  # where each is defined, and where algorithms take it from
