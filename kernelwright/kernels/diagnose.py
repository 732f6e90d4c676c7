"""Says in one short sentence how a wrong output is wrong."""

from __future__ import annotations

import numpy as np

from kernelwright.kernels.check import Comparison
from kernelwright.kernels.reference import Case, Reference


def diagnose(reference: Reference, case: Case, got: np.ndarray, comparison: Comparison) -> str:
    """The first description that fits; no numbers that vary from size to size, no full stop."""
    del reference, case, got, comparison
    return "some elements differ"
