"""A C kernel as a few decisions, and its source text: what the corpus generator varies, breaks and repairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from kernelwright.starter.spellings import ELEMENT, LOOP, REDUCE, ROW, Spelling, double_precision
from kernelwright.tasks.operators import OPERATORS

SlipKind = Literal[
    "no_code", "semicolon", "undeclared", "brace", "crash", "endless",
    "bounds", "overrun", "initial", "stride", "drop", "swap", "replace",
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
    # decides where the slip happens
    slip_seed: int = 0

    @property
    def misconceptions(self) -> tuple[str, ...]:
        """Names of the operators that are computed by a wrong formula."""
        return tuple(name for name, choice in zip(self.chain, self.spellings, strict=True) if choice < 0)


def spelling(name: str) -> Spelling | None:
    """The spellings of an operator; None for the two that start a chain, which are written by `source`."""
    return {**ELEMENT, **ROW, **REDUCE}.get(name)


def source(draft: Draft) -> str:
    """The C source of a draft, slip included."""
    rng = Random(draft.slip_seed)
    chain, choices = _mistaken_chain(draft, rng)
    kinds = [OPERATORS[name].kind for name in chain]
    if all(kind == "element" for kind in kinds):
        body = _element_kernel(draft, chain, choices)
    else:
        body = _row_kernel(draft, chain, choices)
    if not draft.single:
        body = [double_precision(line) for line in body]
    head = [FAST_MATHS] if draft.fast_maths else []
    lines = [*head, "#include <math.h>", "", _signature(draft.chain), *("  " + line for line in body), "}"]
    return "\n".join(_slipped(lines, draft.slip, rng)) + "\n"


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
    load, pending, reduced = "x[i * m + j]", [], False

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
            lines.extend(_lines(name, choice))
        else:
            flush()
            lines.extend(_lines(name, choice))
            reduced = reduced or kind == "reduce"
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


def _mistaken_chain(draft: Draft, rng: Random) -> tuple[list[str], list[int]]:
    """The chain as written, after the slips that change which operators are computed."""
    chain, choices = list(draft.chain), list(draft.spellings)
    elements = [index for index, name in enumerate(chain) if OPERATORS[name].kind == "element"]
    if draft.slip == "drop" and len(chain) > 1 and elements:
        index = rng.choice(elements)
        del chain[index], choices[index]
    elif draft.slip == "replace" and elements:
        index = rng.choice(elements)
        plain = [name for name in ELEMENT if not OPERATORS[name].inputs and name != chain[index]]
        chain[index], choices[index] = rng.choice(plain), 0
    elif draft.slip == "swap" and len(elements) > 1:
        index = rng.choice(elements[:-1])
        if index + 1 in elements:
            chain[index : index + 2] = chain[index + 1], chain[index]
            choices[index : index + 2] = choices[index + 1], choices[index]
    return chain, choices


def _slipped(lines: list[str], slip: SlipKind | None, rng: Random) -> list[str]:
    """The lines after the slips that a text editor could make."""

    def change(old: str, new: str, *, where: str = "") -> list[str]:
        places = [index for index, line in enumerate(lines) if old in line and where in line]
        if not places:
            return lines
        index = rng.choice(places)
        return [*lines[:index], lines[index].replace(old, new, 1), *lines[index + 1 :]]

    match slip:
        case "semicolon":
            places = [index for index, line in enumerate(lines) if line.endswith(";")]
            index = rng.choice(places)
            return [*lines[:index], lines[index][:-1], *lines[index + 1 :]]
        case "undeclared":
            declared = rng.choice(["float ", "double "]) if any("double " in line for line in lines[3:]) else "float "
            return change("  " + declared, "  ", where=" = ")
        case "brace":
            return lines[:-1]
        case "crash":
            return change("j++", "i++", where="{")
        case "endless":
            return change("i < n; i++", "i < n;")
        case "bounds":
            return change("j < m;", "j < m - 1;")
        case "overrun":
            return change("j < m;", "j <= m;", where="j++")
        case "initial":
            return change("= 0.0", "= 1.0") if rng.random() < 0.5 else change("= o[0]", "= 0.0")
        case "stride":
            return change("x[i * m + j]", "x[i * n + j]")
        case _:
            return lines


def repaired(draft: Draft, *, slip: bool = True, misconceptions: bool = True) -> Draft:
    """The draft without its slip, its misconceptions, or both."""
    return replace(
        draft,
        slip=None if slip else draft.slip,
        spellings=tuple(max(choice, 0) for choice in draft.spellings) if misconceptions else draft.spellings,
    )
