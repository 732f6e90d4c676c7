"""Selection: who is left out, and nothing else."""

from __future__ import annotations

import pytest

from kernelwright.select import scored, signal
from kernelwright.types import Completion, Group, Outcome, Spans, Trajectory, TrajectoryStop, Turn


def turn(reward: float | None) -> Turn:
    return Turn(
        purpose="summary" if reward is None else "attempt",
        context=(1,),
        continues=False,
        completion=Completion(tokens=(2,), logprobs=(-0.5,), temperature=1.0, top_p=1.0, stop="end"),
        text="",
        source=None,
        spans=Spans(),
        outcome=None if reward is None else Outcome(feedback="", parts={"reward": reward}),
    )


def group(*rewards: list[float | None], broken: int | None = None) -> Group:
    trajectories = [
        Trajectory(
            turns=tuple(turn(reward) for reward in row),
            stop=TrajectoryStop.INFRASTRUCTURE if g == broken else TrajectoryStop.MAX_TURNS,
        )
        for g, row in enumerate(rewards)
    ]
    return Group(task="t", trajectories=tuple(trajectories))


def test_scored_drops_broken_trajectories_alone():
    assert scored(group([0.0, None, 1.0], [0.5], [], broken=1)) == [[True, True, True], [False], []]


@pytest.mark.parametrize("stop", [stop for stop in TrajectoryStop if stop is not TrajectoryStop.INFRASTRUCTURE])
def test_scored_keeps_every_other_ending(stop: TrajectoryStop):
    one = Group(task="t", trajectories=(Trajectory(turns=(turn(0.0),), stop=stop),))
    assert scored(one) == [[True]]


def test_signal_drops_a_group_of_equal_rewards():
    assert signal(group([0.3, 0.3], [0.3, None, 0.3])) == [[False, False], [False, False, False]]
    assert signal(group([0.3, 0.3], [0.3, None, 0.4])) == [[True, True], [True, True, True]]
    assert signal(group([0.3, 0.3], [0.3, 0.4]), spread=0.2) == [[False, False], [False, False]]
    assert signal(group([], [])) == [[], []]


def test_signal_does_not_look_at_broken_trajectories():
    assert signal(group([0.3], [0.3], [9.0], broken=2)) == [[False], [False], [False]]
