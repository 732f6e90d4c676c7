"""The opening messages of a task, and how a reply is read.

A backend brings its own rules as text (`instructions`), so nothing here knows a language.

A reply is a plan, one fenced code block and a line that starts with "Summary:". One extraction rule serves every
environment: after the last `</think>` (if there is one), **the last complete fenced block is the code**; everything
before it is the plan. A reply without a complete block has no code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kernelwright.types import Message, Spans, Task

_OPENING = """\
Write a fast {language} kernel that computes what this PyTorch program computes.
```python
{reference}
```
{instructions}
Reply with a one-line plan, the complete source in one ```{fence} block, and a line "Summary:" that says what you changed.
"""  # noqa: E501 - one line of the prompt

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_SUMMARY = re.compile(r"^[ \t]*\**Summary:\**[ \t]*(.+)$", re.MULTILINE)


class Reply(NamedTuple):
    """A reply taken apart; the ranges are half-open character positions, (0, 0) where a part is absent."""

    source: str | None
    summary: str
    plan_range: tuple[int, int]
    code_range: tuple[int, int]
    summary_range: tuple[int, int]


def opening(task: Task, *, language: str, fence: str, instructions: str, example: str = "") -> tuple[Message, ...]:
    """The messages with which every trajectory of `task` starts; exactly what `kernelwright tasks show` prints.

    Args:
        language: name for prose, such as "C" or "Triton".
        fence: the tag of the code block that the reply should carry.
        instructions: the backend's rules for this task: entry point, shapes, what is allowed.
        example: a worked example, shown once, after the instructions (Kevin, appendix D: only in the first turn).
    """
    text = _OPENING.format(
        language=language, reference=task.reference.strip(), instructions=instructions.strip(), fence=fence
    )
    return (Message(role="user", content=text + (f"\n{example.strip()}\n" if example else "")),)


def read_reply(text: str) -> Reply:
    """Take a reply apart by the module's one rule."""
    start = text.rfind("</think>")
    start = 0 if start < 0 else start + len("</think>")
    blocks = list(_BLOCK.finditer(text, start))
    if not blocks:
        return Reply(None, "", (0, len(text)), (0, 0), (0, 0))
    block = blocks[-1]
    found = _SUMMARY.search(text, block.end())
    return Reply(
        source=block.group(1),
        summary=found.group(1).strip() if found else "",
        plan_range=(0, block.start()),
        code_range=block.span(),
        summary_range=found.span() if found else (0, 0),
    )


def token_spans(reply: Reply, starts: Sequence[int]) -> Spans:
    """Character ranges of a reply as token ranges.

    Args:
        reply: from `read_reply`.
        starts: position in the decoded text at which each sampled token starts  [T], non-decreasing.

    A token belongs to the part in which it starts, so every token belongs to one part at most.
    """

    def tokens(span: tuple[int, int]) -> tuple[int, int]:
        if span[0] == span[1]:
            return (0, 0)
        inside = [index for index, start in enumerate(starts) if span[0] <= start < span[1]]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)

    return Spans(plan=tokens(reply.plan_range), code=tokens(reply.code_range), summary=tokens(reply.summary_range))
