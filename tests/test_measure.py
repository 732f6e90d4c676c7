"""Numbers of a step and of a measurement, counted by hand on two tasks of two trajectories."""

from __future__ import annotations

import pytest

from kernelwright.measure import evaluation_numbers, mean_score, step_numbers
from kernelwright.types import (
    Completion,
    Evaluation,
    Group,
    Hack,
    Outcome,
    Spans,
    Status,
    Trajectory,
    TrajectoryStop,
    Turn,
)


def attempt(
    reward: float, *, speed: float | None = None, correct: bool = True, hack: bool = False, source: str = "a"
) -> Turn:
    evaluation = Evaluation(
        task="t",
        backend="none",
        status=Status.CORRECT if correct else Status.WRONG,
        kernel_ms=() if speed is None else (1.0,),
        reference_ms=() if speed is None else (speed,),
        hacks=(Hack(rule="copied", evidence="it did"),) if hack else (),
    )
    return Turn(
        purpose="attempt",
        context=(1, 2, 3),
        continues=False,
        completion=Completion(tokens=(1, 2), logprobs=(-0.5, -0.5), temperature=1.0, top_p=1.0, stop="end"),
        text="",
        source=source,
        spans=Spans(),
        outcome=Outcome(feedback="", parts={"score": reward}, evaluation=evaluation),
    )


def wrong() -> Turn:
    return attempt(0.0, correct=False)


def group(task: str, *trajectories: list[Turn], stop: TrajectoryStop = TrajectoryStop.MAX_TURNS) -> Group:
    return Group(task=task, trajectories=tuple(Trajectory(turns=tuple(turns), stop=stop) for turns in trajectories))


# of the first task: wrong then twice as fast; four times as fast then half as fast
# of the second: wrong and ended early; correct at equal speed, then ten times as fast but by a trick
GROUPS = [
    group("a", [wrong(), attempt(2.3, speed=2.0)], [attempt(4.3, speed=4.0), attempt(0.8, speed=0.5)]),
    group("b", [wrong()], [attempt(1.3, speed=1.0), attempt(0.0, speed=10.0, hack=True)]),
]


def test_attempts_of_each_turn() -> None:
    first, second = evaluation_numbers(GROUPS, turns=2)["turns"]
    assert first["correct"] == 2 / 4
    assert first["fast_p"] == {"0": 2 / 4, "0.5": 2 / 4, "1": 1 / 4, "2": 1 / 4}
    assert first["speedup"] == (4 + 1) / 4
    assert first["speedup_geomean"] == pytest.approx(2.0)
    assert first["score"] == pytest.approx((4.3 + 1.3) / 4)
    # "strictly faster": neither 0.5 nor 2 counts at its own threshold, and the trick counts nowhere
    assert second["correct"] == 2 / 4
    assert second["fast_p"] == {"0": 2 / 4, "0.5": 1 / 4, "1": 1 / 4, "2": 0.0}
    assert second["speedup"] == (2 + 0.5) / 4


def test_best_so_far_never_falls() -> None:
    numbers = evaluation_numbers(GROUPS, turns=2)
    first, second = numbers["so_far"]
    assert first == numbers["turns"][0]
    assert second["correct"] == 3 / 4
    assert second["speedup"] == (2 + 4 + 0 + 1) / 4
    assert second["fast_p"] == {"0": 3 / 4, "0.5": 3 / 4, "1": 2 / 4, "2": 1 / 4}
    assert numbers["avg"] == second


def test_best_of_k_takes_one_trajectory_a_task() -> None:
    best = evaluation_numbers(GROUPS, turns=2)["best"]
    assert best["correct"] == 1.0
    assert best["speedup"] == (4 + 1) / 2
    assert best["speedup_geomean"] == pytest.approx(2.0)
    assert best["score"] == pytest.approx((4.3 + 1.3) / 2)


