"""Outcomes -> one advantage per sampled token. Three choices, then a spread over the turn's tokens.

Axes: G trajectories of a group, K turns of a trajectory, T sampled tokens of a turn. Time counts *attempts*: a summary
or a note earns nothing itself, takes no time, and is credited like the attempt that follows it.

With r_k the reward of the k-th attempt of a trajectory, the *return* of attempt k is

    total         R   = sum over all i      of gamma^i     r_i          (the same for every turn)
    reward_to_go  R_k = sum over i >= k     of gamma^(i-k) r_i
    max_to_go     R_k = maximum over i >= k of gamma^(i-k) r_i

and its advantage is A = (R - b) / s. The *comparison* is with a set S of returns of the same group:

    task          all kept attempts                                     (Kevin)
    attempt       the kept attempts with the same number k              (TRLOO)
    trajectory    one a trajectory with a kept attempt: its first turn's return, so that a trajectory of five turns
                  weighs as much as one of two                          (GRPO, RLOO)
    none          b = 0 and s = 1                                       (REINFORCE)

The *baseline* b is the mean of S, or with leave_one_out the mean over the members of S that are of other trajectories,
which keeps the gradient unbiased. The *scale* s is 1, or std(S) + 1e-6 with n - 1 in the deviation (Bessel). Returns
that are all equal give advantages of exactly 0. Where S comes from fewer than two trajectories (the others broke, or
ended earlier) there is nothing to compare with: the advantage is 0, never the raw return.

A mean over attempts does not know where each started: to repair a wrong kernel earns less than to keep a fast one,
so that repairs are punished and unlearned. *Carry* c says how much of its last reward a trajectory is expected to keep:

    R_k  becomes  R_k - r_{k-1} (c + gamma c^2 + ... + gamma^(n-1) c^n)        n attempts from k to the end, k >= 1

The last reward belongs to the history, not to what attempt k does, so the gradient's expectation stays what it was.

An episode that is DONE makes no more attempts. Where the reward is the score of the present candidate, that must not
cost what the attempts left out would have earned: with *after_done* = last, a finished trajectory counts as if it had
repeated its last attempt for as long as another of its group goes on, both in its own return and in what the others
are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Group, Outcome, Trajectory, TrajectoryStop

Returns = Literal["total", "reward_to_go", "max_to_go"]
Compare = Literal["task", "attempt", "trajectory", "none"]
Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "std"]
AfterDone = Literal["nothing", "last"]
_EPSILON = 1e-6


def credit(
    group: Group,
    keep: Sequence[Sequence[bool]],
    *,
    returns: Returns = "reward_to_go",
    gamma: float = 1.0,
    compare: Compare = "task",
    baseline: Baseline = "mean",
    scale: Scale = "none",
    carry: float = 0.0,
    after_done: AfterDone = "nothing",
    part: str | None = None,
) -> list[list[list[float]]]:
    """Advantages `[G][K][T]`, equal for all tokens of a turn, 0 on turns that are not kept. Formulas: top of this file.

    Args:
        group: the trajectories of one task.
        keep: which turns are trained on and compared, `[G][K]`. The rewards of the others still count in returns.
        returns: what a turn earned.
        gamma: discount per attempt, in [0, 1].
        compare: what it is measured against.
        baseline: with or without the turn's own trajectory.
        scale: as it is, or divided by the standard deviation.
        carry: share of the previous attempt's reward that the baseline expects again, in [0, 1]; for rewards to go
            that are compared over the task or over attempts.
        after_done: what a trajectory that is DONE earns at the attempts that others of its group still make.
        part: use this reward part alone instead of the sum of all parts.

    Raises:
        UserError: a comparison in a group of one (its baseline would be its own reward), a `gamma` outside [0, 1], a
            scale without a comparison, an unknown choice or reward part.
        ValueError: `keep` does not have the shape of the group.
    """
    _check_choices(returns=returns, compare=compare, baseline=baseline, scale=scale, after_done=after_done, gamma=gamma)
    _check_group(group, keep, compare=compare)
    made = [len(row) for row in keep]
    if after_done == "last":
        group, keep = _repeated(group, keep)
    returns_G_K = [
        turn_returns(trajectory, returns=returns, gamma=gamma, part=part) for trajectory in group.trajectories
    ]
    if carry:
        _check_carry(carry=carry, returns=returns, compare=compare)
        returns_G_K = [
            [value - expected for value, expected in zip(values, _carried(trajectory, gamma, carry, part), strict=True)]
            for trajectory, values in zip(group.trajectories, returns_G_K, strict=True)
        ]
    entries = _entries(group, keep, returns_G_K, compare=compare)
    advantage = partial(_advantage, entries, compare=compare, baseline=baseline, scale=scale)
    return [
        [
            [advantage(returns_K[k], g, number) if keep[g][k] else 0.0] * len(trajectory.turns[k].completion.tokens)
            for k, number in enumerate(_attempt_numbers(trajectory)[: made[g]])
        ]
        for g, (trajectory, returns_K) in enumerate(zip(group.trajectories, returns_G_K, strict=True))
    ]


def turn_returns(
    trajectory: Trajectory, *, returns: Returns = "reward_to_go", gamma: float = 1.0, part: str | None = None
) -> list[float]:
    """Return of each turn `[K]`; a turn that is no attempt has the return of the attempt after it, 0 if there is none.

    Example: rewards (0, 1.5, 2.3, 0) with gamma 0.4 have rewards to go (0.968, 2.42, 2.3, 0).

    Raises:
        UserError: an outcome without the reward part `part`.
    """
    values: list[float] = []
    following: float | None = None
    for turn in reversed(trajectory.turns):
        if turn.outcome is not None:
            reward = _reward(turn.outcome, part)
            if following is None:
                following = reward
            elif returns == "max_to_go":
                following = max(reward, gamma * following)
            else:
                following = reward + gamma * following
        values.append(0.0 if following is None else following)
    values.reverse()
    # the reward to go of the first turn is the (discounted) total
    return [values[0]] * len(values) if returns == "total" and values else values


# Published estimators as arguments of the one function above. With one turn a trajectory, grpo is DeepSeekMath's
# (2402.03300), dr_grpo is 2503.20783's, rloo is 2402.14740's, and kevin is grpo.
PRESETS: dict[str, Callable[[Group, list[list[bool]]], list[list[list[float]]]]] = {
    # one return a trajectory, shared by all its tokens
    "grpo": partial(credit, returns="total", compare="trajectory", scale="std"),
    "dr_grpo": partial(credit, returns="total", compare="trajectory"),
    "rloo": partial(credit, returns="total", compare="trajectory", baseline="leave_one_out"),
    # Kevin, arXiv 2507.11948, sections 4.3 and 4.4; `kevin_max` is the alternative of its figure 3
    "kevin": partial(credit, returns="reward_to_go", gamma=0.4, compare="task", scale="std"),
    "kevin_max": partial(credit, returns="max_to_go", gamma=0.8, compare="task", scale="std"),
    # Dr. Kernel, arXiv 2602.05885, equation 5
    "trloo": partial(credit, returns="reward_to_go", gamma=1.0, compare="attempt", baseline="leave_one_out"),
    "reinforce": partial(credit, returns="reward_to_go", compare="none"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One return that others are compared with."""

    trajectory: int
    # number of the attempt within its trajectory, from 0
    number: int
    value: float


