"""R2D2: sequences of 40 steps that overlap by 20, with a recurrent state, by priority."""

import gear_loader as gear
from benchmarks.lines.world import learn_sequences, play, recurrent_state

sampler = gear.Prioritized(alpha=0.9, beta=0.6, unit="step")
buffer = gear.SequenceBuffer(100_000, length=40, overlap=20, batch_size=16, sampler=sampler)
for number, transition in enumerate(play(2_000)):  # shared
    buffer.add(*transition, state=recurrent_state(transition[0]))
    if number > 1_000:  # shared
        batch = buffer.sample()
        parts = [batch[name] for name in ("obs", "action", "reward", "state", "mask")]
        error = learn_sequences(*parts)  # shared
        buffer.update_priority(batch, error)
