"""Programs made small: the same program at smaller sizes, found without computing."""

from __future__ import annotations

import pytest

from kernelwright.errors import BadTask
from kernelwright.tasks.shrink import cost, shrink

LINEAR = '''
import torch
import torch.nn as nn


class Model(nn.Module):
    """A linear layer, then a sum of 10000 in the docstring."""

    def __init__(self, in_features, out_features, groups):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.GroupNorm(groups, out_features)

    def forward(self, x):
        return self.norm(self.linear(x)) * 100000


batch_size = 1024 * 2  # é before: columns are bytes
in_features = 8192
height = width = 3
out_features = 4096
groups = 8


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, groups]
'''

MATMUL = """
import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b


def get_inputs():
    return [torch.rand(2048, 4096), torch.rand(4096, 2048)]


def get_init_inputs():
    return []
"""


def test_cost_counts_what_is_written_and_a_sixteenth_of_the_arithmetic() -> None:
    # inputs 2 x 2048 x 4096 (one operation each on meta: rand), the product 2048 x 2048, 2 x 2048^2 x 4096 operations
    assert cost(MATMUL) == 2 * 2048 * 4096 + 2048 * 2048 + 2 * 2048**2 * 4096 / 16


def test_only_sizes_change_and_they_stay_consistent() -> None:
    small = shrink(LINEAR, limit=1 << 14)
    assert cost(small) <= 1 << 14 < cost(LINEAR)
    assert "* 100000" in small and "sum of 10000 in" in small and "height = width = 3\n" in small
    assert "# é before: columns are bytes" in small
    space: dict[str, object] = {}
    exec(small, space)
    assert space["out_features"] % space["groups"] == 0  # type: ignore[operator]


def test_equal_numbers_shrink_together_where_one_alone_does_not_run() -> None:
    small = shrink(MATMUL, limit=1 << 12)
    assert cost(small) <= 1 << 12
    space: dict[str, object] = {}
    exec(small, space)
    left, right = space["get_inputs"]()  # type: ignore[operator]
    assert left.shape[1] == right.shape[0]


def test_what_is_small_enough_is_left_alone() -> None:
    assert shrink(MATMUL, limit=1 << 40) == MATMUL


def test_a_program_that_does_not_run_is_the_programs_fault() -> None:
    with pytest.raises(BadTask, match="does not run: ZeroDivisionError"):
        shrink(MATMUL.replace("a @ b", "a @ b / (1 // 0)"))
