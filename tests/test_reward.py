"""Rewards: worked values, who may be paid, and order."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from kernelwright.errors import UserError
from kernelwright.reward import Reward, correctness, dr_kernel, format_penalty, kevin, milestones, together
from kernelwright.types import Evaluation, Hack, Status

REWARDS: dict[str, Reward] = {
    "correctness": correctness,
    "kevin": kevin,
    "kevin capped": partial(kevin, cap=1.5),
    "dr_kernel": dr_kernel,
    "milestones": milestones,
    "format_penalty": format_penalty,
    "together": partial(together, terms=(kevin, format_penalty)),
}


def evaluation(
    status: Status = Status.CORRECT,
    speedup: float | None = None,
    *,
    hacked: bool = False,
    profile: dict[str, float] | None = None,
) -> Evaluation:
    """An evaluation whose reference took `speedup` ms and the candidate 1 ms."""
    return Evaluation(
        task="t",
        backend="c",
        status=status,
        kernel_ms=() if speedup is None else (1.0,),
        reference_ms=() if speedup is None else (speedup,),
        hacks=(Hack(rule="constant output", evidence="out[i] = 0"),) if hacked else (),
        profile=profile or {},
    )


def total(reward: Reward, of: Evaluation) -> float:
    return sum(reward(of).values())


def test_kevin_by_hand():
    assert kevin(evaluation(speedup=2.0)) == {"correct": 0.3, "speed": 2.0}
    assert kevin(evaluation(speedup=2.0), cap=1.8) == {"correct": 0.3, "speed": 1.8}
    # slower than the reference is still paid its ratio: two public re-implementations subtract 1 here
    assert kevin(evaluation(speedup=0.5)) == {"correct": 0.3, "speed": 0.5}
    assert kevin(evaluation(Status.WRONG)) == {"correct": 0.0, "speed": 0.0}


def test_dr_kernel_by_hand():
    assert total(dr_kernel, evaluation(speedup=2.0)) == 3.0
    assert total(dr_kernel, evaluation(speedup=9.0)) == 4.0
    measured = evaluation(speedup=9.0, profile={"own_kernel_share": 0.75})
    assert dr_kernel(measured) == {"correct": 1.0, "speed": 3.0, "coverage": 0.75}
    # the released script is half the paper's formula, so at most 2.5
    full = evaluation(speedup=9.0, profile={"own_kernel_share": 1.0})
    assert total(partial(dr_kernel, scale=0.5), full) == 2.5
    assert "coverage" not in dr_kernel(evaluation(speedup=2.0))
    assert dr_kernel(evaluation(Status.WRONG, profile={"own_kernel_share": 1.0}))["coverage"] == 0.0


def test_milestones_by_hand():
    assert total(milestones, evaluation(Status.CRASH)) == -1
    assert total(milestones, evaluation()) == 1
    # 5 % less time is not enough, more is: (t0 - t) / t0 is 0.04 and 0.06
    assert total(milestones, evaluation(speedup=1 / 0.96)) == 1
    assert total(milestones, evaluation(speedup=1 / 0.94)) == 2


def test_format_penalty_falls_on_missing_code_alone():
    paid = {status: total(format_penalty, evaluation(status)) for status in Status}
    assert paid == {status: -0.1 if status is Status.NO_CODE else 0.0 for status in Status}


@pytest.mark.parametrize("name", REWARDS)
def test_wrong_or_hacked_is_never_paid(name: str):
    reward = REWARDS[name]
    bad = [evaluation(status) for status in Status if status is not Status.CORRECT]
    bad += [evaluation(speedup=speedup, hacked=True) for speedup in (None, 0.5, 100.0)]
    bad += [evaluation(Status.WRONG, profile={"own_kernel_share": 1.0})]
    assert all(part <= 0 for one in bad for part in reward(one).values())


@pytest.mark.parametrize("name", REWARDS)
def test_faster_is_never_worse_and_correct_beats_wrong(name: str):
    reward = REWARDS[name]
    ladder = [total(reward, evaluation(speedup=speedup)) for speedup in (None, 0.01, 0.5, 0.99, 1.0, 1.2, 3.0, 50.0)]
    assert all(low <= high for low, high in itertools.pairwise(ladder))
    assert total(reward, evaluation(Status.WRONG)) <= ladder[0]


@pytest.mark.parametrize("reward", [kevin, dr_kernel])
def test_unmeasured_speed_is_no_speed(reward: Reward):
    assert reward(evaluation())["speed"] == 0.0
    assert reward(evaluation(speedup=1.0))["speed"] == 1.0


def test_together_keeps_every_part_and_refuses_a_clash():
    both = partial(together, terms=(kevin, format_penalty))
    assert both(evaluation(Status.NO_CODE)) == {"correct": 0.0, "speed": 0.0, "format": -0.1}
    with pytest.raises(UserError, match=r"\['correct'\]"):
        together(evaluation(), terms=(kevin, correctness))


@pytest.mark.parametrize(
    "wrong",
    [
        partial(kevin, cap=0.0),
        partial(kevin, correct=-1.0),
        partial(dr_kernel, cap=-1.0),
        partial(dr_kernel, scale=0.0),
        partial(dr_kernel, coverage=-0.1),
        partial(milestones, margin=1.0),
        partial(format_penalty, penalty=-1.0),
    ],
)
def test_bad_knobs_are_one_line(wrong: Reward):
    with pytest.raises(UserError) as caught:
        wrong(evaluation())
    assert "\n" not in str(caught.value)
