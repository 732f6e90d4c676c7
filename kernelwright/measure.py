"""Groups -> the numbers of metrics.jsonl and evaluations.jsonl. Pure: no clock, no files, no model.

A candidate counts as correct only when it is trusted: correct, and without a sign of cheating. Trajectories that our
own side broke (INFRASTRUCTURE) are left out of every share. One that is DONE early keeps what it had reached at the
turns that it does not have; one that ended early for another reason failed there.

fast_p is the share of trajectories whose candidate is correct and strictly faster than p times the reference
(KernelBench, arXiv 2502.10517), so fast_0 is the share that is correct.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kernelwright.types import Evaluation, Group, Outcome, Trajectory, TrajectoryStop

THRESHOLDS = (0.0, 0.5, 1.0, 2.0)
# one absurd timing must not move a mean that people read
SPEEDUP_CAP = 5.0


def evaluation_numbers(groups: Sequence[Group], *, turns: int) -> dict[str, Any]:
    """How good a policy is.

    Args:
        groups: trajectories of each task, the same number of each  [P].
        turns: attempts that a trajectory may have.

    Returns:
        `tasks`, `samples` (trajectories a task), `broken` (trajectories left out); `turns`: of each turn the attempts
        made at it; `so_far`: of each turn the best of the attempts up to it; `avg`: the best attempt of a trajectory,
        averaged (avg@k); `best`: the best trajectory of each task (best@k). Each of these has `correct`, `fast_p`,
        `speedup` (mean, 0 for what is not correct; Kevin, arXiv 2507.11948), `speedup_geomean` (of the correct ones)
        and `score` (mean reward). `speedup` is None where nothing was timed.
    """
    sound = [[one for one in group.trajectories if _sound(one)] for group in groups]
    attempts = [[_attempts(one, turns) for one in members] for members in sound]
    flat = [outcomes for members in attempts for outcomes in members]
    everything = [outcome for outcomes in flat for outcome in outcomes]
    # without timing nothing is known about speed; with nothing correct, it is known to be 0
    timed = bool(_speedups(everything)) or not any(map(_trusted, everything))
    numbers = partial(_numbers, timed=timed)
    return {
        "tasks": len(groups),
        "samples": max((len(group.trajectories) for group in groups), default=0),
        "broken": sum(len(group.trajectories) for group in groups) - len(flat),
        "turns": [numbers([outcomes[turn] for outcomes in flat]) for turn in range(turns)],
        "so_far": [numbers([_best(outcomes[: turn + 1]) for outcomes in flat]) for turn in range(turns)],
        "avg": numbers([_best(outcomes) for outcomes in flat]),
        "best": numbers([_best([_best(outcomes) for outcomes in members]) for members in attempts if members]),
    }


def mean_score(numbers: Mapping[str, Any]) -> float:
    """Mean score of all attempts in what `evaluation_numbers` gave: the number by which checkpoints are chosen.

    The best attempt of each trajectory says less (it is one of several numbers) and hides a policy that breaks what it
    has.
    """
    return math.fsum(turn["score"] for turn in numbers["turns"]) / len(numbers["turns"])


def step_numbers(
    groups: Sequence[Group], advantages: Sequence[Sequence[Sequence[Sequence[float]]]], *, turns: int
) -> dict[str, Any]:
    """What a training step saw.

    Args:
        groups: one a task  [P].
        advantages: of every sampled token  [P][G][K][T].
        turns: attempts that a trajectory may have.

    Returns:
        `reward`, `reward_std`: over all attempts, those that a DONE trajectory need not make included; `score`: mean
        over trajectories of their best reward; `group_std`: mean over tasks of the deviation of its rewards;
        `correct`, `rewards`, `speedup`, `speedup_geomean`: one number a turn (speedups of trusted and timed candidates
        alone, capped for the mean; None where there are none);
        `status`, `stops`: counts; `tokens`, `context_tokens`: sampled and given; `cut`: share of replies that ran out
        of room; `distinct`: share of different sources; `zero_advantage`: share of sampled tokens without one.
    """
    everyone = [one for group in groups for one in group.trajectories]
    sound = [one for one in everyone if _sound(one)]
    every_turn = [turn for one in everyone for turn in one.turns]
    by_turn = [[outcomes[turn] for outcomes in (_attempts(one, turns) for one in sound)] for turn in range(turns)]
    rewards = [outcome.reward for outcomes in by_turn for outcome in outcomes if outcome]
    sources = [turn.source for turn in every_turn if turn.source is not None]
    values = [value for group in advantages for row in group for turn in row for value in turn]
    return {
        "reward": _mean(rewards),
        "reward_std": _deviation(rewards),
        "score": _mean([_score(_best(_attempts(one, turns))) for one in sound]),
        "group_std": _mean([_deviation(_rewards(group)) for group in groups]),
        "correct": [_mean([float(_trusted(outcome)) for outcome in outcomes]) for outcomes in by_turn],
        "rewards": [_mean([outcome.reward for outcome in outcomes if outcome]) for outcomes in by_turn],
        "speedup": [_mean_or_none([min(s, SPEEDUP_CAP) for s in _speedups(outcomes)]) for outcomes in by_turn],
        "speedup_geomean": [_geomean(_speedups(outcomes)) for outcomes in by_turn],
        "status": _counts(
            turn.outcome.evaluation.status for turn in every_turn if turn.outcome and turn.outcome.evaluation
        ),
        "stops": _counts(one.stop for one in everyone),
        "tokens": sum(len(turn.completion.tokens) for turn in every_turn),
        "context_tokens": sum(len(turn.context) for turn in every_turn),
        "cut": _mean([float(turn.completion.stop == "length") for turn in every_turn]),
        "distinct": len(set(sources)) / len(sources) if sources else 0.0,
        "zero_advantage": _mean([float(value == 0.0) for value in values]),
    }


def _numbers(outcomes: Sequence[Outcome | None], *, timed: bool) -> dict[str, Any]:
    speedups = _speedups(outcomes)
    trusted = sum(_trusted(outcome) for outcome in outcomes)
    count = len(outcomes) or 1
    fast = {f"{p:g}": sum(s > p for s in speedups) / count for p in THRESHOLDS} if timed else {}
    return {
        "correct": trusted / count,
        "fast_p": {**fast, "0": trusted / count},
        "speedup": math.fsum(speedups) / count if timed else None,
        "speedup_geomean": _geomean(speedups),
        "score": _mean([_score(outcome) for outcome in outcomes]),
    }


def _sound(trajectory: Trajectory) -> bool:
    return trajectory.stop is not TrajectoryStop.INFRASTRUCTURE


def _attempts(trajectory: Trajectory, turns: int) -> list[Outcome | None]:
    """Outcomes of the attempts; where the trajectory has no more, the last one if it is DONE, else None  [turns]."""
    made: list[Outcome | None] = [turn.outcome for turn in trajectory.turns if turn.outcome]
    after = made[-1] if made and trajectory.stop is TrajectoryStop.DONE else None
    return (made + [after] * turns)[:turns]


def _best(outcomes: Iterable[Outcome | None]) -> Outcome | None:
    """The trusted candidate with the highest speedup; else the outcome with the highest reward."""
    there = [outcome for outcome in outcomes if outcome]
    return max(there, key=lambda outcome: (_trusted(outcome), _speed(outcome), outcome.reward), default=None)


def _evaluation(outcome: Outcome | None) -> Evaluation | None:
    return outcome.evaluation if outcome else None


def _trusted(outcome: Outcome | None) -> bool:
    evaluation = _evaluation(outcome)
    return evaluation is not None and evaluation.trusted


def _speed(outcome: Outcome | None) -> float:
    evaluation = _evaluation(outcome)
    return (evaluation.speedup if evaluation else None) or 0.0


def _speedups(outcomes: Iterable[Outcome | None]) -> list[float]:
    return [speed for speed in map(_speed, outcomes) if speed > 0]


def _score(outcome: Outcome | None) -> float:
    return outcome.reward if outcome else 0.0


def _rewards(group: Group) -> list[float]:
    return [reward for one in group.trajectories if _sound(one) for reward in one.rewards if reward is not None]


def _counts(values: Iterable[str]) -> dict[str, int]:
    return {str(key): count for key, count in sorted(Counter(values).items())}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None


def _geomean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else None


def _deviation(values: Sequence[float]) -> float:
    """Of the population: 0 for one value."""
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) if values else 0.0
