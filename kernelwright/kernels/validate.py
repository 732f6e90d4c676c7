"""Self-checks of a task: would a candidate that does not compute it fail?

Some published tasks are passed by zeros or by their own input, because their inputs are never negative or the result is
almost constant. Such a task teaches a policy to cheat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kernelwright.errors import BadTask
from kernelwright.kernels.check import compare
from kernelwright.kernels.reference import Case, Reference
from kernelwright.types import Task


def validate(task: Task) -> list[str]:
    """What is wrong with a task, one sentence each; empty when nothing is.

    The reference must agree with itself (twice, and in float32 with float64), and five outputs that need no computing
    must fail: zeros, the first input, the mean of the expected output, the output for other inputs, and an output of
    which the second half was not written.
    """
    try:
        reference = Reference(task, seed=0)
        cases = reference.check_cases()
        again = [reference.case(case.sizes, case.distribution, case.draw) for case in cases]
        other = [reference.case(case.sizes, case.distribution, case.draw + 50) for case in cases]
        single = [_single(reference, case) for case in cases]
    except BadTask as error:
        return [str(error)]
    complaints = []
    if any(not np.array_equal(a.expected, b.expected, equal_nan=True) for a, b in zip(cases, again, strict=True)):
        complaints.append("the reference is random: two runs on the same inputs differ")
    for case, output in zip(cases, single, strict=True):
        error = _error(task, case, output)
        if error > 1:
            complaints.append(
                f"the reference in float32 differs from itself in float64 on '{case.distribution}' inputs with "
                f"{dict(case.sizes)}: {error:.2g} times the tolerance"
            )
            break
    for name, outputs in _without_computing(cases, other):
        if all(_error(task, case, output) <= 1 for case, output in zip(cases, outputs, strict=True)):
            complaints.append(f"{name} passes every check")
    return complaints


def _single(reference: Reference, case: Case) -> np.ndarray:
    values = reference.values(case.sizes, case.distribution, case.draw)
    return reference.forward(values, dtype=torch.float32).contiguous().numpy()


def _error(task: Task, case: Case, output: np.ndarray) -> float:
    """Largest error in units of the allowed one; infinite for another shape."""
    if output.shape != case.expected.shape:
        return float("inf")
    return compare(output, case.expected, rtol=task.rtol, atol=task.atol, magnitude=case.magnitude).max_error


def _without_computing(cases: Sequence[Case], other: Sequence[Case]) -> Iterator[tuple[str, list[np.ndarray]]]:
    yield "an output of zeros", [np.zeros_like(case.expected) for case in cases]
    yield "the first input itself", [case.inputs[0].astype(np.float64) for case in cases]
    means = [np.full_like(case.expected, case.expected.mean()) for case in cases]
    yield "a constant", means
    yield "the output for other inputs", [case.expected for case in other]
    halves = []
    for case in cases:
        half = case.expected.copy().reshape(-1)
        half[half.size // 2 :] = 0
        halves.append(half.reshape(case.expected.shape))
    yield "an output of which only the first half is written", halves
