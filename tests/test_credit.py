"""Credit: worked examples, identities between estimators, and exact expectations by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kernelwright.credit import PRESETS, credit, turn_returns
from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Completion, Group, Outcome, Spans, Trajectory, TrajectoryStop, Turn

Rewards = Sequence[Sequence[float | None]]  # [G][K], None for a summary


def turn(reward: float | None, length: int = 1) -> Turn:
    return Turn(
        purpose="summary" if reward is None else "attempt",
        context=(1,),
        continues=False,
        completion=Completion(tokens=(2,) * length, logprobs=(-0.5,) * length, temperature=1.0, top_p=1.0, stop="end"),
        text="",
        source=None,
        spans=Spans(),
        outcome=None
        if reward is None
        else Outcome(feedback="", parts={"correct": 0.25 * reward, "speed": 0.75 * reward}),
    )


def trajectory(rewards: Sequence[float | None]) -> Trajectory:
    return Trajectory(turns=tuple(turn(reward) for reward in rewards), stop=TrajectoryStop.MAX_TURNS)


def group(rewards: Rewards) -> Group:
    return Group(task="t", trajectories=tuple(trajectory(row) for row in rewards))


def everything(of: Group) -> list[list[bool]]:
    return [[True] * len(one.turns) for one in of.trajectories]


def advantages(
    rewards: Rewards, estimator: Callable[..., Any], keep: list[list[bool]] | None = None
) -> list[list[float]]:
    """Advantages [G][K] of turns of one token each."""
    of = group(rewards)
    return [[tokens[0] for tokens in row] for row in estimator(of, keep or everything(of))]


def single(rewards: Sequence[float], estimator: Callable[..., Any]) -> list[float]:
    """Advantages [G] of trajectories of one turn."""
    return [row[0] for row in advantages([[reward] for reward in rewards], estimator)]


def ragged(seed: int, *, summaries: bool = False) -> list[list[float | None]]:
    draw = random.Random(seed)
    rows: list[list[float | None]] = []
    for _ in range(draw.randint(2, 6)):
        row: list[float | None] = [round(draw.random() * 3, 3) for _ in range(draw.randint(1, 5))]
        if summaries:
            row.insert(draw.randrange(len(row) + 1), None)
        rows.append(row)
    return rows


# ---------------------------------------------------------------- worked examples


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("grpo", [0.8660, -0.8660, -0.8660, 0.8660]),
        ("kevin", [0.8660, -0.8660, -0.8660, 0.8660]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [0.6667, -0.6667, -0.6667, 0.6667]),
        ("trloo", [0.6667, -0.6667, -0.6667, 0.6667]),
        ("reinforce", [1, 0, 0, 1]),
    ],
)
def test_two_winners_of_four(preset: str, expected: list[float]):
    assert single([1, 0, 0, 1], PRESETS[preset]) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("grpo", [-0.5337, 0.2287, 1.2962, -0.9912]), ("rloo", [-0.4667, 0.2, 1.1333, -0.8667])],
)
def test_graded_rewards(preset: str, expected: list[float]):
    assert single([0.3, 0.8, 1.5, 0.0], PRESETS[preset]) == pytest.approx(expected, abs=5e-5)


def test_returns_by_hand():
    rewards = trajectory([0, 1.5, 2.3, 0])
    assert turn_returns(rewards, gamma=0.4) == pytest.approx([0.968, 2.42, 2.3, 0])
    assert turn_returns(trajectory([0, 1.2, 2, 0])) == pytest.approx([3.2, 3.2, 2, 0])
    # .4 * 1.5 = .6 and .16 * 2.3 = .368 at the first turn; .4 * 2.3 = .92 < 1.5 at the second
    assert turn_returns(rewards, returns="max_to_go", gamma=0.4) == pytest.approx([0.6, 1.5, 2.3, 0])
    assert turn_returns(rewards, returns="total") == pytest.approx([3.8] * 4)
    assert turn_returns(rewards, returns="total", gamma=0.4) == pytest.approx([0.968] * 4)
    assert turn_returns(rewards, gamma=0.0) == [0, 1.5, 2.3, 0]


def test_a_repair_is_not_punished_for_where_it_started():
    rewards = [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]]
    plain = advantages(rewards, partial(credit, gamma=0.4, compare="attempt"))
    assert plain == [pytest.approx([-0.6, -0.25, 0.0]), pytest.approx([0.6, 0.25, 0.0])]
    # expected of 1.0 before: 0.5 + 0.4 * 0.25 = 0.6 at the second attempt, 0.5 at the third
    aware = advantages(rewards, partial(credit, gamma=0.4, compare="attempt", carry=0.5))
    assert aware == [pytest.approx([-0.6, 0.05, 0.125]), pytest.approx([0.6, -0.05, -0.125])]
    # a summary between two attempts changes neither
    longer = [[0.0, None, 0.5, 1.0], [1.0, 1.0, 1.0]]
    assert advantages(longer, partial(credit, gamma=0.4, compare="attempt", carry=0.5)) == [
        pytest.approx([-0.6, 0.05, 0.05, 0.125]),
        pytest.approx([0.6, -0.05, -0.125]),
    ]


def test_who_is_done_keeps_earning_until_the_others_are():
    done, others = TrajectoryStop.DONE, ([0.0, 0.5, 1.0], [1.0, None, 0.0, 1.5])
    choice = partial(credit, gamma=0.4, compare="attempt", carry=0.5, after_done="last")
    for stop, written_out in ((done, [1.8, 1.8, 1.8]), (TrajectoryStop.CONTEXT_FULL, [1.8])):
        short = Trajectory(turns=(turn(1.8),), stop=stop)
        of = Group(task="t", trajectories=(short, *map(trajectory, others)))
        same = Group(task="t", trajectories=tuple(map(trajectory, (written_out, *others))))
        got, expected = choice(of, everything(of)), choice(same, everything(same))
        assert got == [expected[0][:1], *expected[1:]]
    # by hand: 1.8 (1 + 0.4) against 0 + 0.4 * 1
    pair = Group(task="t", trajectories=(Trajectory(turns=(turn(1.8),), stop=done), trajectory([0.0, 1.0])))
    (first,), (second, _) = credit(pair, everything(pair), gamma=0.4, compare="attempt", after_done="last")
    assert (first[0], second[0]) == (pytest.approx(1.06), pytest.approx(-1.06))
    # without it the same two are 1.8 and 0.4, and the repair at the second attempt has nobody to be compared with
    (first,), (second, third) = credit(pair, everything(pair), gamma=0.4, compare="attempt")
    assert (first[0], second[0], third[0]) == (pytest.approx(0.7), pytest.approx(-0.7), 0.0)


def test_what_is_not_kept_stays_out_when_it_is_repeated():
    of = Group(
        task="t",
        trajectories=(Trajectory(turns=(turn(9.0),), stop=TrajectoryStop.DONE), *map(trajectory, ([0, 1], [0, 3]))),
    )
    got = credit(of, [[False], [True, True], [True, True]], compare="attempt", after_done="last")
    assert got == [[[0.0]], [[-1.0], [-1.0]], [[1.0], [1.0]]]


def test_a_summary_takes_no_time_and_has_the_return_of_what_follows():
    # rewards to go of (1, 2) at gamma .5 are (2, 2); nothing follows the last note
    assert turn_returns(trajectory([1, None, 2, None]), gamma=0.5) == [2, 2, 2, 0]
    assert turn_returns(trajectory([None, 1, 2]), gamma=0.5) == [2, 2, 2]
    assert turn_returns(trajectory([1, None, 2]), returns="total") == [3, 3, 3]
    assert turn_returns(trajectory([3, None, 2]), returns="max_to_go", gamma=0.5) == [3, 2, 2]
    assert turn_returns(trajectory([])) == []


def test_kevin_compares_all_turns_of_the_task():
    # returns (.4 * 1 + 0, 1) and (2 + .4 * 0, 0): mean .85, deviation sqrt((.45^2 + .15^2 + 1.15^2 + .85^2) / 3)
    deviation = math.sqrt((0.45**2 + 0.15**2 + 1.15**2 + 0.85**2) / 3)
    expected = [[-0.45 / deviation, 0.15 / deviation], [1.15 / deviation, -0.85 / deviation]]
    got = advantages([[0, 1], [2, 0]], PRESETS["kevin"])
    assert got == [pytest.approx(row, rel=1e-5) for row in expected]


def test_trloo_compares_equal_attempt_numbers():
    # returns to go (3, 2), (1, 1), (5,); the second attempt has two members, each the other's baseline
    got = advantages([[1, 2], [0, 1], [5]], PRESETS["trloo"])
    assert got == [pytest.approx([3 - 3, 2 - 1]), pytest.approx([1 - 4, 1 - 2]), pytest.approx([5 - 2])]


def test_supo_statistics_are_over_trajectories_not_rows():
    # four rollouts of 3, 1, 2, 1 segments with returns 1, 0, 0, 1: mean .5, deviation .5774, advantages +-.8660;
    # over rows they would be .8018 and -1.0690
    got = advantages([[None, None, 1], [0], [None, 0], [1]], PRESETS["grpo"])
    expected = [[0.8660] * 3, [-0.8660], [-0.8660] * 2, [0.8660]]
    assert got == [pytest.approx(row, abs=5e-5) for row in expected]


def test_advantages_are_spread_over_the_tokens_of_a_turn():
    of = Group(
        task="t",
        trajectories=(
            Trajectory(turns=(turn(1.0, 3), turn(0.0, 2)), stop=TrajectoryStop.DONE),
            Trajectory(turns=(turn(0.0, 1),), stop=TrajectoryStop.DONE),
        ),
    )
    # rewards to go 1, 0, 0: mean 1/3
    got = credit(of, everything(of))
    assert got == [[pytest.approx([2 / 3] * 3), pytest.approx([-1 / 3] * 2)], [pytest.approx([-1 / 3])]]


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize("seed", range(20))
def test_rloo_is_a_multiple_of_dr_grpo(seed: int):
    rewards = ragged(seed)
    k = len(rewards)
    for loo, plain in zip(advantages(rewards, PRESETS["rloo"]), advantages(rewards, PRESETS["dr_grpo"]), strict=True):
        assert loo == pytest.approx([k / (k - 1) * value for value in plain])


@pytest.mark.parametrize("seed", range(20))
def test_one_turn_makes_kevin_grpo_and_trloo_rloo(seed: int):
    draw = random.Random(seed)
    rewards = [draw.random() for _ in range(draw.randint(2, 8))]
    assert single(rewards, PRESETS["kevin"]) == pytest.approx(single(rewards, PRESETS["grpo"]))
    assert single(rewards, PRESETS["trloo"]) == pytest.approx(single(rewards, PRESETS["rloo"]))


@pytest.mark.parametrize("seed", range(20))
def test_centred_advantages_sum_to_zero(seed: int):
    rewards = ragged(seed)
    of_trajectories = [row[0] for row in advantages(rewards, PRESETS["dr_grpo"])]
    of_turns = [value for row in advantages(rewards, PRESETS["kevin"]) for value in row]
    assert sum(of_trajectories) == pytest.approx(0, abs=1e-12)
    assert sum(of_turns) == pytest.approx(0, abs=1e-9)
    by_attempt = advantages(rewards, partial(credit, compare="attempt"))
    for number in range(5):
        assert sum(row[number] for row in by_attempt if len(row) > number) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", range(5))
def test_order_of_trajectories_does_not_matter(preset: str, seed: int):
    rewards = ragged(seed, summaries=True)
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    straight = advantages(rewards, PRESETS[preset])
    shuffled = advantages([rewards[g] for g in order], PRESETS[preset])
    assert shuffled == [pytest.approx(straight[g]) for g in order]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "reinforce"])
def test_a_constant_on_every_total_changes_nothing(preset: str):
    # with one turn a trajectory every return moves by the constant, whatever the estimator
    draw = random.Random(7)
    rewards = [draw.random() for _ in range(6)]
    moved = single([reward + 5 for reward in rewards], PRESETS[preset])
    assert moved == pytest.approx(single(rewards, PRESETS[preset]), abs=1e-9)


@pytest.mark.parametrize("preset", ["grpo", "kevin", "kevin_max"])
def test_scaled_advantages_do_not_see_the_unit_of_reward(preset: str):
    rewards = [[0.0, 1.0], [2.0, 0.5], [0.1, 0.7]]
    larger = [[1000 * reward for reward in row] for row in rewards]
    expected = advantages(rewards, PRESETS[preset])
    assert advantages(larger, PRESETS[preset]) == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize("seed", range(10))
def test_a_summary_changes_no_attempt_and_has_the_advantage_of_the_next(seed: int):
    plain = ragged(seed)
    mixed = [[row[0], None, *row[1:]] for row in plain]
    for preset in PRESETS.values():
        without, having = advantages(plain, preset), advantages(mixed, preset)
        for row, longer in zip(without, having, strict=True):
            assert [longer[0], *longer[2:]] == pytest.approx(row)
            if len(row) > 1:
                assert longer[1] == pytest.approx(row[1])


# ---------------------------------------------------------------- expectations by enumeration


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def score(policy: Sequence[float], action: int) -> list[float]:
    """Gradient of log policy[action] with respect to the logits."""
    return [(index == action) - probability for index, probability in enumerate(policy)]


@pytest.mark.parametrize(("preset", "factor"), [("rloo", 1.0), ("dr_grpo", 2 / 3), ("reinforce", 1.0), ("trloo", 1.0)])
def test_expected_gradient_of_a_bandit(preset: str, factor: float):
    """All 27 groups of three: leave-one-out is unbiased, the mean including oneself shrinks by 1 - 1/k."""
    policy, rewards, k = softmax([0.3, -0.2, 0.9]), [1.0, 0.2, -0.5], 3
    expected = sum(p * r for p, r in zip(policy, rewards, strict=True))
    truth = [p * (r - expected) for p, r in zip(policy, rewards, strict=True)]
    mean = [0.0] * 3
    for actions in itertools.product(range(3), repeat=k):
        chance = math.prod(policy[action] for action in actions)
        estimate = single([rewards[action] for action in actions], PRESETS[preset])
        for action, advantage in zip(actions, estimate, strict=True):
            for index, slope in enumerate(score(policy, action)):
                mean[index] += chance * advantage * slope / k
    assert mean == pytest.approx([factor * value for value in truth], abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "unbiased"),
    [
        (PRESETS["trloo"], True),
        (partial(credit, compare="task", baseline="leave_one_out"), True),
        (partial(credit, returns="total", compare="trajectory", baseline="leave_one_out"), True),
        (PRESETS["reinforce"], True),
        # what is expected of the reward before depends on the history alone
        (partial(credit, compare="attempt", baseline="leave_one_out", carry=0.7), True),
        (partial(credit, compare="task", baseline="leave_one_out", carry=0.7), True),
        # the mean over all turns holds the trajectory's own: biased, as Kevin's is
        (partial(credit, compare="task"), False),
    ],
)
def test_expected_gradient_of_two_turns(estimator: Callable[..., Any], unbiased: bool):
    """Two actions, twice; the second policy depends on the first action. All groups of two trajectories."""
    policies = {(): softmax([0.2, -0.4]), (0,): softmax([1.0, 0.1]), (1,): softmax([-0.5, 0.3])}
    reward = {(0,): 0.1, (1,): 0.7, (0, 0): 1.0, (0, 1): -0.3, (1, 0): 0.4, (1, 1): 2.0}
    paths = list(itertools.product(range(2), repeat=2))

    def chance(path: tuple[int, ...]) -> float:
        return policies[()][path[0]] * policies[path[:1]][path[1]]

    def gradient(weigh: Callable[[tuple[int, ...]], tuple[float, float]], path: tuple[int, ...]) -> list[float]:
        """Six numbers: d log p of both turns times their weights, laid out state by state."""
        slots = {(): [0.0, 0.0], (0,): [0.0, 0.0], (1,): [0.0, 0.0]}
        for state, action, weight in zip(((), path[:1]), path, weigh(path), strict=True):
            slots[state] = [weight * slope for slope in score(policies[state], action)]
        return [slope for slot in slots.values() for slope in slot]

    def value(path: tuple[int, ...]) -> float:
        return reward[path[:1]] + reward[path]

    truth = [0.0] * 6
    for path in paths:
        for index, slope in enumerate(gradient(lambda path: (value(path), value(path)), path)):
            truth[index] += chance(path) * slope
    mean = [0.0] * 6
    for first, second in itertools.product(paths, repeat=2):
        given = advantages([[reward[path[:1]], reward[path]] for path in (first, second)], estimator)
        for path, row in zip((first, second), given, strict=True):
            for index, slope in enumerate(gradient(lambda _, row=row: (row[0], row[1]), path)):
                mean[index] += chance(first) * chance(second) * slope / 2
    assert (mean == pytest.approx(truth, abs=1e-12)) is unbiased


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "reinforce"])
def test_a_group_of_one_is_refused(preset: str):
    with pytest.raises(UserError, match="group_size >= 2"):
        advantages([[1.0, 0.5]], PRESETS[preset])


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "reinforce"])
def test_a_lone_survivor_is_not_credited(preset: str):
    assert advantages([[1.0, 0.5], [9.0]], PRESETS[preset], keep=[[True, True], [False]]) == [[0, 0], [0]]
    assert advantages([[1.0, 0.5], []], PRESETS[preset]) == [[0, 0], []]


def test_a_lone_attempt_number_is_not_credited():
    got = advantages([[1, 2, 7], [0, 1]], PRESETS["trloo"])
    assert got[0][2] == 0
    assert got[0][:2] == [10 - 1, 9 - 1]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "reinforce"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-9, 1e9])
def test_equal_returns_give_exactly_zero(preset: str, reward: float):
    assert single([reward] * 7, PRESETS[preset]) == [0.0] * 7


def test_turns_that_are_not_kept_are_out_of_the_statistics():
    keep = [[True, True], [True, False], [False, False]]
    got = advantages([[1, 2], [4, 100], [50, 50]], partial(credit, gamma=0.0), keep=keep)
    assert got == [pytest.approx([1 - 7 / 3, 2 - 7 / 3]), pytest.approx([4 - 7 / 3, 0]), [0, 0]]


def test_rewards_after_a_dropped_turn_still_count():
    got = advantages([[0, 8], [0, 0]], partial(credit, gamma=0.5), keep=[[True, False], [True, False]])
    assert got == [[2, 0], [-2, 0]]


def test_one_reward_part_alone():
    whole = advantages([[1.0], [3.0]], partial(credit))
    part = advantages([[1.0], [3.0]], partial(credit, part="correct"))
    assert part == [pytest.approx([0.25 * value for value in row]) for row in whole]
    with pytest.raises(UnknownName, match="did you mean 'correct'"):
        advantages([[1.0], [3.0]], partial(credit, part="corect"))


@pytest.mark.parametrize(
    "knobs",
    [
        {"returns": "to_go"},
        {"compare": "groups"},
        {"baseline": "loo"},
        {"scale": "sd"},
        {"gamma": 1.5},
        {"gamma": -0.1},
        {"gamma": math.nan},
        {"compare": "none", "scale": "std"},
        {"compare": "none", "baseline": "leave_one_out"},
        {"carry": 1.5},
        {"carry": 0.5, "returns": "total"},
        {"carry": 0.5, "compare": "trajectory"},
    ],
)
def test_bad_knobs_are_one_line(knobs: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        advantages([[1.0], [2.0]], partial(credit, **knobs))
    assert "\n" not in str(caught.value)


def test_a_keep_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="keep has lengths"):
        advantages([[1.0], [2.0]], credit, keep=[[True], [True, True]])
