"""R2D2: sequences of 40 steps, with a recurrent state, by priority. Starts are at any step, not at every 20th."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSliceSampler, TensorDictReplayBuffer

from benchmarks.lines.world import learn_sequences, play, recurrent_state

sampler = PrioritizedSliceSampler(
    100_000, alpha=0.9, beta=0.6, slice_len=40, end_key=("next", "done"), cache_values=False
)
buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(100_000), sampler=sampler, batch_size=16 * 40, priority_key="td_error"
)
for number, transition in enumerate(play(2_000)):  # shared
    obs, action, reward, next_obs, terminated, truncated = map(torch.as_tensor, transition)
    following = {
        "reward": reward[None].float(),
        "truncated": truncated[None],
        "done": (terminated | truncated)[None],
    }
    state = torch.as_tensor(recurrent_state(transition[0]))
    step = TensorDict({"obs": obs, "action": action, "state": state, "next": following}, batch_size=[])
    buffer.extend(step[None])
    if number > 1_000:  # shared
        batch = buffer.sample()
        rows = batch.reshape(16, 40)
        error = learn_sequences(
            rows["obs"], rows["action"], rows["next", "reward"], rows["state"][:, 0]
        )  # shared
        batch["td_error"] = torch.as_tensor(error).repeat_interleave(40)
        buffer.update_tensordict_priority(batch)
