"""Replay buffers for stable-baselines3 that keep their transitions in a `gear_loader.Table`.

::

    from gear_loader.integrations.sb3 import ReplayBuffer
    model = stable_baselines3.SAC("MlpPolicy", "Hopper-v5", replay_buffer_class=ReplayBuffer)
"""

try:
    import stable_baselines3  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.sb3 needs stable-baselines3, which cannot be imported ({error}). "
        "Install it: pip install '.[sb3]' (in a clone of Gear Loader)",
        name="stable_baselines3",
    ) from error

from gear_loader.integrations.sb3.her_buffer import HerReplayBuffer
from gear_loader.integrations.sb3.transition_buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

__all__ = ["DictReplayBuffer", "HerReplayBuffer", "NStepReplayBuffer", "ReplayBuffer"]
