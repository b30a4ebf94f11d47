"""R2D2: sequences of 40 steps that overlap by 20, with a recurrent state, by priority."""

import torch

import gear_loader as gear
from benchmarks.lines.world import learn_sequences, play, recurrent_state

columns = {
    "obs": gear.Column(torch.float32, (4,)),
    "action": gear.Column(torch.int64),
    "reward": gear.Column(torch.float32),
    "state": gear.Column(torch.float32, (8,)),
}
table = gear.Table.create(columns, max_steps=100_000, max_trajectories=5_000, on_full="evict_oldest")
windows = {name: gear.Window(40) for name in ("obs", "action", "reward")}
windows["state"] = gear.Window(1, squeeze=True)
replay = gear.ReplayDataset(
    table,
    batch_size=16,
    windows=windows,
    anchor="first",
    selector=gear.Prioritized(alpha=0.9, beta=0.6),
    draws=gear.Draws(complete=True),
    prefetch=0,
)
writer = table.writer(chunk_steps=40, overlap_steps=20)
for number, transition in enumerate(play(2_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    writer.append(obs=obs, action=action, reward=reward, state=recurrent_state(obs))
    if terminated or truncated:
        writer.commit()
    if number > 1_000:  # shared
        batch = replay.sample()
        error = learn_sequences(batch["obs"], batch["action"], batch["reward"], batch["state"])  # shared
        replay.update_priority(batch, error)
