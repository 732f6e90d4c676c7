"""The comparison, by hand-worked numbers."""

import numpy as np
import pytest

from kernelwright.kernels.check import acceptance, compare


def test_the_allowed_error_is_absolute_in_units_of_the_data_plus_relative():
    expected = np.array([3.0, -4.0, 0.0])  # rms = sqrt(25 / 3) = 2.8868
    # allowed at 3: 0.1 * 2.8868 + 0.01 * 3 = 0.31868; at 0: 0.28868
    found = compare(np.array([3.31868, -4.0, 0.28]), expected, rtol=0.01, atol=0.1)
    assert found.max_error == pytest.approx(1.0, abs=1e-4)
    assert compare(np.array([3.3186, -4.0, 0.2886]), expected, rtol=0.01, atol=0.1).ok
    wrong = compare(np.array([3.0, -4.0, 0.29]), expected, rtol=0.01, atol=0.1)
    assert not wrong.ok and wrong.first == (2,)


def test_zeros_do_not_pass_for_small_numbers():
    assert not compare(np.zeros(4), np.full(4, 1e-6), rtol=1e-4, atol=1e-4).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_finite_value_is_met_by_a_finite_value_only(bad):
    found = compare(np.array([1.0, bad]), np.array([1.0, 2.0]), rtol=1.0, atol=1.0)
    assert not found.ok and found.first == (1,) and found.max_error == np.inf


def test_nan_meets_nan_and_infinity_the_same_infinity():
    expected = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert compare(expected.copy(), expected, rtol=0.1, atol=0.1).ok
    for wrong in ([1.0, np.inf, -np.inf, 1.0], [np.nan, -np.inf, -np.inf, 1.0], [np.nan, np.inf, 3.0, 1.0]):
        assert not compare(np.array(wrong), expected, rtol=0.1, atol=0.1).ok


def test_what_float32_cannot_hold_is_infinite_there():
    got = np.array([np.inf, 1.0], dtype=np.float32)
    assert compare(got, np.array([1e39, 1.0]), rtol=1e-4, atol=1e-4).ok
    assert not compare(got.astype(np.float64), np.array([1e39, 1.0]), rtol=1e-4, atol=1e-4).ok


def test_a_zero_tolerance_means_equality():
    values = np.array([1.0, 2.0])
    assert compare(values, values, rtol=0.0, atol=0.0).ok
    assert not compare(values + 1e-15, values, rtol=0.0, atol=0.0).ok


def test_the_magnitude_stands_in_for_the_size_of_a_tiny_output():
    assert compare(np.array([2e-5]), np.array([1e-5]), rtol=0.0, atol=1e-4, magnitude=1.0).ok
    assert not compare(np.array([2e-5]), np.array([1e-5]), rtol=0.0, atol=1e-4).ok


def test_another_shape_is_the_callers_mistake():
    with pytest.raises(ValueError, match="shape"):
        compare(np.zeros(3), np.zeros((3, 1)), rtol=1.0, atol=1.0)


def test_the_bounds_accept_nothing_that_the_comparison_rejects():
    random = np.random.default_rng(0)
    expected = np.concatenate(
        [random.standard_normal(2000) * 10.0 ** random.integers(-6, 7, 2000), [np.nan, 1e39, 0.0]]
    )
    low, high = acceptance(expected, rtol=1e-4, atol=1e-9)
    for bound, beyond in ((low, -np.inf), (high, np.inf)):
        inside = np.where(np.isnan(bound), 0, bound).astype(np.float32)
        wrong = compare(inside, expected, rtol=1e-4, atol=1e-9).wrong
        assert list(np.flatnonzero(wrong)) == [2000, 2001], "only where there are no bounds"
        # and they are tight: four steps further out is rejected
        for _ in range(4):
            inside = np.nextafter(inside, np.float32(beyond))
        assert compare(inside, expected, rtol=1e-4, atol=1e-9).wrong.all()
    assert np.isnan(low[2000]) and np.isnan(low[2001])
