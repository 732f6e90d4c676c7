"""Trajectories and advantages -> training rows, and how much each token of a row counts.

Axes: B rows, L tokens of a row, G trajectories of a group, K turns of a trajectory, T sampled tokens of a turn.

A row is a run of turns in which each prompt only added tokens to the one before (`Turn.continues`), so that one forward
pass sees exactly what the policy saw at each of those turns. Engines sum over rows: whatever a loss divides by is in
`weights`, and `advantages` are multiplied by them, before a row leaves this module.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Group, Sample, Trajectory

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "token_sum"]
Unit = Literal["trajectory", "row"]


def rows(
    group: Group, advantages: Sequence[Sequence[Sequence[float]]], keep: Sequence[Sequence[bool]], *, first: int = 0
) -> list[Sample]:
    """Training rows of a group; rows without a trained token are left out, tokens after the last trained one are cut.

    Args:
        group: the trajectories of one task.
        advantages: `[G][K][T]`, one per sampled token.
        keep: `[G][K]`, which turns are trained on; the tokens of others are context.
        first: number given to the group's first trajectory in `Sample.origin`. A task that is drawn twice in a step
            needs different numbers, since (task, trajectory) is what tells sequences apart.

    Returns:
        Rows with `weights` all 0 and `advantages` as given; `weighted` fills in the weights.

    Raises:
        ValueError: `advantages` or `keep` do not have the shape of the group, or a first turn continues nothing.
    """
    made: list[Sample] = []
    for g, trajectory in enumerate(group.trajectories):
        if len(advantages[g]) != len(trajectory.turns) or len(keep[g]) != len(trajectory.turns):
            raise ValueError(f"{len(trajectory.turns)} turns, {len(advantages[g])} advantages and {len(keep[g])} keeps")
        for turns in _runs(trajectory):
            row = _row(trajectory, turns, advantages[g], keep[g], origin=(group.task, first + g, turns[0]))
            if row is not None:
                made.append(row)
    return made


def token_weights(
    batch: Sequence[Sample], *, mode: Mode = "token_mean", constant: float | None = None, unit: Unit = "trajectory"
) -> list[float]:
    """Weight of a trained token of each row `[B]`, over the rows of one optimiser step.

    With N trained tokens in all, S sequences and n trained tokens in the sequence of the row:

        token_mean            1 / N
        seq_mean_token_mean   1 / (S n)
        seq_mean_token_sum    1 / S
        constant              1 / (S constant)       Dr. GRPO's and Dr. Kernel's sum over tokens divided by a constant
        token_sum             1

    Args:
        batch: the rows.
        mode: see above.
        constant: length in tokens that stands for n in mode "constant"; other modes ignore it.
        unit: what a sequence is: a whole trajectory, however many rows it became, or each row (Kevin and Dr. Kernel,
            whose training sample is a turn).

    Raises:
        UserError: an unknown mode or unit, mode "constant" without a positive `constant`.
    """
    _check_mode(mode, constant, unit)
    sequences = [_sequence(row, unit, number) for number, row in enumerate(batch)]
    trained: Counter[tuple[str, int]] = Counter()
    for row, sequence in zip(batch, sequences, strict=True):
        trained[sequence] += sum(row.mask)
    tokens, count = trained.total(), len(trained)
    weight_of = {
        "token_mean": lambda _: 1.0 / tokens,
        "seq_mean_token_mean": lambda sequence: 1.0 / (count * trained[sequence]),
        "seq_mean_token_sum": lambda _: 1.0 / count,
        "constant": lambda _: 1.0 / (count * (constant or 1.0)),
        "token_sum": lambda _: 1.0,
    }[mode]
    return [weight_of(sequence) for sequence in sequences]


def weighted(
    batch: Sequence[Sample], *, mode: Mode = "token_mean", constant: float | None = None, unit: Unit = "trajectory"
) -> list[Sample]:
    """The rows with weights filled in and multiplied into the advantages. `batch` is all rows of one optimiser step.

    The clipped losses are positively homogeneous in the advantage (`loss(w A) = w loss(A)` for w >= 0), so the plain
    sum that an engine takes is then the weighted mean that `mode` names. Arguments and errors as in `token_weights`.

    Raises:
        ValueError: a row that has weights already; folding them in twice would square them.
    """
    if any(any(row.weights) for row in batch):
        raise ValueError("these rows have weights already")
    made: list[Sample] = []
    for row, weight in zip(batch, token_weights(batch, mode=mode, constant=constant, unit=unit), strict=True):
        made.append(
            replace(
                row,
                weights=tuple(weight * bit for bit in row.mask),
                advantages=tuple(weight * advantage for advantage in row.advantages),
            )
        )
    return made


def minibatches(batch: Sequence[Sample], parts: int, seed: int | str | tuple[int, ...]) -> list[list[Sample]]:
    """Split rows into at most `parts` non-empty lists by trajectory: all rows of a trajectory stay together, in order.

    The shuffle depends on `seed` and on the order of the rows alone. Lists differ by at most one trajectory in size.

    Raises:
        UserError: `parts` below 1.
    """
    if parts < 1:
        raise UserError(f"rows are cut into 1 or more minibatches, got {parts}")
    by_trajectory: dict[tuple[str, int], list[Sample]] = {}
    for row in batch:
        by_trajectory.setdefault(row.origin[:2], []).append(row)
    trajectories = list(by_trajectory.values())
    random.Random(repr(seed)).shuffle(trajectories)
    parts = min(parts, len(trajectories))
    cuts = [len(trajectories) * part // parts for part in range(parts + 1)] if parts else [0]
    return [[row for trajectory in trajectories[start:end] for row in trajectory] for start, end in pairwise(cuts)]


def _runs(trajectory: Trajectory) -> Iterator[list[int]]:
    """Numbers of the turns that share a row: each run starts where a prompt does not continue the one before."""
    run: list[int] = []
    for k, turn in enumerate(trajectory.turns):
        if turn.continues and not run:
            raise ValueError("the first turn of a trajectory continues nothing")
        if run and not turn.continues:
            yield run
            run = []
        run.append(k)
    if run:
        yield run


def _row(
    trajectory: Trajectory,
    run: Sequence[int],
    advantages: Sequence[Sequence[float]],
    keep: Sequence[bool],
    *,
    origin: tuple[str, int, int],
) -> Sample | None:
    """One row of the turns `run`, None if none of them is kept."""
    kept = [k for k in run if keep[k]]
    if not kept:
        return None
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    values: list[float] = []
    for k in run[: run.index(kept[-1]) + 1]:
        turn, completion = trajectory.turns[k], trajectory.turns[k].completion
        if len(advantages[k]) != len(completion.tokens):
            raise ValueError(f"turn {k} has {len(completion.tokens)} sampled tokens, {len(advantages[k])} advantages")
        blank, trained = len(turn.context), int(keep[k])
        tokens += (*turn.context, *completion.tokens)
        mask += [0] * blank + [trained] * len(completion.tokens)
        logprobs += [0.0] * blank + [trained * logprob for logprob in completion.logprobs]
        values += [0.0] * blank + [trained * advantage for advantage in advantages[k]]
    return Sample(
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantages=tuple(values),
        weights=(0.0,) * len(tokens),
        origin=origin,
        # the oldest weights that sampled a trained token of it, so that staleness is never understated
        policy=min(trajectory.turns[k].completion.policy for k in kept),
    )


def _sequence(row: Sample, unit: Unit, number: int) -> tuple[str, int]:
    return row.origin[:2] if unit == "trajectory" else ("", number)


def _check_mode(mode: str, constant: float | None, unit: str) -> None:
    if mode not in get_args(Mode):
        raise UnknownName("aggregation", mode, get_args(Mode))
    if unit not in get_args(Unit):
        raise UnknownName("unit of aggregation", unit, get_args(Unit))
    if mode == "constant" and (constant is None or not constant > 0):
        raise UserError(f"aggregation 'constant' with constant={constant}; give the length in tokens to divide by")
