"""n-step returns of the CPU path, compiled."""

from __future__ import annotations

from gear_loader.native.compile import compiled


@compiled
def n_step(  # type: ignore[no-untyped-def]
    rewards, done, steps, follows, anchors, gamma, returns, discounts, bootstrap, valid
) -> None:
    """Compute the n-step return of each row; see `gear_loader.collection.n_step.NStep`.

    Args:
        rewards: float32 [B, n], from the anchor on. done: bool [B, n], whether the trajectory terminates at the step.
        steps: bool [B, n], whether the step exists. follows: bool [B, n + 1], whether there is a bootstrap step.
        anchors: int64 [B]. gamma: float64.
        returns, discounts: float32 [B], outputs. bootstrap: int64 [B], output. valid: bool [B], output.
    """
    for b in range(len(anchors)):
        count, ended = 0, False
        while count < rewards.shape[1] and not ended and steps[b, count]:
            ended = done[b, count]
            count += 1
        if not ended and not follows[b, count]:
            count -= 1
        total, factor = 0.0, 1.0
        for i in range(count):
            total += factor * rewards[b, i]
            factor *= gamma
        returns[b] = total
        discounts[b] = 0.0 if ended else factor
        bootstrap[b] = anchors[b] + count
        valid[b] = count > 0
