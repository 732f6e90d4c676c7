"""Rows hold what the policy saw and sampled, once, and weights are the ones their names promise."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kernelwright.errors import UserError
from kernelwright.samples import Mode, minibatches, rows, token_weights, weighted
from kernelwright.types import Completion, Group, Outcome, Sample, Spans, Trajectory, TrajectoryStop, Turn


def turn(context: tuple[int, ...], sampled: tuple[int, ...], *, continues: bool = False, policy: int = 0) -> Turn:
    """A turn whose log-probabilities are the negative token ids."""
    return Turn(
        purpose="attempt",
        context=context,
        continues=continues,
        completion=Completion(
            tokens=sampled,
            logprobs=tuple(-float(token) for token in sampled),
            temperature=1.0,
            top_p=1.0,
            stop="end",
            policy=policy,
        ),
        text="",
        source=None,
        spans=Spans(),
        outcome=Outcome(feedback="", parts={"reward": 0.0}),
    )


def group(*trajectories: tuple[Turn, ...], task: str = "t") -> Group:
    return Group(
        task=task,
        trajectories=tuple(Trajectory(turns=turns, stop=TrajectoryStop.MAX_TURNS) for turns in trajectories),
    )


def numbered(of: Group) -> list[list[list[float]]]:
    """A different advantage for every sampled token: 100 per trajectory, 10 per turn, 1 per token."""
    return [
        [[100.0 * g + 10 * k + t for t in range(len(one.completion.tokens))] for k, one in enumerate(trajectory.turns)]
        for g, trajectory in enumerate(of.trajectories)
    ]


def all_kept(of: Group) -> list[list[bool]]:
    return [[True] * len(trajectory.turns) for trajectory in of.trajectories]


def row(origin: tuple[str, int, int], context: int, trained: int, advantage: float = 1.0) -> Sample:
    length = context + trained
    return Sample(
        tokens=tuple(range(length)),
        mask=(0,) * context + (1,) * trained,
        logprobs=(0.0,) * context + (-1.0,) * trained,
        advantages=(0.0,) * context + (advantage,) * trained,
        weights=(0.0,) * length,
        origin=origin,
    )


def random_group(seed: int) -> Group:
    draw = random.Random(seed)

    def some() -> tuple[int, ...]:
        return tuple(draw.randrange(1000) for _ in range(draw.randint(1, 4)))

    return group(
        *[
            tuple(turn(some(), some(), continues=k > 0 and draw.random() < 0.6) for k in range(draw.randint(0, 5)))
            for _ in range(draw.randint(1, 6))
        ]
    )


# ---------------------------------------------------------------- rows


def test_turns_that_continue_share_a_row():
    of = group((turn((5, 6), (7, 8)), turn((9,), (4,), continues=True)))
    assert rows(of, numbered(of), all_kept(of)) == [
        Sample(
            tokens=(5, 6, 7, 8, 9, 4),
            mask=(0, 0, 1, 1, 0, 1),
            logprobs=(0.0, 0.0, -7.0, -8.0, 0.0, -4.0),
            advantages=(0.0, 0.0, 0.0, 1.0, 0.0, 10.0),
            weights=(0.0,) * 6,
            origin=("t", 0, 0),
        )
    ]


def test_a_new_prompt_starts_a_new_row():
    of = group((turn((5,), (7,)), turn((5, 6), (8,)), turn((3,), (9,), continues=True)), (turn((1,), (2,)),))
    made = rows(of, numbered(of), all_kept(of), first=10)
    assert [one.tokens for one in made] == [(5, 7), (5, 6, 8, 3, 9), (1, 2)]
    assert [one.origin for one in made] == [("t", 10, 0), ("t", 10, 1), ("t", 11, 0)]


def test_turns_that_are_not_kept_are_context_then_cut_then_gone():
    turns = (turn((1,), (2,)), turn((3,), (4,), continues=True), turn((5,), (6,), continues=True), turn((7,), (8,)))
    of = group(turns)
    kept = [[False, True, False, False]]
    made = rows(of, [[[7.0], [10.0], [20.0], [30.0]]], kept)
    assert [(one.tokens, one.mask, one.logprobs) for one in made] == [
        ((1, 2, 3, 4), (0, 0, 0, 1), (0.0, 0.0, 0.0, -4.0))
    ]
    assert made[0].advantages == (0.0, 0.0, 0.0, 10.0)
    assert rows(of, numbered(of), [[False] * 4]) == []


def test_the_policy_of_a_row_is_the_oldest_that_sampled_a_trained_token():
    turns = (
        turn((1,), (2,), policy=3),
        turn((1,), (2,), continues=True, policy=4),
        turn((1,), (2,), continues=True, policy=5),
    )
    of = group(turns)
    assert rows(of, numbered(of), all_kept(of))[0].policy == 3
    assert rows(of, numbered(of), [[False, True, True]])[0].policy == 4


@pytest.mark.parametrize("seed", range(30))
def test_every_sampled_token_is_trained_once_with_its_own_numbers(seed: int):
    of = random_group(seed)
    made = rows(of, numbered(of), all_kept(of))
    trained = Counter(
        (one.origin[1], token, logprob, advantage)
        for one in made
        for token, bit, logprob, advantage in zip(one.tokens, one.mask, one.logprobs, one.advantages, strict=True)
        if bit
    )
    sampled = Counter(
        (g, token, -float(token), advantages[t])
        for g, trajectory in enumerate(of.trajectories)
        for one, advantages in zip(trajectory.turns, numbered(of)[g], strict=True)
        for t, token in enumerate(one.completion.tokens)
    )
    assert trained == sampled


@pytest.mark.parametrize("seed", range(30))
def test_every_prompt_and_reply_stands_in_a_row_token_for_token(seed: int):
    of = random_group(seed)
    made = {one.origin[1:]: one.tokens for one in rows(of, numbered(of), all_kept(of))}
    for g, trajectory in enumerate(of.trajectories):
        seen: tuple[int, ...] = ()
        start = 0
        for k, one in enumerate(trajectory.turns):
            start = start if one.continues else k
            seen = (seen if one.continues else ()) + one.context + one.completion.tokens
            assert made[g, start][: len(seen)] == seen


def test_broken_records_are_refused():
    first = group((turn((1,), (2,), continues=True),))
    with pytest.raises(ValueError, match="continues nothing"):
        rows(first, numbered(first), all_kept(first))
    of = group((turn((1,), (2, 3)),))
    with pytest.raises(ValueError, match="2 sampled tokens, 1 advantages"):
        rows(of, [[[1.0]]], all_kept(of))
    with pytest.raises(ValueError, match="2 keeps"):
        rows(of, numbered(of), [[True, True]])


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [0.1, 0.1]),
        ("seq_mean_token_mean", [0.25, 0.0625]),
        ("seq_mean_token_sum", [0.5, 0.5]),
        ("constant", [0.125, 0.125]),
        ("token_sum", [1.0, 1.0]),
    ],
)
def test_weights_of_lengths_two_and_eight(mode: Mode, expected: list[float]):
    batch = [row(("t", 0, 0), 1, 2), row(("t", 1, 0), 3, 8)]
    assert token_weights(batch, mode=mode, constant=4) == pytest.approx(expected)
    assert token_weights(batch, mode=mode, constant=4, unit="row") == pytest.approx(expected)


def test_a_trajectory_of_five_rows_weighs_as_one():
    batch = [row(("t", 0, k), 1, 2) for k in range(5)] + [row(("t", 1, 0), 1, 5)]
    assert token_weights(batch, mode="seq_mean_token_mean") == pytest.approx([1 / 20] * 5 + [1 / 10])
    assert token_weights(batch, mode="seq_mean_token_mean", unit="row") == pytest.approx([1 / 12] * 5 + [1 / 30])
    assert token_weights(batch, mode="seq_mean_token_sum") == pytest.approx([1 / 2] * 6)
    assert token_weights(batch, mode="seq_mean_token_sum", unit="row") == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("unit", ["trajectory", "row"])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("seed", range(10))
def test_weights_of_a_mean_sum_to_one(mode: Mode, unit: Any, seed: int):
    of = random_group(seed)
    made = weighted(rows(of, numbered(of), all_kept(of)), mode=mode, unit=unit)
    assert not made or sum(sum(one.weights) for one in made) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(10))
def test_folding_multiplies_advantages_where_the_mask_is_one(seed: int):
    of = random_group(seed)
    plain = rows(of, numbered(of), all_kept(of))
    weights = token_weights(plain, mode="seq_mean_token_mean")
    for before, after, weight in zip(plain, weighted(plain, mode="seq_mean_token_mean"), weights, strict=True):
        assert after.weights == pytest.approx([weight * bit for bit in before.mask])
        assert after.advantages == pytest.approx([weight * advantage for advantage in before.advantages])
        assert (after.tokens, after.mask, after.logprobs) == (before.tokens, before.mask, before.logprobs)


def test_weights_are_folded_in_once():
    once = weighted([row(("t", 0, 0), 1, 2)])
    with pytest.raises(ValueError, match="weights already"):
        weighted(once)
    assert weighted([]) == []


@pytest.mark.parametrize(
    "knobs",
    [{"mode": "token-mean"}, {"unit": "episode"}, {"mode": "constant"}, {"mode": "constant", "constant": 0}],
)
def test_bad_knobs_are_one_line(knobs: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        weighted([row(("t", 0, 0), 1, 2)], **knobs)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- minibatches


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("seed", range(5))
def test_minibatches_lose_nothing_and_cut_no_trajectory(parts: int, seed: int):
    draw = random.Random(seed)
    batch = [
        row((task, g, k), 1, draw.randint(1, 4)) for task in "ab" for g in range(5) for k in range(draw.randint(1, 3))
    ]
    made = minibatches(batch, parts, seed)
    assert Counter(one for part in made for one in part) == Counter(batch)
    homes = [{one.origin[:2] for one in part} for part in made]
    assert sum(len(home) for home in homes) == 10
    assert len(made) == min(parts, 10)
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


def test_minibatches_are_a_function_of_the_seed():
    batch = [row(("t", g, 0), 1, 1) for g in range(20)]
    assert minibatches(batch, 2, (3, 1)) == minibatches(batch, 2, (3, 1))
    assert minibatches(batch, 2, (3, 1)) != minibatches(batch, 2, (3, 2))
    assert minibatches([], 2, 0) == []
    with pytest.raises(UserError, match="1 or more"):
        minibatches(batch, 0, 0)
