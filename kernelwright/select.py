"""Which turns are trained on. A selection is `keep [G][K]`, one truth value a turn of each trajectory of a group."""

from __future__ import annotations

from kernelwright.types import Group, TrajectoryStop


def scored(group: Group) -> list[list[bool]]:
    """Every turn, except those of trajectories that our own side broke.

    A trajectory that stopped as INFRASTRUCTURE was cut short by us: its rewards say nothing about the policy, so no
    turn of it is trained on or compared with. Turns that are no attempt (a summary, a note) are kept like the others.
    """
    return [
        [trajectory.stop is not TrajectoryStop.INFRASTRUCTURE] * len(trajectory.turns)
        for trajectory in group.trajectories
    ]


def signal(group: Group, *, spread: float = 0.0) -> list[list[bool]]:
    """Like `scored`, but nothing of a group whose rewards differ by no more than `spread` (DAPO, arXiv 2503.14476).

    Such a group has only zero advantages under a baseline of the same attempt; its rows cost time and dilute a mean
    over tokens. It is dropped, not replaced by another.
    """
    keep = scored(group)
    rewards = [
        reward
        for trajectory, kept in zip(group.trajectories, keep, strict=True)
        for reward, kept_turn in zip(trajectory.rewards, kept, strict=True)
        if kept_turn and reward is not None
    ]
    if rewards and max(rewards) - min(rewards) > spread:
        return keep
    return [[False] * len(kept) for kept in keep]
