"""Evaluation -> named reward parts. Their sum is the reward of a turn, see `Outcome.reward`.

One rule holds for all of them: only a candidate that is correct and shows no sign of cheating (`Evaluation.trusted`)
can earn anything above zero, and a speed that was not measured counts as no speed at all (0, not 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kernelwright.errors import UserError
from kernelwright.types import Evaluation, Status

Reward = Callable[[Evaluation], dict[str, float]]


def correctness(evaluation: Evaluation) -> dict[str, float]:
    """1 for a trusted candidate, else 0. Needs no clock, so equal seeds give equal rewards on any machine."""
    return {"correct": float(evaluation.trusted)}


def kevin(evaluation: Evaluation, *, correct: float = 0.3, cap: float | None = None) -> dict[str, float]:
    """`1{correct} (0.3 + speedup)` (Kevin, arXiv 2507.11948, section 3.2).

    Args:
        evaluation: what happened to the candidate.
        correct: what correctness alone is worth.
        cap: largest speedup that is paid; None as in the paper. A cap keeps one mismeasured outlier from dominating a
            group's standard deviation.

    Raises:
        UserError: a negative `correct`, or a `cap` that is not positive.
    """
    _check_cap(cap)
    if correct < 0:
        raise UserError(f"kevin(correct={correct}): expected a reward of at least 0; use 0.3 as the paper does")
    trusted = float(evaluation.trusted)
    return {"correct": correct * trusted, "speed": _speed(evaluation, cap=cap)}


def dr_kernel(
    evaluation: Evaluation, *, cap: float | None = 3.0, coverage: float = 1.0, scale: float = 1.0
) -> dict[str, float]:
    """`scale C (1 + min(speedup, cap) + coverage * PR)` (Dr. Kernel, arXiv 2602.05885, equations 1 and 8).

    PR is the share of the device time that is spent in the candidate's own kernels, `profile["own_kernel_share"]`.
    Where it was not measured the part is absent. The paper has `scale=1`; its released script runs `scale=0.5`.

    Raises:
        UserError: a `cap` or `scale` that is not positive, or a negative `coverage`.
    """
    _check_cap(cap)
    if scale <= 0 or coverage < 0:
        raise UserError(f"dr_kernel: expected scale > 0 and coverage >= 0, got {scale} and {coverage}")
    trusted = float(evaluation.trusted)
    parts = {"correct": scale * trusted, "speed": scale * _speed(evaluation, cap=cap)}
    share = evaluation.profile.get("own_kernel_share")
    if share is not None and coverage:
        parts["coverage"] = scale * coverage * trusted * min(max(float(share), 0.0), 1.0)
    return parts


def milestones(evaluation: Evaluation, *, margin: float = 0.05) -> dict[str, float]:
    """-1 unless trusted, else 1, or 2 if faster than the reference by more than `margin` (CUDA Agent, 2602.24286).

    The paper's level 3 asks for the same margin over `torch.compile`. An evaluation times one reference (PyTorch as
    written), so that level cannot be read off it and is not given.

    Raises:
        UserError: a `margin` outside [0, 1).
    """
    if not 0 <= margin < 1:
        raise UserError(f"milestones(margin={margin}): expected a share of the reference time in [0, 1), such as 0.05")
    if not evaluation.trusted:
        return {"milestone": -1.0}
    # (t0 - t) / t0 > margin, written with the speedup t0 / t
    faster = evaluation.speedup is not None and 1.0 - 1.0 / evaluation.speedup > margin
    return {"milestone": 2.0 if faster else 1.0}


def format_penalty(evaluation: Evaluation, *, penalty: float = 0.1) -> dict[str, float]:
    """`-penalty` for a reply without a code block, else 0 (RAGEN, arXiv 2504.20073). Use it inside `together`.

    Raises:
        UserError: a negative `penalty`.
    """
    if penalty < 0:
        raise UserError(f"format_penalty(penalty={penalty}): expected the size of the penalty, at least 0")
    return {"format": -penalty if evaluation.status is Status.NO_CODE else 0.0}


def together(evaluation: Evaluation, *, terms: Sequence[Reward]) -> dict[str, float]:
    """The parts of several rewards side by side, such as `terms=(kevin, format_penalty)`.

    Raises:
        UserError: two terms give a part of the same name.
    """
    parts: dict[str, float] = {}
    for term in terms:
        new = term(evaluation)
        if clash := sorted(set(new) & set(parts)):
            raise UserError(f"two rewards name a part {clash}; expected different parts, use only one of them")
        parts |= new
    return parts


def _speed(evaluation: Evaluation, *, cap: float | None) -> float:
    """Speedup up to `cap`; 0 unless trusted and measured."""
    speedup = evaluation.speedup or 0.0
    return speedup if cap is None else min(speedup, cap)


def _check_cap(cap: float | None) -> None:
    if cap is not None and not cap > 0:
        raise UserError(f"a cap on the speedup is positive, got {cap}; use None for no cap")
