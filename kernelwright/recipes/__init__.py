"""The published systems as presets: one function a system, every one in `RECIPES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kernelwright.errors import UnknownName
from kernelwright.recipes.kevin import kevin
from kernelwright.recipes.quickstart import quickstart
from kernelwright.recipes.single_turn import dr_grpo, grpo, rloo
from kernelwright.types import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    "quickstart": quickstart,
    "kevin": kevin,
    "grpo": grpo,
    "rloo": rloo,
    "dr_grpo": dr_grpo,
}


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UnknownName: there is none; the message names the nearest.
    """
    if name not in RECIPES:
        raise UnknownName("recipe", name, RECIPES)
    return RECIPES[name]()


def on_starter(preset: Recipe) -> Recipe:
    """`preset` at the size of the built-in policy: its model, room for short replies, a learning rate that moves it.

    Everything that makes the recipe what it is (turns, group, context, reward, credit, loss) stays.
    """
    small = quickstart()
    return replace(
        preset,
        model=small.model,
        sampling=replace(preset.sampling, max_tokens=small.sampling.max_tokens, budget=small.sampling.budget),
        optimiser=replace(preset.optimiser, lr=small.optimiser.lr, schedule=small.optimiser.schedule),
        evaluate_samples=min(preset.evaluate_samples, small.evaluate_samples),
    )
