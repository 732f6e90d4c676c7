"""Says in one short sentence how a wrong output is wrong.

A policy learns from these sentences, so they name a cause rather than figures: no sizes, no values that change with the
inputs, no full stop. The first description that fits wins; the most definite come first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelwright.kernels.ablate import explain
from kernelwright.kernels.check import Comparison, compare
from kernelwright.kernels.reference import Case, Reference

# a factor or a constant is an estimate: it explains an output that agrees to this accuracy
_LOOSE = 2e-3
# errors up to this many times the allowed one, everywhere, are a matter of accuracy
_INACCURATE = 30.0


def diagnose(reference: Reference, case: Case, got: np.ndarray, comparison: Comparison) -> str:
    """How a wrong output is wrong.

    Args:
        got: what the candidate left in `out`, in the shape of the expected output.
        comparison: of `got` with `case.expected`, with at least one wrong element.
    """
    if said := _unwritten(case, got):
        return said
    finite = np.isfinite(case.expected)
    if np.isnan(got[finite]).any():
        return "nan where a finite value is expected"
    if np.isinf(got[finite]).any():
        return "infinity where a finite value is expected"
    if said := explain(reference, case, got):
        return said
    if comparison.max_error <= _INACCURATE:
        return "the result is close, but less accurate than the tolerance allows"
    wide = got.astype(np.float64)
    if finite.all() and (said := _one_number(case, wide)):
        return said
    if said := _place(comparison.wrong):
        return said
    if finite.all() and (said := _one_number_a_row(case, wide)):
        return said
    return _share(comparison.wrong)


def _unwritten(case: Case, got: np.ndarray) -> str:
    """Elements that still hold the poison, or a poison that was computed with (which makes it quiet)."""
    if got.dtype == np.float64:
        bits, poison, quiet = got.view(np.uint64), case.poison, case.poison | 0x0008000000000000
    elif got.dtype == np.float32:
        bits, poison = got.view(np.uint32), case.poison & 0xFFFFFFFF
        quiet = poison | 0x00400000
    else:
        return ""
    left = bits == poison
    if left.all():
        return "nothing was written to out"
    if (bits == quiet).any():
        return "out is read before it is written"
    if not left.any():
        return ""
    return f"{_where(left) or 'some elements of out'} not written".replace("out not", "out are not")


def _where(mask: np.ndarray) -> str:
    """The part of `out` that a mask covers exactly, if it has a simple name."""
    rows = mask.reshape(-1, mask.shape[-1]) if mask.ndim > 1 else mask.reshape(1, -1)
    whole_rows = np.logical_and.reduce(rows, axis=1)
    whole_columns = np.logical_and.reduce(rows, axis=0)
    if mask.ndim > 1 and _is_tail(whole_columns) and np.array_equal(rows, np.broadcast_to(whole_columns, rows.shape)):
        return "the last column of out is" if whole_columns.sum() == 1 else "the last columns of out are"
    if mask.ndim > 1 and _is_tail(whole_rows) and np.array_equal(rows.T, np.broadcast_to(whole_rows, rows.T.shape)):
        return "the last row of out is" if whole_rows.sum() == 1 else "the last rows of out are"
    flat = mask.reshape(-1)
    if _is_tail(flat):
        return "the last element of out is" if flat.sum() == 1 else "the last elements of out are"
    return ""


def _is_tail(flags: np.ndarray) -> bool:
    """Whether the flags are first all False, then all True, with some of each."""
    count = int(flags.sum())
    return 0 < count < flags.size and bool(flags[-count:].all())


def _one_number(case: Case, got: np.ndarray) -> str:
    """One number between the result and the expected one: zero, a sign, a factor, a constant."""
    expected = case.expected.astype(np.float64)
    if not got.any():
        return "every element of out is zero"
    if got.size > 1 and (got == got.flat[0]).all():
        return "every element of out has the same value"
    if _agrees(got, -expected):
        return "the sign is flipped"
    factor = float((got * expected).sum() / max(float((expected * expected).sum()), 1e-300))
    if got.size > 1 and _agrees(got, factor * expected):
        return f"every element is off by the factor {_named(factor, case.sizes)}"
    constant = float((got - expected).mean())
    if got.size > 1 and _agrees(got, expected + constant):
        return f"every element is off by the constant {_named(constant, case.sizes)}"
    return ""


def _one_number_a_row(case: Case, got: np.ndarray) -> str:
    expected = case.expected.astype(np.float64)
    if got.ndim > 1 and got.shape[-1] > 2 and got.size > got.shape[-1]:
        rows = (expected * expected).sum(axis=-1, keepdims=True)
        if _agrees(got, expected * (got * expected).sum(axis=-1, keepdims=True) / np.maximum(rows, 1e-300)):
            return "each row is off by a factor of its own"
        if _agrees(got, expected + (got - expected).mean(axis=-1, keepdims=True)):
            return "each row is off by a constant of its own"
    return ""


def _agrees(got: np.ndarray, other: np.ndarray) -> bool:
    return compare(got, other, rtol=_LOOSE, atol=_LOOSE).ok


def _named(number: float, sizes: Mapping[str, int]) -> str:
    """A size's name where the number is that size or one over it, else two figures."""
    for name, size in sizes.items():
        if size > 2 and abs(number / size - 1) < 2e-3:
            return name
        if size > 2 and abs(number * size - 1) < 2e-3:
            return f"1 / {name}"
    return f"{number:.2g}"


def _place(wrong: np.ndarray) -> str:
    """Where the wrong elements lie, if they lie in one simple place."""
    if wrong.all() or wrong.ndim == 0:
        return ""
    if tail := _where(wrong):
        return f"only {tail} wrong"
    rows = wrong.reshape(-1, wrong.shape[-1])
    if wrong.ndim > 1 and not rows[:, 0].any() and rows[:, 1:].all():
        return "only the first element of each row is right"
    if wrong.ndim > 1 and rows[:, 0].all() and not rows[:, 1:].any():
        return "only the first element of each row is wrong"
    if wrong.ndim > 1 and not rows[0].any() and rows[1:].all():
        return "only the first row is right"
    return ""


def _share(wrong: np.ndarray) -> str:
    share = float(wrong.mean())
    if share == 1.0:
        return "all elements differ"
    return f"{'a few' if share < 0.05 else 'some' if share < 0.5 else 'most'} elements differ"