def test_broken_trajectories_are_no_failures() -> None:
    broken = group("a", [wrong()], stop=TrajectoryStop.INFRASTRUCTURE).trajectories
    groups = [Group(task="a", trajectories=(*GROUPS[0].trajectories, *broken)), GROUPS[1]]
    numbers = evaluation_numbers(groups, turns=2)
    assert numbers["broken"] == 1
    assert {**numbers, "broken": 0, "samples": 2} == evaluation_numbers(GROUPS, turns=2)


def test_who_is_done_keeps_what_was_reached() -> None:
    early = [group("a", [attempt(4.3, speed=4.0)], [wrong()], stop=TrajectoryStop.DONE)]
    first, second = evaluation_numbers(early, turns=2)["turns"]
    assert first == second and first["correct"] == 1 / 2 and first["score"] == 4.3 / 2
    seen = step_numbers(early, [[[[1.0, 1.0]], [[0.0, 0.0]]]], turns=2)
    assert seen["correct"] == [0.5, 0.5] and seen["rewards"] == [2.15, 2.15] and seen["status"]["CORRECT"] == 1
    # full is not done: at the turns that are missing it failed
    full = [group("a", [attempt(4.3, speed=4.0)], stop=TrajectoryStop.CONTEXT_FULL)]
    assert [turn["correct"] for turn in evaluation_numbers(full, turns=2)["turns"]] == [1.0, 0.0]


def test_without_timing_speed_is_unknown_and_without_success_it_is_zero() -> None:
    untimed = evaluation_numbers([group("a", [attempt(1.0)], [wrong()])], turns=2)
    assert untimed["turns"][0]["speedup"] is None and untimed["turns"][0]["fast_p"] == {"0": 0.5}
    # one rule for all turns of a measurement
    assert untimed["turns"][1]["speedup"] is None and untimed["turns"][1]["fast_p"] == {"0": 0.0}
    failed = evaluation_numbers([group("a", [wrong()])], turns=1)
    assert failed["avg"]["speedup"] == 0.0 and failed["avg"]["fast_p"] == {"0": 0.0, "0.5": 0.0, "1": 0.0, "2": 0.0}


def test_numbers_of_a_step() -> None:
    advantages = [[[[0.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]], [[[0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]]
    seen = step_numbers(GROUPS, advantages, turns=2)
    rewards = [0.0, 4.3, 0.0, 1.3, 2.3, 0.8, 0.0]
    mean = sum(rewards) / 7
    assert seen["reward"] == pytest.approx(mean)
    assert seen["reward_std"] == pytest.approx((sum((r - mean) ** 2 for r in rewards) / 7) ** 0.5)
    assert seen["score"] == pytest.approx((2.3 + 4.3 + 0.0 + 1.3) / 4)
    assert seen["correct"] == [2 / 4, 2 / 4]
    assert seen["rewards"] == pytest.approx([5.6 / 4, 3.1 / 3])
    assert seen["speedup"] == pytest.approx([2.5, 1.25])
    assert seen["speedup_geomean"] == pytest.approx([2.0, 1.0])
    assert seen["status"] == {"CORRECT": 5, "WRONG": 2}
    assert seen["stops"] == {"MAX_TURNS": 4}
    assert (seen["tokens"], seen["context_tokens"], seen["cut"]) == (14, 21, 0.0)
    assert seen["distinct"] == 1 / 7
    assert seen["zero_advantage"] == 5 / 14


def test_an_absurd_speedup_does_not_move_the_mean() -> None:
    groups = [group("a", [attempt(1.0, speed=1.0)], [attempt(1.0, speed=1000.0)])]
    assert step_numbers(groups, [[[[0.0, 0.0]], [[0.0, 0.0]]]], turns=1)["speedup"] == [3.0]


def test_nothing_is_measured_of_nothing() -> None:
    seen = step_numbers([], [], turns=1)
    assert (seen["reward"], seen["correct"], seen["speedup"], seen["distinct"]) == (0.0, [0.0], [None], 0.0)


def test_the_mean_score_is_over_all_attempts() -> None:
    assert mean_score({"turns": [{"score": 0.5}, {"score": 1.0}, {"score": 1.5}], "avg": {"score": 9.0}}) == 1.0
