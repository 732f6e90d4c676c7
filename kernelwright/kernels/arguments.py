"""What the arguments of a program are called in a kernel, and how a program lists them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

_SIZE_NAMES = ("n", "m", "k")
# what a kernel's arguments cannot be called: the output, the sizes, and the keywords of C
_TAKEN = {
    "out", "kernel", *_SIZE_NAMES, "auto", "break", "case", "char", "const", "continue", "default", "do", "double",
    "else", "enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return",
    "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile",
    "while",
}  # fmt: skip


def size_name(count: int) -> str:
    """Name of the size number `count`: n, m, k, d3, d4, ..."""
    return _SIZE_NAMES[count] if count < len(_SIZE_NAMES) else f"d{count}"


def split(given: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments: KernelBench lists the former, KernelBook gives `[[...], {...}]`."""
    pair = len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], dict)
    return (list(given[0]), dict(given[1])) if pair else (list(given), {})


def input_names(forward: Any, count: int) -> list[str]:
    """Names of the arguments of `forward`, changed where they mean something else among a kernel's arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    names += [f"x{position}" for position in range(len(names), count)]
    return [f"{name}_" if name in _TAKEN or re.fullmatch(r"d\d+", name) else name for name in names]
