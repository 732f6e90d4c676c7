"""Losses: worked values, identities, and an independent oracle in plain Python from rewards to gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelwright.credit import credit
from kernelwright.errors import UnknownName, UserError
from kernelwright.loss import clipped, divergence, sequence
from kernelwright.samples import rows as training_rows
from kernelwright.samples import weighted
from kernelwright.types import Completion, Group, Outcome, Sample, Spans, Trajectory, TrajectoryStop, Turn

LOSSES = {"clipped": clipped, "sequence": sequence}


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one(advantage: float, ratio: float, **knobs: Any) -> float:
    """Loss of one token of weight 1."""
    loss, _ = clipped(vector(math.log(ratio)), vector(0.0), vector(advantage), vector(1.0), **knobs)
    return loss.item()


# ---------------------------------------------------------------- worked values


def test_clip_by_hand():
    assert one(1, 1.1) == pytest.approx(-1.1)
    assert one(1, 5) == pytest.approx(-1.28)
    assert one(1, 0.5) == pytest.approx(-0.5)
    assert one(-1, 0.5) == pytest.approx(0.8)
    assert one(-1, 5) == pytest.approx(5)


def test_dual_clip_by_hand():
    assert one(-1, 5, dual=3.0) == pytest.approx(3)
    assert one(-1, 0.5, dual=3.0) == pytest.approx(0.8)
    assert one(1, 5, dual=3.0) == pytest.approx(-1.28)
    assert one(-2, 4, dual=3.0) == pytest.approx(6)


def test_sequence_ratio_by_hand():
    # the mean of the log ratios (.3, -.1, .2, 0) is .1
    new, old = vector(0.3, -0.1, 0.2, 0.0), vector(0, 0, 0, 0)
    wide = partial(sequence, low=0.9, high=0.9)
    loss, _ = wide(new, old, vector(1, 1, 1, 1) / 4, vector(1, 1, 1, 1) / 4, torch.zeros(4).long())
    assert loss.item() == pytest.approx(-1.10517, abs=5e-6)
    # two rows, told apart by number alone, in any order
    loss, _ = wide(new, old, vector(1, 10, 1, 10), vector(1, 1, 1, 1), torch.tensor([4, 2, 4, 2]))
    assert loss.item() == pytest.approx(-2 * math.exp(0.25) - 20 * math.exp(-0.05))
    _, metrics = sequence(new, old, vector(1, 1, -1, 1), vector(1, 1, 1, 1), torch.tensor([0, 1, 0, 1]))
    assert metrics["clip_fraction"].item() == 0.25


def test_divergences_by_hand():
    new, reference = vector(-1.0), vector(-0.5)
    assert divergence(new, reference, kl="k1").item() == pytest.approx(-0.5)
    assert divergence(new, reference, kl="k2").item() == pytest.approx(0.125)
    assert divergence(new, reference, kl="k3").item() == pytest.approx(math.exp(0.5) - 1.5)
    with pytest.raises(UnknownName):
        divergence(new, reference, kl="none")


def test_penalties_by_hand():
    knobs = {"kl": "k2", "beta": 0.5, "reference": vector(0.0, 0.0), "entropy": vector(2.0, 4.0)}
    new, weights = vector(-1.0, -3.0), vector(0.25, 0.75)
    loss, metrics = clipped(new, new.clone(), vector(0, 0), weights, **knobs, entropy_coefficient=0.1)
    # .5 (.25 * .5 + .75 * 4.5) - .1 (.25 * 2 + .75 * 4)
    assert loss.item() == pytest.approx(1.75 - 0.35)
    assert metrics["kl_to_reference"].item() == pytest.approx(2.5)
    assert metrics["entropy"].item() == pytest.approx(3.0)
    assert clipped(new, new, vector(0, 0), weights, entropy=vector(2.0, 4.0))[0].item() == 0


def test_metrics_by_hand():
    new = vector(math.log(2), math.log(0.5), math.log(0.5), 0.0)
    _, metrics = clipped(new, torch.zeros_like(new), vector(1, 1, -1, 1), vector(1, 1, 1, 1))
    assert metrics["clip_fraction"].item() == 0.5
    assert metrics["ratio_mean"].item() == pytest.approx(1.0)
    # r - 1 - log r: 1 - log 2, twice log 2 - .5, and 0
    assert metrics["kl_to_old"].item() == pytest.approx((1 - math.log(2) + 2 * (math.log(2) - 0.5)) / 4)


# ---------------------------------------------------------------- identities


def random_tokens(seed: int, count: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """new (with gradient), old, advantages times weights, weights and row numbers; ratios well beyond the bounds."""
    make = torch.Generator().manual_seed(seed)
    old = -torch.rand(count, generator=make, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(count, generator=make, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(count, generator=make, dtype=torch.float64)
    advantages = weights * torch.randn(count, generator=make, dtype=torch.float64)
    rows = torch.sort(torch.randint(0, 6, (count,), generator=make)).values
    return new, old, advantages, weights, rows


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_minus_the_advantage(name: str):
    new, _, advantages, weights, rows = random_tokens(0)
    loss, metrics = LOSSES[name](new, new.detach().clone(), advantages, weights, rows)
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.allclose(gradient, -advantages, atol=1e-15)
    assert metrics["clip_fraction"].item() == 0
    assert metrics["ratio_mean"].item() == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_parts_of_whole_rows_add_up(name: str, seed: int):
    new, old, advantages, weights, rows = random_tokens(seed)
    knobs = {"kl": "k3", "beta": 0.1, "reference": old - 0.1, "dual": 3.0}
    loss, metrics = LOSSES[name](new, old, advantages, weights, rows, **knobs)
    (gradient,) = torch.autograd.grad(loss, new)
    total, gradients, means = 0.0, torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
    for part in (rows <= 1, rows > 1):
        cut = [values[part] for values in (new, old, advantages, weights, rows)]
        some, measured = LOSSES[name](*cut, **knobs | {"reference": (old - 0.1)[part]})
        total += some.item()
        gradients += torch.autograd.grad(some, new)[0]
        for key, value in measured.items():
            means[key] += value.item() * int(part.sum()) / len(part)
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(gradients, gradient, rtol=1e-12, atol=1e-15)
    assert means == pytest.approx({key: value.item() for key, value in metrics.items()}, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_surrogates_are_positively_homogeneous(name: str):
    new, old, advantages, weights, rows = random_tokens(3)
    loss, before = LOSSES[name](new, old, advantages, weights, rows, dual=3.0)
    larger, after = LOSSES[name](new, old, 7 * advantages, 7 * weights, rows, dual=3.0)
    assert larger.item() == pytest.approx(7 * loss.item())
    assert before["clip_fraction"] == after["clip_fraction"]
    assert 0 < before["clip_fraction"].item() < 1


def test_sequence_token_form_has_the_gradient_of_the_sequence_form():
    """With one advantage a row: the gradient of sum_i W_i min(s_i A_i, clip(s_i) A_i), s_i differentiated whole."""
    new, old, _, _, rows = random_tokens(5)
    per_row = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    count = torch.bincount(rows, minlength=6)
    weights = (1.0 / (6 * count))[rows]
    loss, _ = sequence(new, old, per_row[rows] * weights, weights, rows, low=0.1, high=0.1)
    ratios = torch.stack([(new - old)[rows == row].mean().exp() for row in range(6)])
    whole = -torch.minimum(ratios * per_row, ratios.clamp(0.9, 1.1) * per_row).mean()
    assert loss.item() == pytest.approx(whole.item())
    got, expected = torch.autograd.grad(loss, new)[0], torch.autograd.grad(whole, new)[0]
    assert torch.allclose(got, expected, atol=1e-14)
    assert 0 < (got == 0).sum() < len(got)


def test_clipped_tokens_have_no_gradient():
    new = vector(math.log(1.5), math.log(0.5), math.log(5)).requires_grad_()
    loss, metrics = clipped(new, vector(0, 0, 0), vector(1, -1, -1), vector(1, 1, 1), dual=3.0)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.tolist() == [0, 0, 0]
    assert metrics["clip_fraction"].item() == 1


def test_divergences_measure_the_same_thing():
    """Exact expectations over a categorical: k1 and k3 are the divergence, k1 has no gradient, k2 the right one."""
    logits = vector(0.2, -0.7, 1.1).requires_grad_()
    new, reference = logits.log_softmax(0), vector(-0.3, 0.4, 0.1).log_softmax(0)
    chance = new.detach().exp()
    truth = (new.exp() * (new - reference)).sum()
    for kl in ("k1", "k3"):
        assert (chance * divergence(new, reference, kl=kl)).sum().item() == pytest.approx(truth.item())
    (slope,) = torch.autograd.grad(truth, logits, retain_graph=True)
    slopes = {
        kl: torch.autograd.grad((chance * divergence(new, reference, kl=kl)).sum(), logits, retain_graph=True)[0]
        for kl in ("k1", "k2")
    }
    assert slopes["k1"].abs().max().item() < 1e-15
    assert torch.allclose(slopes["k2"], slope)


@pytest.mark.parametrize("name", LOSSES)
def test_hostile_log_probabilities_stay_finite(name: str):
    new = torch.tensor([0.0, -1e4, -30.0], requires_grad=True)
    old = torch.tensor([-1e4, 0.0, -60.0])
    advantages, weights, rows = torch.tensor([-1.0, 1.0, -1.0]), torch.ones(3), torch.tensor([0, 1, 2])
    loss, metrics = LOSSES[name](new, old, advantages, weights, rows, kl="k3", beta=0.1, reference=old)
    (gradient,) = torch.autograd.grad(loss, new)
    assert all(torch.isfinite(value).all() for value in (loss, gradient, *metrics.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_are_no_loss(name: str):
    nothing = torch.zeros(0, requires_grad=True)
    loss, metrics = LOSSES[name](nothing, nothing, nothing, nothing, torch.zeros(0).long())
    assert loss.item() == 0
    assert all(value.item() == 0 for value in metrics.values())


# ---------------------------------------------------------------- from rewards to gradients, against plain Python


def random_group(seed: int) -> Group:
    """Ragged trajectories whose turns continue or not; log-probabilities as sampled."""
    draw = random.Random(seed)

    def turn(number: int) -> Turn:
        length = draw.randint(1, 6)
        return Turn(
            purpose="attempt",
            context=tuple(range(draw.randint(1, 4))),
            continues=number > 0 and draw.random() < 0.5,
            completion=Completion(
                tokens=tuple(draw.randrange(50) for _ in range(length)),
                logprobs=tuple(-3 * draw.random() for _ in range(length)),
                temperature=1.0,
                top_p=1.0,
                stop="end",
            ),
            text="",
            source=None,
            spans=Spans(),
            outcome=Outcome(feedback="", parts={"reward": draw.random()}),
        )

    trajectories = (
        Trajectory(turns=tuple(turn(k) for k in range(draw.randint(1, 4))), stop=TrajectoryStop.MAX_TURNS)
        for _ in range(draw.randint(2, 5))
    )
    return Group(task="t", trajectories=tuple(trajectories))


def flat(batch: Sequence[Sample], dtype: torch.dtype) -> dict[str, Any]:
    """Trained tokens of all rows, one after another."""
    mask = torch.tensor([bit for row in batch for bit in row.mask]).bool()
    names = {"old": "logprobs", "advantages": "advantages", "weights": "weights"}
    made = {
        name: torch.tensor([value for row in batch for value in getattr(row, field)], dtype=dtype)[mask]
        for name, field in names.items()
    }
    return made | {"rows": torch.tensor([number for number, row in enumerate(batch) for _ in row.tokens])[mask]}


def oracle_advantages(rewards: list[list[float]], kind: str) -> list[list[float]]:
    """GRPO on totals, and Kevin with gamma .4, straight from their equations."""
    if kind == "grpo":
        returns = [[sum(row)] * len(row) for row in rewards]
        compared = [row[0] for row in returns]
    else:
        returns = [
            [sum(0.4 ** (i - k) * row[i] for i in range(k, len(row))) for k in range(len(row))] for row in rewards
        ]
        compared = [value for row in returns for value in row]
    mean = sum(compared) / len(compared)
    deviation = (sum((value - mean) ** 2 for value in compared) / (len(compared) - 1)) ** 0.5
    return [[(value - mean) / (deviation + 1e-6) for value in row] for row in returns]


def oracle(of: Group, shifts: list[float], kind: str, mode: str) -> tuple[float, list[float]]:
    """Loss and its gradient by each log-probability, token by token; `shifts` is new - old in order of sampling."""
    rewards = [[value for value in one.rewards if value is not None] for one in of.trajectories]
    advantages = oracle_advantages(rewards, kind)
    lengths = [sum(len(turn.completion.tokens) for turn in one.turns) for one in of.trajectories]
    loss, gradient, shift = 0.0, [], iter(shifts)
    for one, length, row in zip(of.trajectories, lengths, advantages, strict=True):
        weight = 1 / sum(lengths) if mode == "token_mean" else 1 / (len(lengths) * length)
        for turn, advantage in zip(one.turns, row, strict=True):
            for _ in turn.completion.tokens:
                ratio = math.exp(next(shift))
                bounded = min(max(ratio, 0.8), 1.28)
                loss -= weight * min(ratio * advantage, bounded * advantage)
                gradient.append(-weight * ratio * advantage if ratio * advantage <= bounded * advantage else 0.0)
    return loss, gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("kind", ["grpo", "kevin"])
@pytest.mark.parametrize("seed", range(6))
def test_rewards_to_gradients_against_plain_python(seed: int, kind: str, mode: Any, dtype: torch.dtype):
    of = random_group(seed)
    knobs: dict[str, Any] = {"returns": "total", "compare": "trajectory"} if kind == "grpo" else {"gamma": 0.4}
    keep = [[True] * len(one.turns) for one in of.trajectories]
    batch = weighted(training_rows(of, partial(credit, scale="std", **knobs)(of, keep), keep), mode=mode)
    tokens = flat(batch, dtype)
    shifts = 0.3 * torch.randn(len(tokens["old"]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    new = (tokens["old"] + shifts.to(dtype)).requires_grad_()
    loss, _ = clipped(new, **tokens)
    (gradient,) = torch.autograd.grad(loss, new)
    expected, slopes = oracle(of, (new - tokens["old"]).double().tolist(), kind, mode)
    relative = 1e-12 if dtype is torch.float64 else 1e-6
    size = max(abs(slope) for slope in slopes)
    # the loss is a sum of terms of both signs, so its error is relative to their size
    assert loss.item() == pytest.approx(expected, abs=relative * size * len(slopes))
    assert gradient.tolist() == pytest.approx(slopes, abs=relative * size)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "knobs",
    [
        {"low": -0.1},
        {"low": 1.1},
        {"high": -0.1},
        {"dual": 1.0},
        {"kl": "k3"},
        {"kl": "k4", "beta": 0.1, "reference": vector(0.0)},
        {"beta": 0.1},
        {"kl": "k3", "beta": -0.1, "reference": vector(0.0)},
        {"entropy_coefficient": 0.1},
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_bad_knobs_are_one_line(name: str, knobs: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        LOSSES[name](vector(0.0), vector(0.0), vector(1.0), vector(1.0), torch.tensor([0]), **knobs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOSSES)
def test_broadcasting_is_refused(name: str):
    with pytest.raises(ValueError, match="one length"):
        LOSSES[name](vector(0, 0), vector(0), vector(1, 1), vector(1, 1), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="one length"):
        LOSSES[name](*[torch.zeros(1, 2)] * 5)
