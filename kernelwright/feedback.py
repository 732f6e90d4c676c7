"""Evaluation -> the text the policy sees next.

The first line always stands alone (contexts that keep one line of feedback a turn keep that one); the others add places
and figures. Order of the cases: the first thing that went wrong wins (Kevin, arXiv 2507.11948, appendix D).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import median
from typing import Literal

from kernelwright.types import Evaluation, Status


def feedback(evaluation: Evaluation, *, style: Literal["line", "full", "record"] = "full") -> str:
    """The feedback text.

    Args:
        style: "line" is one sentence (Kevin); "full" adds the place in the source, the first wrong element, the times
            and what limits the kernel; "record" is the whole evaluation as indented JSON (Dr. Kernel).
    """
    if style == "record":
        record = {key: value for key, value in asdict(evaluation).items() if value not in (None, "", (), {})}
        return json.dumps({**record, "speedup": evaluation.speedup}, indent=2)
    line = first_line(evaluation)
    return line if style == "line" else "\n".join([line, *_details(evaluation)])


def first_line(evaluation: Evaluation) -> str:
    """One sentence about the first thing that went wrong, or the speedup."""
    message = " ".join(evaluation.message.split())
    place = f" in line {evaluation.location.line}" if evaluation.location else ""
    match evaluation.status:
        case Status.NO_CODE:
            return f"No code: {message or 'the reply holds no complete fenced code block'}."
        case Status.COMPILE_ERROR:
            return f"Compile error{place}: {message}."
        case Status.CRASH:
            return f"Crash{place}: {message}."
        case Status.TIMEOUT:
            return f"Timeout: {message}."
        case Status.WRONG:
            return f"Wrong result: {message}."
    if evaluation.hacks:
        return f"Rejected ({evaluation.hacks[0].rule}): {evaluation.hacks[0].evidence}."
    if evaluation.speedup is None:
        return "Correct."
    limit = f"; {evaluation.profile['limit']}" if "limit" in evaluation.profile else ""
    return f"Correct: {evaluation.speedup:.2g} times the speed of PyTorch{limit}."


def _details(evaluation: Evaluation) -> list[str]:
    lines = []
    if evaluation.location and evaluation.location.text:
        lines.append(f"    {evaluation.location.line} | {evaluation.location.text.rstrip()}")
    if evaluation.error_index is not None:
        index = ", ".join(str(i) for i in evaluation.error_index)
        lines.append(f"First wrong element: out[{index}] is {evaluation.got:.5g}, expected {evaluation.expected:.5g}.")
    if evaluation.kernel_ms:
        kernel, reference = median(evaluation.kernel_ms), median(evaluation.reference_ms)
        lines.append(f"{kernel:.3g} ms, PyTorch {reference:.3g} ms.")
    return lines
