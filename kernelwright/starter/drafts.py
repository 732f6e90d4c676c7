"""A C kernel as a few decisions, and its source text: what the corpus generator varies, breaks and repairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kernelwright.starter.spellings import ELEMENT, LOOP, REDUCE, ROW, Spelling, double_precision
from kernelwright.tasks.operators import OPERATORS

SlipKind = Literal[
    "no_code", "semicolon", "undeclared", "brace", "crash", "endless", "bounds", "overrun", "initial", "stride", "drop"
]  # fmt: skip
# the slips after which the evaluator does not get as far as comparing numbers
LOUD: tuple[SlipKind, ...] = ("no_code", "semicolon", "undeclared", "brace", "crash", "endless")
FAST_MATHS = '#pragma GCC optimize("Ofast")'


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """One kernel. Two drafts are equal when their sources are."""

    chain: tuple[str, ...]
    # which right spelling an operator gets, -1 for the misconception  [operators]
    spellings: tuple[int, ...]
    single: bool = False
    fast_maths: bool = False
    # element-wise kernels and products: the loop over columns inside (fast) or outside
    rows_outside: bool = False
    slip: SlipKind | None = None

    @property
    def misconceptions(self) -> tuple[str, ...]:
        """Names of the operators that are computed by a wrong formula."""
        return tuple(name for name, choice in zip(self.chain, self.spellings, strict=True) if choice < 0)


def spelling(name: str) -> Spelling | None:
    """The spellings of an operator; None for the two that start a chain, which are written by `source`."""
    return {**ELEMENT, **ROW, **REDUCE}.get(name)


def source(draft: Draft) -> str:
    """The C source of a draft, slip included."""
    chain, choices = _written(draft)
    kinds = [OPERATORS[name].kind for name in chain]
    if all(kind == "element" for kind in kinds):
        body = _element_kernel(draft, chain, choices)
    else:
        body = _row_kernel(draft, chain, choices)
    if not draft.single:
        body = [double_precision(line) for line in body]
    head = [FAST_MATHS] if draft.fast_maths else []
    lines = [*head, "#include <math.h>", "", _signature(draft.chain), *("  " + line for line in body), "}"]
    return "\n".join(_slipped(lines, draft.slip)) + "\n"


def _signature(chain: tuple[str, ...]) -> str:
    names = ["x", *(name for operator in chain for name in OPERATORS[operator].inputs)]
    sizes = "int n, int k, int m" if chain[0] == "matmul" else "int n, int m"
    return f"void kernel({', '.join(f'const float *{name}' for name in names)}, float *out, {sizes}) {{"


def _lines(name: str, choice: int) -> tuple[str, ...]:
    found = spelling(name)
    if found is None:
        raise ValueError(f"'{name}' has no spelling of its own")
    if choice < 0:
        if found.misconception is None:
            raise ValueError(f"there is no misconception of '{name}'")
        return found.misconception
    return found.right[choice]


def _element_kernel(draft: Draft, chain: list[str], choices: list[int]) -> list[str]:
    outer, inner = "for (int i = 0; i < n; i++) {", f"{LOOP} {{"
    if not draft.rows_outside:
        outer, inner = inner, outer
    body = [line for name, choice in zip(chain, choices, strict=True) for line in _lines(name, choice)]
    inside = ["float v = x[i * m + j];", *body, "out[i * m + j] = v;"]
    return [outer, "  " + inner, *("    " + line for line in inside), "  }", "}"]


def _row_kernel(draft: Draft, chain: list[str], choices: list[int]) -> list[str]:
    reduces = any(OPERATORS[name].kind == "reduce" for name in chain)
    lines = ["float o[m];" if reduces else "float *o = out + i * m;"]
    load, pending, after, reduced = "x[i * m + j]", [], [], False

    def flush() -> None:
        nonlocal load
        if pending:
            lines.extend([f"{LOOP} {{", f"  float v = {load};", *("  " + line for line in pending), "  o[j] = v;", "}"])
        elif load != "o[j]":
            lines.append(f"{LOOP} o[j] = {load};")
        load = "o[j]"
        pending.clear()

    for name, choice in zip(chain, choices, strict=True):
        kind = OPERATORS[name].kind
        if kind == "start":
            lines.extend(_start(name, draft))
            load = "o[j]"
        elif kind == "element" and not reduced:
            pending.extend(_lines(name, choice))
        elif kind == "element":
            after.extend(_lines(name, choice))
        else:
            flush()
            lines.extend(_lines(name, choice))
            reduced = reduced or kind == "reduce"
    if after:
        # a block of its own, so that a statement is the same line wherever it stands
        lines.extend(["{", *("  " + line for line in after), "}"])
    if reduced:
        lines.append("out[i] = v;")
    elif pending:
        flush()
    return ["for (int i = 0; i < n; i++) {", *("  " + line for line in lines), "}"]


def _start(name: str, draft: Draft) -> list[str]:
    if name == "rope":
        turned = "(j < m / 2 ? -x[i * m + j + m / 2] : x[i * m + j - m / 2])"
        return [f"{LOOP} o[j] = x[i * m + j] * c[i * m + j] + {turned} * s[i * m + j];"]
    if draft.rows_outside:
        return [
            f"{LOOP} o[j] = 0.0f;",
            f"for (int p = 0; p < k; p++) {LOOP} o[j] += x[i * k + p] * a[p * m + j];",
        ]
    return [
        f"{LOOP} {{",
        "  float sum = 0.0f;",
        "  for (int p = 0; p < k; p++) sum += x[i * k + p] * a[p * m + j];",
        "  o[j] = sum;",
        "}",
    ]


def _written(draft: Draft) -> tuple[list[str], list[int]]:
    """The chain as written: the slip "drop" forgets its last element-wise operator."""
    chain, choices = list(draft.chain), list(draft.spellings)
    elements = [index for index, name in enumerate(chain) if OPERATORS[name].kind == "element"]
    if draft.slip == "drop" and len(chain) > 1 and elements:
        del chain[elements[-1]], choices[elements[-1]]
    return chain, choices


# slips that change a few characters, (old, new, what else the line has to contain): the first line that fits is changed
_EDITS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "undeclared": (("float v", "v", "= "), ("double v", "v", "= ")),
    "crash": (("j++", "i++", "{"),),
    "endless": (("i < n; i++", "i < n;", ""),),
    "bounds": (("j < m;", "j < m - 1;", ""),),
    "overrun": (("j < m;", "j <= m;", "j++"),),
    "initial": (("= 0.0", "= 1.0", ""), ("= o[0]", "= 0.0", "")),
    "stride": (("x[i * m + j]", "x[i * n + j]", ""),),
}


def _slipped(lines: list[str], slip: SlipKind | None) -> list[str]:
    """The lines after a slip that a text editor could make. It happens in one place, the first where it can."""
    if slip == "brace":
        return lines[:-1]
    if slip == "semicolon":
        declarations = [index for index, line in enumerate(lines) if line.endswith(";") and line.startswith("    ")]
        return [*lines[: declarations[0]], lines[declarations[0]][:-1], *lines[declarations[0] + 1 :]]
    for old, new, where in _EDITS.get(slip or "", ()):
        for index, line in enumerate(lines):
            if old in line and where in line and not line.startswith("void"):
                return [*lines[:index], line.replace(old, new, 1), *lines[index + 1 :]]
    return lines


def repaired(draft: Draft, *, slip: bool = True, misconceptions: bool = True) -> Draft:
    """The draft without its slip, its misconceptions, or both."""
    return replace(
        draft,
        slip=None if slip else draft.slip,
        spellings=tuple(max(choice, 0) for choice in draft.spellings) if misconceptions else draft.spellings,
    )
