"""`ReplayDataset` and `Mixture`: batches of tables for PyTorch."""

from gear_loader.dataset.mixture import Mixture
from gear_loader.dataset.replay_dataset import ReplayDataset

__all__ = ["Mixture", "ReplayDataset"]
