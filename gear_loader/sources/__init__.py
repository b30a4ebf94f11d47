"""Trajectories from elsewhere: environments, data sets of many formats (`gear_loader.load_dataset`).

::

    table = gear.sources.load("hopper_medium.hdf5")          # or a Minari id, or a list of episodes
    episodes = gear.sources.collect("Hopper-v5", policy, episodes=100, seed=0)

Gymnasium, Minari and h5py are imported by the function that needs them: pip install '.[sources]' (in a clone of
Gear Loader).
"""

from gear_loader.sources.arrow_sources import read_arrow, read_hf, read_parquet, read_rows
from gear_loader.sources.environment import collect, collect_iter
from gear_loader.sources.episodes import Episode, EpisodeReader, infer_schema
from gear_loader.sources.hdf5 import read_hdf5
from gear_loader.sources.lerobot import read_lerobot
from gear_loader.sources.minari import read_minari
from gear_loader.sources.named import register
from gear_loader.sources.npz_episodes import read_npz
from gear_loader.sources.refresh_options import Refresh
from gear_loader.sources.replay_zarr import read_zarr
from gear_loader.sources.rlds import read_rlds
from gear_loader.sources.robomimic import read_robomimic
from gear_loader.sources.source_loading import load
from gear_loader.sources.webdataset import read_webdataset

__all__ = [
    "Episode",
    "EpisodeReader",
    "Refresh",
    "collect",
    "collect_iter",
    "infer_schema",
    "load",
    "read_arrow",
    "read_hdf5",
    "read_hf",
    "read_lerobot",
    "read_minari",
    "read_npz",
    "read_parquet",
    "read_rlds",
    "read_robomimic",
    "read_rows",
    "read_webdataset",
    "read_zarr",
    "register",
]
