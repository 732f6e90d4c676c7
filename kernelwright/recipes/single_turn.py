"""The single-turn baselines: the same code with one turn, so that a comparison differs in the recipe's fields only.

Each step asks for as many kernels as `quickstart` does: 16 tasks x 18 first attempts instead of 6 x 3 turns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kernelwright import credit
from kernelwright.loss import clipped
from kernelwright.recipes.quickstart import quickstart
from kernelwright.samples import weighted
from kernelwright.types import Recipe


def grpo() -> Recipe:
    """GRPO (DeepSeekMath, section 4.1): group mean and standard deviation, mean over each reply, then over replies."""
    return replace(
        quickstart(),
        name="grpo",
        paper="DeepSeekMath (arXiv 2402.03300): GRPO, one turn, no KL term",
        max_turns=1,
        group_size=18,
        credit=partial(credit.credit, returns="total", compare="trajectory", scale="std"),
        loss=partial(clipped, low=0.2, high=0.2),
        aggregate=partial(weighted, mode="seq_mean_token_mean"),
    )


def rloo() -> Recipe:
    """RLOO (Ahmadian et al., equation 8): the mean of the *other* replies as baseline, one on-policy update."""
    return replace(
        grpo(),
        name="rloo",
        paper="Back to Basics (arXiv 2402.14740): REINFORCE leave-one-out, one turn, no KL term",
        credit=partial(credit.credit, returns="total", compare="trajectory", baseline="leave_one_out", scale="none"),
        aggregate=partial(weighted, mode="seq_mean_token_sum"),
        optimiser=replace(quickstart().optimiser, minibatches=1),
    )


def dr_grpo() -> Recipe:
    """Dr. GRPO (Liu et al., section 3.2): GRPO without division by the deviation and by each reply's length."""
    return replace(
        grpo(),
        name="dr_grpo",
        paper="Understanding R1-Zero-Like Training (arXiv 2503.20783): Dr. GRPO, one turn",
        credit=partial(credit.credit, returns="total", compare="trajectory", scale="none"),
        aggregate=partial(weighted, mode="constant", constant=float(quickstart().sampling.max_tokens)),
    )
