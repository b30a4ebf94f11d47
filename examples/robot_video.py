"""Two ranks learn to reach from the videos of two cameras, out of one pool of episodes.

A controller that knows the target moves MuJoCo's Reacher-v5, and two cameras film it. The frames are stored as video
(``codec="video"``, H.264) in a named table, which both ranks attach to: its memory is there once, and each decodes the
frames of its own batches alone. A policy sees two frames of each camera, 0.1 seconds apart
(``Window(at=[-0.1, 0.0], fps=50)``, as LeRobot's ``delta_timestamps``), and the joints, but not the target, and learns
the controller's next actions. Then it moves the arm itself, to targets that it has not seen.

    python examples/robot_video.py             # about a minute and a half on two idle cores
    python examples/robot_video.py --quick     # to see that it runs

It needs pip install '.[sources,video]', and OpenGL for MuJoCo: MUJOCO_GL is egl unless it is set; osmesa, which needs
no GPU driver, is another choice. The exit status is 1 if the distance to the targets is not below EXPECTED of what it
is at the beginning.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time

os.environ.setdefault("MUJOCO_GL", "egl")

import numpy as np
import torch
from torch import nn

import gear_loader as gear

try:
    import av  # noqa: F401 - encodes and decodes
    import gymnasium
    import mujoco
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[sources,video]', in a clone of Gear Loader.")

SIZE = 64  # pixels, both ways
RATE = 50  # steps of Reacher-v5 a second
STEPS = 50  # of an episode
CAMERAS = {"above": (90, -90, 0.55), "front": (90, -40, 0.6)}  # degrees around and up, and the distance
AHEAD = 4  # actions that the policy says
EXPECTED = 0.5
VIDEO = gear.Codec("video", key_frames=5)
COLUMNS = {
    **{name: gear.Column(torch.uint8, (SIZE, SIZE, 3), codec=VIDEO) for name in CAMERAS},
    "joints": gear.Column(torch.float32, (6,)),
    "action": gear.Column(torch.float32, (2,)),
}
FRAMES = gear.Window(at=[-0.1, 0.0], fps=RATE, pad="edge")
WINDOWS = {
    **dict.fromkeys(CAMERAS, FRAMES),
    "joints": gear.Window(1, squeeze=True),
    "action": gear.Window(AHEAD, pad="edge"),
}


# ---------------------------------------------------------------------- the robot
class Robot:
    """Reacher-v5, with a target that is large enough to be seen in few pixels, and two cameras."""

    def __init__(self):
        self.env = gymnasium.make("Reacher-v5")
        self.model, self.data = self.env.unwrapped.model, self.env.unwrapped.data
        self.model.geom("target").size[0] = 0.02
        self.model.vis.quality.offsamples = 0  # what OpenGL takes long for, if it has no GPU
        self.renderer = mujoco.Renderer(self.model, SIZE, SIZE)
        self.cameras = {name: mujoco.MjvCamera() for name in CAMERAS}
        for name, (azimuth, elevation, distance) in CAMERAS.items():
            camera = self.cameras[name]
            camera.azimuth, camera.elevation, camera.distance = azimuth, elevation, distance

    def reset(self, seed):
        self.joints = self._joints(self.env.reset(seed=seed)[0])

    def step(self, action):
        self.joints = self._joints(self.env.step(action)[0])

    def _joints(self, observation):  # sines, cosines and speeds; neither the target nor the distance
        return np.concatenate((observation[:4], observation[6:8])).astype(np.float32)

    def look(self):
        frames = {}
        for name, camera in self.cameras.items():
            self.renderer.update_scene(self.data, camera)
            for costly in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self.renderer.scene.flags[costly] = 0
            frames[name] = self.renderer.render()
        return {**frames, "joints": self.joints}

    def missing(self):
        """From the fingertip to the target, in metres, [2]."""
        return (self.data.body("target").xpos - self.data.body("fingertip").xpos)[:2]

    def controlled(self):
        """The action of a controller that knows the target."""
        jacobian = np.zeros((3, self.model.nv))
        mujoco.mj_jacBody(self.model, self.data, jacobian, None, self.data.body("fingertip").id)
        action = 50 * jacobian[:2, :2].T @ self.missing() - 0.05 * self.data.qvel[:2]
        return np.clip(action, -1, 1).astype(np.float32)


def record(table, episodes):
    """Let the controller play; actions are disturbed, what is learned is not."""
    robot, rng = Robot(), np.random.default_rng(0)
    for seed in range(episodes):
        robot.reset(seed)
        rows = []
        for _ in range(STEPS):
            action = robot.controlled()
            rows.append({**robot.look(), "action": action})
            robot.step(np.clip(action + rng.normal(0, 0.3, 2), -1, 1))
        table.add({name: np.stack([row[name] for row in rows]) for name in COLUMNS})


# ---------------------------------------------------------------------- the policy
class Policy(nn.Module):
    """Two frames of each camera, and the joints -> the next actions."""

    def __init__(self):
        super().__init__()
        self.eyes = nn.ModuleDict(
            {
                name: nn.Sequential(
                    *(nn.Conv2d(6, 16, 8, 4, 2), nn.ReLU()),
                    *(nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()),
                    *(nn.Flatten(), nn.Linear(32 * (SIZE // 8) ** 2, 64), nn.ReLU()),
                )
                for name in CAMERAS
            }
        )
        self.act = nn.Sequential(
            nn.Linear(64 * len(CAMERAS) + 6, 128), nn.ReLU(), nn.Linear(128, 2 * AHEAD), nn.Tanh()
        )

    def forward(self, batch):
        seen = [
            eye(batch[name].permute(0, 1, 4, 2, 3).flatten(1, 2) / 255 - 0.5)
            for name, eye in self.eyes.items()
        ]
        return self.act(torch.cat((*seen, batch["joints"]), 1)).unflatten(1, (AHEAD, 2))


def learn(rank, world, name, meeting, steps, results):
    """A rank: attaches to the pool, and learns with the others."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    table = gear.Table.attach(name)
    batches = gear.ReplayDataset(
        table,
        batch_size=64,
        windows=WINDOWS,
        sampler=gear.Uniform(unit="step"),
        batches_per_epoch=steps,
        device="cpu",
    )
    model = nn.parallel.DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses = []
    for batch in batches:
        loss = (model(batch) - batch["action"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save(model.module.state_dict(), results)
        few = max(1, steps // 10)
        print(f"The loss fell from {np.mean(losses[:few]):.3f} to {np.mean(losses[-few:]):.3f}.", flush=True)
    torch.distributed.destroy_process_group()


@torch.no_grad()
def play(policy, episodes):
    """Distances to the target at the beginning and the end of episodes with new targets, in metres."""
    robot, distances = Robot(), []
    for seed in range(10_000, 10_000 + episodes):
        robot.reset(seed)
        seen, begin = [robot.look()], np.linalg.norm(robot.missing())
        for _ in range(STEPS):
            past, now = seen[max(0, len(seen) - 1 - RATE // 10)], seen[-1]
            batch = {name: torch.from_numpy(np.stack((past[name], now[name])))[None] for name in CAMERAS}
            batch["joints"] = torch.from_numpy(now["joints"])[None]
            robot.step(policy(batch)[0, 0].numpy())
            seen.append(robot.look())
        distances.append((begin, np.linalg.norm(robot.missing())))
    return np.mean(distances, axis=0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few episodes and steps; nothing is expected")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    episodes, steps, world = (6, 5, 2) if quick else (120, 400, 2)
    name, frames = f"robot-video-{os.getpid()}", episodes * STEPS * len(CAMERAS)
    sizes = {"max_steps": episodes * STEPS, "max_trajectories": episodes}
    with gear.Table.create(COLUMNS, name=name, memory=gear.Memory(payload=2_000 * frames), **sizes) as table:
        try:
            started = time.perf_counter()
            record(table, episodes)
            stored, raw = table.stats().value_bytes, frames * SIZE * SIZE * 3
            print(
                f"{episodes} episodes of two cameras in {time.perf_counter() - started:.0f} s: {raw / 1e6:.0f} MB of "
                f"pixels are {stored / 1e6:.1f} MB of video, once for {world} ranks.",
                flush=True,
            )
            started = time.perf_counter()
            # No fork: OpenGL without a GPU, and what torch.optim loads, do not go together in one process.
            context = multiprocessing.get_context("spawn")
            with tempfile.TemporaryDirectory() as folder:
                meeting, results = os.path.join(folder, "meeting"), os.path.join(folder, "policy.pt")
                ranks = [
                    context.Process(target=learn, args=(rank, world, name, meeting, steps, results))
                    for rank in range(world)
                ]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join()
                if any(rank.exitcode for rank in ranks):
                    sys.exit("A rank has failed.")
                policy = Policy()
                policy.load_state_dict(torch.load(results))
            print(f"{steps} steps of {world} ranks in {time.perf_counter() - started:.0f} s.", flush=True)
        finally:
            table.unlink()
    begin, end = play(policy, 2 if quick else 10)
    print(f"New targets: {100 * begin:.1f} cm away at first, {100 * end:.1f} cm at the end.")
    if not quick and end > EXPECTED * begin:
        sys.exit(f"Expected at most {100 * EXPECTED * begin:.1f} cm.")


if __name__ == "__main__":
    main()
