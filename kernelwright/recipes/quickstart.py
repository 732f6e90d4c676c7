"""The main job: the built-in starter policy learns, on a CPU and in minutes, to write faster C kernels."""

from __future__ import annotations

from functools import partial

from kernelwright import credit, reward, select
from kernelwright.context import digest
from kernelwright.environments.refine import refining
from kernelwright.loss import clipped
from kernelwright.samples import weighted
from kernelwright.types import Optimiser, Recipe, Sampling


def quickstart() -> Recipe:
    """Kevin's method (recipes.kevin) at the size of the starter, with changes that dev/LOG.md argues for.

    Attempts are compared with those of the same number, not pooled, and not divided by the deviation: where all members
    of a group are right, the deviation is the noise of the clock. `carry` tells the baseline where an attempt started;
    without it repairs are punished. Correctness is paid 2 instead of 0.3. The score is capped at speedup 1.5, where an
    episode is done, and the learning rate falls to 0.
    """
    return Recipe(
        name="quickstart",
        paper="Kevin: Multi-Turn RL for Generating CUDA Kernels (arXiv 2507.11948), scaled to a CPU and to C",
        model="starter",
        tasks="builtin:train",
        validation="builtin:validation",
        heldout="builtin:heldout",
        environment=partial(refining, backend="c", target=1.5, reward=partial(reward.kevin, correct=2.0, cap=1.5)),
        context=partial(digest),
        max_turns=3,
        group_size=6,
        tasks_per_step=16,
        sampling=Sampling(temperature=1.0, max_tokens=128, budget=1024),
        select=partial(select.scored),
        credit=partial(
            credit.credit, returns="reward_to_go", gamma=0.4, compare="attempt", carry=0.7, after_done="last"
        ),
        loss=partial(clipped, low=0.2, high=0.28),
        aggregate=partial(weighted, mode="token_mean"),
        optimiser=Optimiser(lr=4e-4, epsilon=1e-5, schedule="linear", clip=1.0, minibatches=2),
        steps=32,
        evaluate_every=8,
        evaluate_samples=3,
    )
