"""The builtin tasks: chains of operators, written down in `builtin.txt`, one chain a line.

The three sections of that file are disjoint: `train`, `validation` (chooses the checkpoint) and `heldout` (measures:
fusions that are in neither of the others, nor in the corpus of the starter policy). `scripts/build_tasks` made the
file and proved each line as `kernelwright tasks validate` does; the file is the truth, so a task keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from kernelwright.errors import UnknownName
from kernelwright.tasks.operators import INPUTS, OPERATORS
from kernelwright.types import Input, Task

SETS = ("train", "validation", "heldout")

_REFERENCE = """\
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def forward(self, {arguments}):
{body}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


@cache
def chains(name: str) -> tuple[tuple[str, ...], ...]:
    """The operator chains of one set, in file order. Raises UnknownName for another name than those in SETS."""
    if name not in SETS:
        raise UnknownName("builtin task set", name, SETS)
    text = resources.files("kernelwright.tasks").joinpath("builtin.txt").read_text()
    current, found = "", []
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.endswith(":"):
            current = line[:-1]
        elif line and current == name:
            found.append(tuple(line.split()))
    return tuple(found)


def make(chain: Sequence[str], *, tags: tuple[str, ...] = ()) -> Task:
    """The task of one chain of operators. Its time shapes are large enough that a call costs more than its launch."""
    operators = [OPERATORS[name] for name in chain]
    inputs = tuple(_input(name, chain) for name in _arguments(chain))
    least = max(operator.least for operator in operators)
    even = chain[0] == "rope"
    check, time = _sizes(least, even=even, product=chain[0] == "matmul")
    lines = [f"x = {operator.expression}" for operator in operators[:-1]] + [f"return {operators[-1].expression}"]
    shapes = [tuple(time[0][size] for size in tensor.shape) for tensor in inputs]
    return Task(
        id="builtin/" + "-".join(chain),
        statement="; ".join(chain),
        reference=_REFERENCE.format(
            arguments=", ".join(tensor.name for tensor in inputs),
            body="\n".join(" " * 8 + line for line in lines),
            inputs=", ".join(f"torch.randn({', '.join(map(str, shape))})" for shape in shapes),
        ),
        inputs=inputs,
        check_shapes=check,
        time_shapes=time,
        tags=("builtin", *tags, *sorted({operator.kind for operator in operators})),
    )


def _arguments(chain: Sequence[str]) -> list[str]:
    return ["x", *(name for operator in chain for name in OPERATORS[operator].inputs)]


def _input(name: str, chain: Sequence[str]) -> Input:
    if name == "x" and chain[0] == "matmul":
        return Input(name="x", shape=("n", "k"))
    return INPUTS[name]


def _sizes(least: int, *, even: bool, product: bool) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
    """Check shapes: odd, of size one (or the least that is defined), longer than a vector, no block's multiple."""
    if product:
        check = (
            {"n": 5, "k": 7, "m": 37},
            {"n": 1, "k": 1, "m": 1},
            {"n": 3, "k": 65, "m": 19},
            {"n": 9, "k": 33, "m": 2},
        )
        return check, ({"n": 96, "k": 160, "m": 201},)
    lengths = [36, 2, 258, 70] if even else [37, least, 257, 64 + least]
    check = tuple({"n": n, "m": m} for n, m in zip((5, 1, 3, 19), lengths, strict=True))
    return check, ({"n": 128, "m": 1026 if even else 1027},)


@cache
def load(name: str) -> tuple[Task, ...]:
    """All tasks of one set."""
    return tuple(make(chain, tags=(name,)) for chain in chains(name))


def find(name: str) -> Task:
    """One task by the part of its id after `builtin/`; any composable chain works, listed or not."""
    for group in SETS:
        for task in load(group):
            if task.id == f"builtin/{name}":
                return task
    chain = name.split("-")
    unknown = [part for part in chain if part not in OPERATORS]
    if unknown:
        raise UnknownName(
            "builtin task", name, (task.id.removeprefix("builtin/") for group in SETS for task in load(group))
        )
    return make(chain, tags=("composed",))
