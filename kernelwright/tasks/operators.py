"""The hand-checked operators from which the builtin tasks are composed.

An operator is one line of a reference's `forward`, as an expression of `x` and of the further inputs it names. Four
kinds compose: `start` comes first (it fixes the shape of x), `element` keeps every element apart, `row` mixes the
elements of a row and keeps the shape, `reduce` turns rows into numbers; after a reduction only `element` operators
without further inputs may follow.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from kernelwright.types import Input

Kind = Literal["start", "element", "row", "reduce"]


class Operator(NamedTuple):
    """One line of a reference."""

    name: str
    kind: Kind
    # right-hand side of `x = ...`
    expression: str
    # further arguments of forward that the expression reads
    inputs: tuple[str, ...] = ()
    # smallest row length for which it is defined
    least: int = 1


INPUTS = {
    "x": Input(name="x", shape=("n", "m")),
    "y": Input(name="y", shape=("n", "m")),
    "w": Input(name="w", shape=("m",)),
    "b": Input(name="b", shape=("m",)),
    "c": Input(name="c", shape=("n", "m")),
    "s": Input(name="s", shape=("n", "m")),
    "a": Input(name="a", shape=("k", "m")),
}

_ELEMENT = {
    "relu": "F.relu(x)",
    "leaky_relu": "F.leaky_relu(x, 0.1)",
    "gelu": "F.gelu(x)",
    "gelu_tanh": 'F.gelu(x, approximate="tanh")',
    "silu": "F.silu(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "softplus": "F.softplus(x)",
    "elu": "F.elu(x)",
    "selu": "F.selu(x)",
    "abs": "torch.abs(x)",
    "square": "x * x",
    "clamp": "torch.clamp(x, -1.0, 1.0)",
    "hardsigmoid": "F.hardsigmoid(x)",
    "hardswish": "F.hardswish(x)",
    "mish": "F.mish(x)",
    "softsign": "F.softsign(x)",
    "relu6": "F.relu6(x)",
    "tanhshrink": "F.tanhshrink(x)",
    "softshrink": "F.softshrink(x, 0.5)",
    "hardshrink": "F.hardshrink(x, 0.5)",
    "logsigmoid": "F.logsigmoid(x)",
    "exp_neg": "torch.exp(-torch.abs(x))",
    "sqrt_abs": "torch.sqrt(torch.abs(x))",
    "log1p_abs": "torch.log1p(torch.abs(x))",
    "sin": "torch.sin(x)",
    "erf": "torch.erf(x)",
    "scale": "x * 0.5",
    "shift": "x + 1.0",
    "neg": "-x",
    "inverse": "1.0 / (1.0 + x * x)",
}

_WITH_INPUT = {
    "add": ("x + y", "y"),
    "mul": ("x * y", "y"),
    "sub": ("x - y", "y"),
    "maximum": ("torch.maximum(x, y)", "y"),
    "minimum": ("torch.minimum(x, y)", "y"),
    "glu": ("x * torch.sigmoid(y)", "y"),
    "swiglu": ("F.silu(x) * y", "y"),
    "geglu": ("F.gelu(x) * y", "y"),
    "squared_error": ("(x - y) * (x - y)", "y"),
    "absolute_error": ("torch.abs(x - y)", "y"),
    "smooth_l1": ('F.smooth_l1_loss(x, y, reduction="none")', "y"),
    "hinge": ("F.relu(1.0 - x * y)", "y"),
    "lerp": ("torch.lerp(x, y, 0.25)", "y"),
    "row_scale": ("x * w", "w"),
    "bias": ("x + b", "b"),
}

_ROW = {
    "softmax": "F.softmax(x, dim=-1)",
    "log_softmax": "F.log_softmax(x, dim=-1)",
    "softmin": "F.softmin(x, dim=-1)",
    "rms_norm": "x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)",
    "layer_norm": "F.layer_norm(x, x.shape[-1:])",
    "l2_normalize": "F.normalize(x, dim=-1)",
    "l1_normalize": "F.normalize(x, p=1.0, dim=-1)",
    "center": "x - x.mean(-1, keepdim=True)",
    "max_shift": "x - x.amax(-1, keepdim=True)",
    "min_max": "(x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-3)",
    "cumsum": "torch.cumsum(x, dim=-1)",
    "cummax": "torch.cummax(x, dim=-1).values",
    "exclusive_cumsum": "torch.cumsum(x, dim=-1) - x",
    "reverse_cumsum": "x.flip(-1).cumsum(-1).flip(-1)",
    "roll": "torch.roll(x, 1, -1)",
}

_REDUCE = {
    "sum": ("x.sum(-1)", 1),
    "mean": ("x.mean(-1)", 1),
    "amax": ("x.amax(-1)", 1),
    "amin": ("x.amin(-1)", 1),
    "logsumexp": ("torch.logsumexp(x, dim=-1)", 1),
    "norm": ("x.norm(dim=-1)", 1),
    "var": ("x.var(-1, unbiased=False)", 1),
    "std": ("x.std(-1)", 2),
    "sum_squares": ("(x * x).sum(-1)", 1),
    "mean_abs": ("x.abs().mean(-1)", 1),
    "extent": ("x.amax(-1) - x.amin(-1)", 1),
    "root_mean_square": ("(x * x).mean(-1).sqrt()", 1),
}

_START = {
    "matmul": ("x @ a", ("a",), 1),
    "rope": ("x * c + torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], dim=-1) * s", ("c", "s"), 2),
}

OPERATORS: dict[str, Operator] = {
    **{name: Operator(name, "element", line) for name, line in _ELEMENT.items()},
    **{name: Operator(name, "element", line, (extra,)) for name, (line, extra) in _WITH_INPUT.items()},
    **{name: Operator(name, "row", line) for name, line in _ROW.items()},
    **{name: Operator(name, "reduce", line, (), least) for name, (line, least) in _REDUCE.items()},
    **{name: Operator(name, "start", line, inputs, least) for name, (line, inputs, least) in _START.items()},
}


# operators that no training task contains: on the held-out tasks they show what feedback teaches without practice
UNPRACTISED = (
    "hardsigmoid", "softsign", "tanhshrink", "softshrink", "elu", "leaky_relu", "lerp", "smooth_l1",
    "exclusive_cumsum", "softmin", "l1_normalize", "std", "mean_abs", "root_mean_square",
)  # fmt: skip


def composable(chain: tuple[str, ...]) -> bool:
    """Whether the operators may stand in this order: start first, one reduction, no input read twice."""
    operators = [OPERATORS[name] for name in chain]
    reads = [name for operator in operators for name in operator.inputs]
    if len(set(reads)) != len(reads) or any(operator.kind == "start" for operator in operators[1:]):
        return False
    reductions = [index for index, operator in enumerate(operators) if operator.kind == "reduce"]
    if not reductions:
        return True
    after = operators[reductions[0] + 1 :]
    return len(reductions) == 1 and all(operator.kind == "element" and not operator.inputs for operator in after)
