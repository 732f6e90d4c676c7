"""How the starter policy's corpus spells each operator in C: the right formula, and the misconception many have of it.

Statements are written in single precision on a variable `v` (element operators) or on the row `o[0..m)` (row and reduce
operators, one loop a line); `double_precision` turns them into the slow spelling. A misconception is a fault that a
fresh attempt repeats, so that it takes feedback, not luck, to cure it.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Spelling(NamedTuple):
    """The C lines of one operator."""

    # equivalent right spellings, each a tuple of lines
    right: tuple[tuple[str, ...], ...]
    # what the starter believes instead, None where it knows better
    misconception: tuple[str, ...] | None = None


def _one(*spellings: str, believes: str | None = None) -> Spelling:
    return Spelling(tuple((text,) for text in spellings), (believes,) if believes else None)


_GELU = "0.5f * v * (1.0f + erff(v * 0.70710678f))"
_SIGMOID = "1.0f / (1.0f + expf(-v))"

ELEMENT: dict[str, Spelling] = {
    "relu": _one("v = v > 0.0f ? v : 0.0f;", "v = fmaxf(v, 0.0f);"),
    "leaky_relu": _one("v = v > 0.0f ? v : 0.1f * v;", believes="v = v > 0.0f ? v : 0.01f * v;"),
    "gelu": _one(
        f"v = {_GELU};",
        "v = v * 0.5f * (1.0f + erff(v / 1.41421356f));",
        believes="v = 0.5f * v * (1.0f + erff(v));",
    ),
    "gelu_tanh": _one(
        "v = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));",
        believes="v = 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v)));",
    ),
    "silu": _one("v = v / (1.0f + expf(-v));", f"v = v * ({_SIGMOID});"),
    "sigmoid": _one(f"v = {_SIGMOID};"),
    "tanh": _one("v = tanhf(v);"),
    "softplus": _one("v = fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v)));", believes="v = logf(expf(v) - 1.0f);"),
    "elu": _one("v = v > 0.0f ? v : expm1f(v);", believes="v = v > 0.0f ? v : expf(v);"),
    "selu": _one(
        "v = 1.0507010f * (v > 0.0f ? v : 1.6732632f * expm1f(v));",
        believes="v = v > 0.0f ? v : 1.6732632f * expm1f(v);",
    ),
    "abs": _one("v = fabsf(v);", "v = v < 0.0f ? -v : v;"),
    "square": _one("v = v * v;"),
    "clamp": _one("v = fminf(fmaxf(v, -1.0f), 1.0f);", "v = v < -1.0f ? -1.0f : v > 1.0f ? 1.0f : v;"),
    "hardsigmoid": _one(
        "v = fminf(fmaxf(v / 6.0f + 0.5f, 0.0f), 1.0f);", believes="v = fminf(fmaxf(0.2f * v + 0.5f, 0.0f), 1.0f);"
    ),
    "hardswish": _one(
        "v = v * fminf(fmaxf(v + 3.0f, 0.0f), 6.0f) / 6.0f;", believes="v = v * fminf(fmaxf(v + 3.0f, 0.0f), 6.0f);"
    ),
    "mish": _one("v = v * tanhf(fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v))));", believes="v = v * tanhf(expf(v));"),
    "softsign": _one("v = v / (1.0f + fabsf(v));", believes="v = v / (1.0f + v * v);"),
    "relu6": _one("v = fminf(fmaxf(v, 0.0f), 6.0f);", believes="v = fminf(fmaxf(v, 0.0f), 1.0f);"),
    "tanhshrink": _one("v = v - tanhf(v);", believes="v = tanhf(v) - v;"),
    "softshrink": _one(
        "v = v > 0.5f ? v - 0.5f : v < -0.5f ? v + 0.5f : 0.0f;", believes="v = v > 0.5f || v < -0.5f ? v : 0.0f;"
    ),
    "hardshrink": _one("v = fabsf(v) > 0.5f ? v : 0.0f;", "v = v > 0.5f || v < -0.5f ? v : 0.0f;"),
    "logsigmoid": _one(
        "v = fminf(v, 0.0f) - log1pf(expf(-fabsf(v)));", believes="v = fminf(v, 0.0f) + log1pf(expf(-fabsf(v)));"
    ),
    "exp_neg": _one("v = expf(-fabsf(v));", believes="v = fabsf(expf(-v));"),
    "sqrt_abs": _one("v = sqrtf(fabsf(v));", believes="v = fabsf(sqrtf(v));"),
    "log1p_abs": _one("v = log1pf(fabsf(v));", believes="v = logf(fabsf(v));"),
    "sin": _one("v = sinf(v);"),
    "erf": _one("v = erff(v);"),
    "scale": _one("v = v * 0.5f;", "v = 0.5f * v;"),
    "shift": _one("v = v + 1.0f;", "v += 1.0f;"),
    "neg": _one("v = -v;"),
    "inverse": _one("v = 1.0f / (1.0f + v * v);"),
    "add": _one("v = v + y[i * m + j];", "v += y[i * m + j];"),
    "mul": _one("v = v * y[i * m + j];", "v *= y[i * m + j];"),
    "sub": _one("v = v - y[i * m + j];", "v -= y[i * m + j];"),
    "maximum": _one("v = fmaxf(v, y[i * m + j]);"),
    "minimum": _one("v = fminf(v, y[i * m + j]);"),
    "glu": _one("v = v / (1.0f + expf(-y[i * m + j]));", believes="v = y[i * m + j] / (1.0f + expf(-v));"),
    "swiglu": _one(
        "v = v / (1.0f + expf(-v)) * y[i * m + j];", believes="v = v * y[i * m + j] / (1.0f + expf(-y[i * m + j]));"
    ),
    "geglu": _one(f"v = {_GELU} * y[i * m + j];", believes="v = 0.5f * v * (1.0f + erff(v)) * y[i * m + j];"),
    "squared_error": _one(
        "v = (v - y[i * m + j]) * (v - y[i * m + j]);",
        believes="v = 0.5f * (v - y[i * m + j]) * (v - y[i * m + j]);",
    ),
    "absolute_error": _one("v = fabsf(v - y[i * m + j]);"),
    "smooth_l1": Spelling(
        (("v = fabsf(v - y[i * m + j]);", "v = v < 1.0f ? 0.5f * v * v : v - 0.5f;"),),
        ("v = fabsf(v - y[i * m + j]);", "v = v < 1.0f ? v * v : v;"),
    ),
    "hinge": _one("v = fmaxf(1.0f - v * y[i * m + j], 0.0f);", believes="v = fmaxf(1.0f - v, 0.0f) * y[i * m + j];"),
    "lerp": _one("v = v + 0.25f * (y[i * m + j] - v);", believes="v = y[i * m + j] + 0.25f * (v - y[i * m + j]);"),
    "row_scale": _one("v = v * w[j];", "v *= w[j];"),
    "bias": _one("v = v + b[j];", "v += b[j];"),
}

LOOP = "for (int j = 0; j < m; j++)"


def _rows(*lines: str) -> tuple[str, ...]:
    return tuple(line.replace("LOOP", LOOP) for line in lines)


ROW: dict[str, Spelling] = {
    "softmax": Spelling(
        (
            _rows(
                "float top = o[0];",
                "LOOP top = fmaxf(top, o[j]);",
                "LOOP o[j] = expf(o[j] - top);",
                "float total = 0.0f;",
                "LOOP total += o[j];",
                "LOOP o[j] = o[j] / total;",
            ),
        ),
    ),
    "log_softmax": Spelling(
        (
            _rows(
                "float peak = o[0];",
                "LOOP peak = fmaxf(peak, o[j]);",
                "float mass = 0.0f;",
                "LOOP mass += expf(o[j] - peak);",
                "LOOP o[j] = o[j] - peak - logf(mass);",
            ),
        ),
        _rows(
            "float peak = o[0];",
            "LOOP peak = fmaxf(peak, o[j]);",
            "float mass = 0.0f;",
            "LOOP mass += expf(o[j] - peak);",
            "LOOP o[j] = o[j] - logf(mass);",
        ),
    ),
    "softmin": Spelling(
        (
            _rows(
                "float least = o[0];",
                "LOOP least = fminf(least, o[j]);",
                "LOOP o[j] = expf(least - o[j]);",
                "float heap = 0.0f;",
                "LOOP heap += o[j];",
                "LOOP o[j] = o[j] / heap;",
            ),
        ),
        _rows(
            "float least = o[0];",
            "LOOP least = fmaxf(least, o[j]);",
            "LOOP o[j] = expf(o[j] - least);",
            "float heap = 0.0f;",
            "LOOP heap += o[j];",
            "LOOP o[j] = o[j] / heap;",
        ),
    ),
    "rms_norm": Spelling(
        (
            _rows(
                "float power = 0.0f;",
                "LOOP power += o[j] * o[j];",
                "power = 1.0f / sqrtf(power / m + 1e-5f);",
                "LOOP o[j] = o[j] * power;",
            ),
        ),
        _rows(
            "float power = 0.0f;",
            "LOOP power += o[j] * o[j];",
            "power = 1.0f / sqrtf(power + 1e-5f);",
            "LOOP o[j] = o[j] * power;",
        ),
    ),
    "layer_norm": Spelling(
        (
            _rows(
                "float mean = 0.0f;",
                "LOOP mean += o[j] / m;",
                "float var = 0.0f;",
                "LOOP var += (o[j] - mean) * (o[j] - mean) / m;",
                "LOOP o[j] = (o[j] - mean) / sqrtf(var + 1e-5f);",
            ),
        ),
        _rows(
            "float mean = 0.0f;",
            "LOOP mean += o[j] / m;",
            "float var = 0.0f;",
            "LOOP var += (o[j] - mean) * (o[j] - mean) / (m - 1);",
            "LOOP o[j] = (o[j] - mean) / sqrtf(var + 1e-5f);",
        ),
    ),
    "l2_normalize": Spelling(
        (
            _rows(
                "float length = 0.0f;",
                "LOOP length += o[j] * o[j];",
                "length = fmaxf(sqrtf(length), 1e-12f);",
                "LOOP o[j] = o[j] / length;",
            ),
        ),
        _rows(
            "float length = 0.0f;",
            "LOOP length += o[j] * o[j];",
            "length = fmaxf(length, 1e-12f);",
            "LOOP o[j] = o[j] / length;",
        ),
    ),
    "l1_normalize": Spelling(
        (
            _rows(
                "float size = 0.0f;",
                "LOOP size += fabsf(o[j]);",
                "size = fmaxf(size, 1e-12f);",
                "LOOP o[j] = o[j] / size;",
            ),
        ),
        _rows(
            "float size = 0.0f;",
            "LOOP size += o[j];",
            "size = fmaxf(size, 1e-12f);",
            "LOOP o[j] = o[j] / size;",
        ),
    ),
    "center": Spelling(
        (_rows("float middle = 0.0f;", "LOOP middle += o[j] / m;", "LOOP o[j] = o[j] - middle;"),),
        _rows("float middle = 0.0f;", "LOOP middle += o[j];", "LOOP o[j] = o[j] - middle / (m - 1);"),
    ),
    "max_shift": Spelling(
        (_rows("float crest = o[0];", "LOOP crest = fmaxf(crest, o[j]);", "LOOP o[j] = o[j] - crest;"),)
    ),
    "min_max": Spelling(
        (
            _rows(
                "float lower = o[0], upper = o[0];",
                "LOOP lower = fminf(lower, o[j]);",
                "LOOP upper = fmaxf(upper, o[j]);",
                "LOOP o[j] = (o[j] - lower) / (upper - lower + 1e-3f);",
            ),
        ),
        _rows(
            "float lower = o[0], upper = o[0];",
            "LOOP lower = fminf(lower, o[j]);",
            "LOOP upper = fmaxf(upper, o[j]);",
            "LOOP o[j] = (o[j] - lower) / (upper + 1e-3f);",
        ),
    ),
    "cumsum": Spelling((_rows("float run = 0.0f;", "LOOP { run += o[j]; o[j] = run; }"),)),
    "cummax": Spelling((_rows("float high = o[0];", "LOOP { high = fmaxf(high, o[j]); o[j] = high; }"),)),
    "exclusive_cumsum": Spelling(
        (_rows("float before = 0.0f;", "LOOP { float t = o[j]; o[j] = before; before += t; }"),),
        _rows("float before = 0.0f;", "LOOP { before += o[j]; o[j] = before; }"),
    ),
    "reverse_cumsum": Spelling(
        (_rows("float back = 0.0f;", "for (int j = m - 1; j >= 0; j--) { back += o[j]; o[j] = back; }"),),
    ),
    "roll": Spelling(
        (_rows("float last = o[m - 1];", "for (int j = m - 1; j > 0; j--) o[j] = o[j - 1];", "o[0] = last;"),),
        _rows("float last = o[0];", "for (int j = 0; j < m - 1; j++) o[j] = o[j + 1];", "o[m - 1] = last;"),
    ),
}

# each ends with `float v = ...;`, which the element operators after it continue and `out[i] = v;` closes
REDUCE: dict[str, Spelling] = {
    "sum": Spelling((_rows("float v = 0.0f;", "LOOP v += o[j];"),)),
    "mean": Spelling((_rows("float v = 0.0f;", "LOOP v += o[j];", "v = v / m;"),)),
    "amax": Spelling((_rows("float v = o[0];", "LOOP v = fmaxf(v, o[j]);"),)),
    "amin": Spelling((_rows("float v = o[0];", "LOOP v = fminf(v, o[j]);"),)),
    "logsumexp": Spelling(
        (
            _rows(
                "float ridge = o[0];",
                "LOOP ridge = fmaxf(ridge, o[j]);",
                "float v = 0.0f;",
                "LOOP v += expf(o[j] - ridge);",
                "v = logf(v) + ridge;",
            ),
        ),
        _rows(
            "float ridge = o[0];",
            "LOOP ridge = fmaxf(ridge, o[j]);",
            "float v = 0.0f;",
            "LOOP v += expf(o[j] - ridge);",
            "v = logf(v);",
        ),
    ),
    "norm": Spelling(
        (_rows("float v = 0.0f;", "LOOP v += o[j] * o[j];", "v = sqrtf(v);"),),
        _rows("float v = 0.0f;", "LOOP v += fabsf(o[j]);"),
    ),
    "var": Spelling(
        (
            _rows(
                "float mu = 0.0f;",
                "LOOP mu += o[j] / m;",
                "float v = 0.0f;",
                "LOOP v += (o[j] - mu) * (o[j] - mu);",
                "v = v / m;",
            ),
        ),
        _rows(
            "float mu = 0.0f;",
            "LOOP mu += o[j] / m;",
            "float v = 0.0f;",
            "LOOP v += (o[j] - mu) * (o[j] - mu);",
            "v = v / (m - 1);",
        ),
    ),
    "std": Spelling(
        (
            _rows(
                "float mu = 0.0f;",
                "LOOP mu += o[j] / m;",
                "float v = 0.0f;",
                "LOOP v += (o[j] - mu) * (o[j] - mu);",
                "v = sqrtf(v / (m - 1));",
            ),
        ),
        _rows(
            "float mu = 0.0f;",
            "LOOP mu += o[j] / m;",
            "float v = 0.0f;",
            "LOOP v += (o[j] - mu) * (o[j] - mu);",
            "v = sqrtf(v / m);",
        ),
    ),
    "sum_squares": Spelling((_rows("float v = 0.0f;", "LOOP v += o[j] * o[j];"),)),
    "mean_abs": Spelling(
        (_rows("float v = 0.0f;", "LOOP v += fabsf(o[j]);", "v = v / m;"),),
        _rows("float v = 0.0f;", "LOOP v += o[j];", "v = fabsf(v) / m;"),
    ),
    "extent": Spelling(
        (
            _rows(
                "float floor_ = o[0], roof = o[0];",
                "LOOP floor_ = fminf(floor_, o[j]);",
                "LOOP roof = fmaxf(roof, o[j]);",
                "float v = roof - floor_;",
            ),
        ),
    ),
    "root_mean_square": Spelling(
        (_rows("float v = 0.0f;", "LOOP v += o[j] * o[j];", "v = sqrtf(v / m);"),),
        _rows("float v = 0.0f;", "LOOP v += o[j] * o[j];", "v = sqrtf(v) / m;"),
    ),
}

_FUNCTIONS = re.compile(r"\b(exp|expm1|log|log1p|tanh|erf|sqrt|sin|fabs|fmax|fmin)f\(")
_CONSTANTS = re.compile(r"(?<=\d)f\b")


def double_precision(line: str) -> str:
    """The same statement in double precision: the slow spelling that never vectorises well."""
    line = _CONSTANTS.sub("", _FUNCTIONS.sub(r"\1(", line))
    return re.sub(r"^(\s*)float (\w+ = |\w+;|\w+ = \w)", r"\1double \2", line)
