"""The comparison: is `got` what the reference says?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcome of comparing one output. `wrong` has the output's shape; empty extents mean nothing was wrong."""

    wrong: np.ndarray
    # largest |got - expected| in units of the allowed error; infinite where a finite value was due and none came
    max_error: float

    @property
    def ok(self) -> bool:
        """Whether every element is within the tolerance."""
        return not self.wrong.any()

    @property
    def first(self) -> tuple[int, ...]:
        """Index of the first wrong element, row-major."""
        return tuple(int(i) for i in np.unravel_index(int(np.argmax(self.wrong)), self.wrong.shape))


def root_mean_square(values: np.ndarray) -> float:
    """Over the finite elements; 0 where there are none."""
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(np.square(finite.astype(np.float64))))) if finite.size else 0.0


def compare(got: np.ndarray, expected: np.ndarray, *, rtol: float, atol: float, magnitude: float = 0.0) -> Comparison:
    """|got - expected| <= atol * max(rms(expected), magnitude) + rtol * |expected|, element by element.

    Positions that are not finite come first: a NaN must meet a NaN, an infinity the same infinity. The root mean square
    is over the finite elements, so the absolute term has the size of the data and zeros do not pass for small numbers.

    Args:
        got: output of the candidate, any real type.
        magnitude: size of the reference's values on like inputs of another shape, for outputs too small to tell.
        expected: float64 in the same shape. Values beyond float32 count as infinite when `got` is float32.
    """
    if got.shape != expected.shape:
        raise ValueError(f"got shape {got.shape}, expected {expected.shape}")
    due = expected
    if got.dtype == np.float32 and expected.dtype == np.float64:
        with np.errstate(over="ignore"):
            due = np.where(np.isfinite(expected.astype(np.float32)), expected, expected.astype(np.float32))
    due = due.astype(np.float64)
    with np.errstate(invalid="ignore"):  # the poison of an unwritten element is a signalling NaN
        have = got.astype(np.float64)
    finite = np.isfinite(due)
    rms = max(root_mean_square(due), magnitude)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        allowed = atol * rms + rtol * np.abs(due)
        distance = np.abs(have - due)
        error = np.where(distance == 0, 0.0, distance / allowed)
        same = np.where(np.isnan(due), np.isnan(have), have == due)
    error = np.where(finite, np.where(np.isfinite(have), error, np.inf), np.where(same, 0.0, np.inf))
    return Comparison(wrong=~(error <= 1.0), max_error=float(error.max()) if error.size else 0.0)


def acceptance(
    expected: np.ndarray, *, rtol: float, atol: float, magnitude: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest float32 that `compare` surely accepts, element by element; NaN where that is no range.

    Two comparisons with these answer at a tenth of the cost of `compare`; what lies outside has to be compared.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        due = np.where(np.isfinite(expected.astype(np.float32)), expected, np.nan).astype(np.float64)
        allowed = atol * max(root_mean_square(due), magnitude) + rtol * np.abs(due)
        low, high = (due - allowed).astype(np.float32), (due + allowed).astype(np.float32)
        infinity = np.float32(np.inf)
        # one step inward, because rounding to float32 may have gone outward
        low, high = np.nextafter(low, infinity), np.nextafter(high, -infinity)
    return low, high
