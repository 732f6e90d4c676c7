"""Kevin (arXiv 2507.11948): multi-turn GRPO whose unit of credit is one refinement turn."""

from __future__ import annotations

from functools import partial

from kernelwright import credit, reward, select
from kernelwright.context import digest
from kernelwright.environments.refine import refining
from kernelwright.loss import clipped
from kernelwright.samples import weighted
from kernelwright.types import Optimiser, Recipe, Sampling


def kevin() -> Recipe:
    """Sections 3 to 6 and appendices C to E of the paper.

    Not published, so chosen here: the learning rate, AdamW's other settings, the context size and the value of the
    constant that the length normaliser divides by. The response limit rises from 16,384 to 22,000 tokens at step 30 of
    the paper's run; here it is 16,384 throughout. Std division is kept: the text says only that length normalisation
    changed in the final run.
    """
    return Recipe(
        name="kevin",
        paper="Kevin: Multi-Turn RL for Generating CUDA Kernels (arXiv 2507.11948)",
        model="Qwen/QwQ-32B",
        tasks="builtin:train",
        validation="builtin:validation",
        heldout="builtin:heldout",
        environment=partial(
            refining, backend="c", reward=partial(reward.kevin, correct=0.3, cap=None), feedback_style="line"
        ),
        context=partial(digest, keep_best=False),
        max_turns=4,
        group_size=16,
        tasks_per_step=8,
        sampling=Sampling(temperature=0.9, max_tokens=16_384, budget=40_960),
        select=partial(select.scored),
        credit=partial(credit.credit, returns="reward_to_go", gamma=0.4, compare="task", scale="std"),
        loss=partial(clipped, low=0.2, high=0.28),
        aggregate=partial(weighted, mode="constant", constant=16_384.0, unit="row"),
        optimiser=Optimiser(lr=1e-6, clip=0.05, minibatches=2),
        steps=40,
        evaluate_every=10,
        evaluate_samples=16,
    )
