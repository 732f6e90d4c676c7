"""Trying a recipe's pure parts on two made-up trajectories, so that a wrong knob fails before the first rollout."""

from __future__ import annotations

from typing import Any

from kernelwright.errors import UserError
from kernelwright.recipes.override import arguments
from kernelwright.samples import rows
from kernelwright.types import (
    Completion,
    Evaluation,
    Group,
    Outcome,
    Recipe,
    Spans,
    Status,
    Trajectory,
    TrajectoryStop,
    Turn,
)


def rehearse(recipe: Recipe) -> None:
    """Reward, selection, credit, rows and loss, once each.

    Raises:
        UserError: whatever these raise, such as a discount above 1, an unknown choice or a group of one; also a group
            size that leaves nothing to compare with.
    """
    if recipe.sampling.temperature == 0:
        raise UserError("sampling.temperature is 0: all trajectories of a group would be equal; expected more than 0")
    evaluation = Evaluation(
        task="rehearsal", backend="none", status=Status.CORRECT, kernel_ms=(1.0,), reference_ms=(2.0,)
    )
    reward: Any = arguments(recipe.environment).get("reward")
    parts = reward(evaluation) if reward is not None else {"reward": 1.0}
    trajectory = _trajectory(Outcome(feedback="", parts=parts, evaluation=evaluation))
    group = Group(task="rehearsal", trajectories=(trajectory,) * min(recipe.group_size, 2))
    keep = recipe.select(group)
    made = rows(group, recipe.credit(group, keep), keep)
    if not made:
        return
    weights = recipe.aggregate(made)
    _lose(recipe, weights[0].advantages[-1], weights[0].weights[-1])


def _lose(recipe: Recipe, advantage: float, weight: float) -> None:
    import torch

    one = torch.zeros(1)
    options = {"reference": one, "entropy": one}
    known = arguments(recipe.loss)
    given = {name: value for name, value in options.items() if name in known}
    row = torch.zeros(1, dtype=torch.int64)
    recipe.loss(one, one, torch.tensor([advantage]), torch.tensor([weight]), row, **given)


def _trajectory(outcome: Outcome) -> Trajectory:
    turn = Turn(
        purpose="attempt",
        context=(0,),
        continues=False,
        completion=Completion(tokens=(1,), logprobs=(0.0,), temperature=1.0, top_p=1.0, stop="end"),
        text="",
        source=None,
        spans=Spans(),
        outcome=outcome,
    )
    return Trajectory(turns=(turn,), stop=TrajectoryStop.MAX_TURNS)
