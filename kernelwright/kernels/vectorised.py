"""Which innermost loops of a C source the compiler did not vectorise."""

from __future__ import annotations

import re
from typing import Any

_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
_LOOP = re.compile(r"\b(?:for|while)\b")
_REPORT = re.compile(
    r"^kernel\.c:(\d+):\d+: optimized: .*(?:vectorized|library call|completely unrolled)", re.MULTILINE
)


def limit(source: str, report: str) -> dict[str, Any]:
    """`{"limit": "the loop in line 6 is not vectorised"}`, or nothing.

    Args:
        source: C text.
        report: what gcc printed under -fopt-info-loop-vec-optimized.
    """
    done = {int(found[1]) for found in _REPORT.finditer(report)}
    for first, last in innermost_loops(source):
        if not done.intersection(range(first, last + 1)):
            return {"limit": f"the loop in line {first} is not vectorised"}
    return {}


def innermost_loops(source: str) -> list[tuple[int, int]]:
    """First and last line of the header of every loop that holds no other loop, in order of the source."""
    text = _NOISE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    loops = []
    for found in _LOOP.finditer(text):
        header = _closing(text, text.find("(", found.end()))
        body = _statement_end(text, header)
        loops.append((found.start(), header, body))
    inner = [(a, b) for a, b, end in loops if not any(a < other < end for other, _, _ in loops)]
    return [(text.count("\n", 0, a) + 1, text.count("\n", 0, b) + 1) for a, b in inner]


def _closing(text: str, at: int) -> int:
    """Position after the bracket that closes the one at `at`; the end of the text if none does."""
    depth = 0
    for position in range(max(at, 0), len(text)):
        depth += (text[position] in "({") - (text[position] in ")}")
        if depth == 0:
            return position + 1
    return len(text)


def _statement_end(text: str, at: int) -> int:
    """Position after the statement that starts at `at`: a block, a nested loop or condition, or up to a semicolon."""
    start = re.compile(r"\s*").match(text, at)
    at = start.end() if start else at
    if text.startswith("{", at):
        return _closing(text, at)
    if nested := re.compile(r"(?:for|while|if)\b\s*").match(text, at):
        return _statement_end(text, _closing(text, nested.end()))
    end = text.find(";", at)
    return len(text) if end < 0 else end + 1