def _entries(
    group: Group, keep: Sequence[Sequence[bool]], returns_G_K: Sequence[Sequence[float]], *, compare: Compare
) -> list[_Entry]:
    """The kept attempts of the group; the first return alone of each trajectory when trajectories are compared."""
    entries: list[_Entry] = []
    for g, trajectory in enumerate(group.trajectories):
        numbers = _attempt_numbers(trajectory)
        kept = [k for k, turn in enumerate(trajectory.turns) if keep[g][k] and turn.outcome is not None]
        if compare == "trajectory" and kept:
            entries.append(_Entry(trajectory=g, number=0, value=returns_G_K[g][0]))
        else:
            entries += [_Entry(trajectory=g, number=numbers[k], value=returns_G_K[g][k]) for k in kept]
    return entries


def _advantage(
    entries: Sequence[_Entry],
    value: float,
    own: int,
    number: int,
    *,
    compare: Compare,
    baseline: Baseline,
    scale: Scale,
) -> float:
    """Advantage of a return `value` at attempt `number` of trajectory `own`."""
    if compare == "none":
        return value
    compared = [entry for entry in entries if compare != "attempt" or entry.number == number]
    if len({entry.trajectory for entry in compared}) < 2:
        return 0.0
    others = [entry.value for entry in compared if baseline == "mean" or entry.trajectory != own]
    centred = value - _mean(others)
    return centred / (_deviation([entry.value for entry in compared]) + _EPSILON) if scale == "std" else centred


