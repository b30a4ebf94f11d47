"""R2D2: sequences of 40 steps that overlap by 20, with a recurrent state, by priority."""

import numpy as np
import reverb

from benchmarks.lines.world import learn_sequences, play, recurrent_state

table = reverb.Table(
    "replay",
    sampler=reverb.selectors.Prioritized(0.9),
    remover=reverb.selectors.Fifo(),
    max_size=5_000,
    rate_limiter=reverb.rate_limiters.MinSize(1),
)
server = reverb.Server([table])
client = reverb.Client(f"localhost:{server.port}")
writer = client.trajectory_writer(num_keep_alive_refs=40)
for number, transition in enumerate(play(2_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = transition
    writer.append({"obs": obs, "action": action, "reward": np.float32(reward), "state": recurrent_state(obs)})
    if writer.episode_steps >= 40 and writer.episode_steps % 20 == 0:
        columns = {name: writer.history[name][-40:] for name in ("obs", "action", "reward")}
        writer.create_item("replay", 1.0, {**columns, "state": writer.history["state"][-40]})
    if terminated or truncated:
        writer.end_episode()
    if number > 1_000:  # shared
        samples = list(client.sample("replay", 16, emit_timesteps=False))
        keys = [sample.info.key for sample in samples]
        action, obs, reward, state = (np.stack([sample.data[at] for sample in samples]) for at in range(4))
        error = learn_sequences(obs, action, reward, state)  # shared
        client.mutate_priorities("replay", dict(zip(keys, error, strict=True)))
