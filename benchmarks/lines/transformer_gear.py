"""A decision transformer on offline episodes: windows of 20 steps with returns-to-go."""

import gear_loader as gear
from benchmarks.lines.world import episodes, learn_transformer

found = [
    {**each, "obs": each["obs"][:-1], "returns": each["reward"][::-1].cumsum()[::-1]} for each in episodes(20)
]
table = gear.sources.load(found)
replay = gear.ReplayDataset(
    table,
    batch_size=64,
    windows=gear.Window(20, -19),
    sampler=gear.Uniform(unit="step"),
    batches_per_epoch=20,
)
for batch in replay:
    learn_transformer(batch["obs"], batch["action"], batch["returns"], batch["mask"])  # shared
