"""Makes the sizes of a KernelBench program small enough for a computer without a GPU, and nothing else.

Published tasks are sized for a GPU: billions of elements. `shrink` halves the whole numbers that the program states at
its top level and in `get_inputs` and `get_init_inputs`, one at a time, as long as the model still runs. Nothing is
computed on the way: the program runs on PyTorch's `meta` device, where tensors have shapes but no values.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kernelwright.errors import BadTask

# whole numbers below the first are strides, axes and the like; none is made smaller than the second
_LEAST, _FLOOR = 4, 2
# a step that saves this share is taken at once, without looking for a better one
_ENOUGH = 0.4
# a large network takes half a second to build; what was saved after so many attempts is kept
_TRIALS = 100
# what one element written costs, in arithmetic operations
_OPERATIONS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Number:
    """A whole number in the source."""

    line: int
    column: int
    end: int
    value: int


class _Elements(TorchDispatchMode):
    """Counts the elements that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.count += value.numel()
        return result


def shrink(source: str, *, limit: int = 1 << 20) -> str:
    """The program with smaller numbers: it costs at most `limit`, or as little as halving them a hundred times can do.

    Args:
        source: a program in KernelBench form.
        limit: aim, in elements that are written when the model is made and called once, where 16 arithmetic operations
            of a matrix product or convolution count as one element.

    Raises:
        BadTask: the program does not run as it is.
    """
    numbers = list(_numbers(source))
    factors = [0] * len(numbers)
    least = cost(source)
    # what did not run or saved nothing once is not tried again: most such numbers are no sizes
    useless: set[frozenset[int]] = set()
    trials = 0
    while least > limit and trials < _TRIALS:
        best: tuple[float, list[int]] | None = None
        for chosen in _choices(numbers, factors):
            if chosen in useless:
                continue
            trial = [factor + (index in chosen) for index, factor in enumerate(factors)]
            reached = _cost_or_infinity(_rewritten(source, numbers, trial))
            trials += 1
            if reached >= least:
                useless.add(chosen)
            elif best is None or reached < best[0]:
                best = reached, trial
            if reached < (1 - _ENOUGH) * least:
                break
        if best is None:
            break
        least, factors = best
    return _rewritten(source, numbers, factors)


def _cost_or_infinity(source: str) -> float:
    try:
        return cost(source)
    except BadTask:  # the changed numbers belong together with others
        return math.inf


def cost(source: str) -> float:
    """What making the model and calling it once costs, in elements (see `shrink`), found without computing anything.

    Raises:
        BadTask: the program does not run.
    """
    with _Elements() as elements, FlopCounterMode(display=False) as operations:
        try:
            _call(source)
        except Exception as error:
            raise BadTask(f"the program does not run: {type(error).__name__}: {error}") from error
    return elements.count + operations.get_total_flops() / _OPERATIONS


def construct(space: Mapping[str, Any]) -> Any:
    """The model of an executed program; its arguments are a list, or `[[...], {...}]` with keywords (KernelBook)."""
    given = space["get_init_inputs"]()
    if len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], dict):
        return space["Model"](*given[0], **given[1])
    return space["Model"](*given)


def _call(source: str) -> None:
    """Make the model and call it once on the meta device, where tensors have shapes and no values."""
    space: dict[str, Any] = {"__name__": "reference"}
    with torch.device("meta"), torch.no_grad():
        exec(compile(source, "<task>", "exec"), space)
        inputs = _on_meta(space["get_inputs"]())
        try:
            model = construct(space)
        except (NotImplementedError, RuntimeError):  # a constructor that reads values
            with torch.device("cpu"):
                model = construct(space)
        model.to("meta")(*inputs)


def _on_meta(values: Sequence[Any]) -> list[Any]:
    return [value.to("meta") if isinstance(value, torch.Tensor) else value for value in values]


def _numbers(source: str) -> Iterator[_Number]:
    """Whole numbers that state sizes: at the top level, and in the two functions that make inputs."""
    tree = ast.parse(source)
    for statement in tree.body:
        sizes = isinstance(statement, (ast.Assign, ast.AnnAssign)) or (
            isinstance(statement, ast.FunctionDef) and statement.name in ("get_inputs", "get_init_inputs")
        )
        for node in ast.walk(statement) if sizes else ():
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= _LEAST:
                assert node.end_col_offset is not None
                yield _Number(line=node.lineno, column=node.col_offset, end=node.end_col_offset, value=node.value)


def _choices(numbers: Sequence[_Number], factors: Sequence[int]) -> Iterator[frozenset[int]]:
    """Which numbers to halve next, the largest first: each alone, then all that are equal now, since they may mean the
    same size."""
    now = [_halved(number.value, factor) for number, factor in zip(numbers, factors, strict=True)]
    large = sorted({value for value in now if value > _FLOOR}, reverse=True)
    equal = [[index for index, value in enumerate(now) if value == size] for size in large]
    yield from (frozenset({index}) for indices in equal for index in indices)
    yield from (frozenset(indices) for indices in equal if len(indices) > 1)


def _halved(value: int, times: int) -> int:
    for _ in range(times):
        value = max(math.ceil(value / 2), _FLOOR)
    return value


def _rewritten(source: str, numbers: Sequence[_Number], factors: Sequence[int]) -> str:
    lines = source.encode().splitlines(keepends=True)
    for number, factor in sorted(zip(numbers, factors, strict=True), key=lambda pair: (pair[0].line, -pair[0].column)):
        if factor:
            line = lines[number.line - 1]
            text = str(_halved(number.value, factor)).encode()
            lines[number.line - 1] = line[: number.column] + text + line[number.end :]
    return b"".join(lines).decode()