def _repeated(group: Group, keep: Sequence[Sequence[bool]]) -> tuple[Group, list[list[bool]]]:
    """The group in which trajectories that are DONE repeat their last turn until the longest has ended."""
    attempts = [sum(turn.outcome is not None for turn in one.turns) for one in group.trajectories]
    missing = [
        max(attempts) - count if one.stop is TrajectoryStop.DONE and one.turns and one.turns[-1].outcome else 0
        for one, count in zip(group.trajectories, attempts, strict=True)
    ]
    longer = [
        replace(one, turns=(*one.turns, *one.turns[-1:] * count))
        for one, count in zip(group.trajectories, missing, strict=True)
    ]
    kept = [[*row, *list(row[-1:]) * count] for row, count in zip(keep, missing, strict=True)]
    return replace(group, trajectories=tuple(longer)), kept


def _carried(trajectory: Trajectory, gamma: float, carry: float, part: str | None) -> list[float]:
    """What the rewards to go of each turn are expected to be after the reward of the attempt before it `[K]`."""
    rewards = [_reward(turn.outcome, part) for turn in trajectory.turns if turn.outcome is not None]
    expected = []
    for number in _attempt_numbers(trajectory):
        left = len(rewards) - number
        share = math.fsum(gamma**i * carry ** (i + 1) for i in range(left))
        expected.append(share * rewards[number - 1] if number else 0.0)
    return expected


def _attempt_numbers(trajectory: Trajectory) -> list[int]:
    """For each turn, how many attempts came before it: a summary has the number of the attempt that follows it."""
    numbers: list[int] = []
    count = 0
    for turn in trajectory.turns:
        numbers.append(count)
        count += turn.outcome is not None
    return numbers


def _reward(outcome: Outcome, part: str | None) -> float:
    if part is None:
        return outcome.reward
    if part not in outcome.parts:
        raise UnknownName("reward part", part, outcome.parts)
    return outcome.parts[part]


def _mean(values: Sequence[float]) -> float:
    """Mean that is exact for equal values, so that they have advantages of exactly 0."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check_group(group: Group, keep: Sequence[Sequence[bool]], *, compare: str) -> None:
    if [len(row) for row in keep] != [len(trajectory.turns) for trajectory in group.trajectories]:
        raise ValueError(f"keep has lengths {[len(row) for row in keep]}, the group's trajectories have others")
    if compare != "none" and len(group.trajectories) < 2:
        raise UserError(
            f"task '{group.task}' has {len(group.trajectories)} trajectory, compare='{compare}' expects two or more; "
            "use group_size >= 2, or compare='none' for plain REINFORCE"
        )


def _check_carry(*, carry: float, returns: str, compare: str) -> None:
    if not 0 <= carry <= 1:
        raise UserError(f"carry is a share in [0, 1], got {carry}")
    if returns != "reward_to_go" or compare not in ("task", "attempt"):
        raise UserError(
            f"carry={carry} got returns='{returns}' and compare='{compare}', expected rewards to go that are compared "
            "over the task or over attempts; set carry=0"
        )


def _check_choices(*, returns: str, compare: str, baseline: str, scale: str, after_done: str, gamma: float) -> None:
    choices = (("returns", returns, Returns), ("compare", compare, Compare), ("baseline", baseline, Baseline))
    for kind, got, known in (*choices, ("scale", scale, Scale), ("after_done", after_done, AfterDone)):
        if got not in get_args(known):
            raise UnknownName(f"choice of {kind}", got, get_args(known))
    if not 0 <= gamma <= 1:
        raise UserError(f"gamma is a discount in [0, 1], got {gamma}; Kevin uses 0.4, Dr. Kernel 1.0")
    if compare == "none" and (scale != "none" or baseline != "mean"):
        raise UserError(f"compare='none' has nothing to average, got baseline '{baseline}', scale '{scale}'; drop both")
