"""What the policy sees at the next turn: (opening messages, turns so far, fits) -> Prompt, or None when nothing fits.

`fits(messages)` says whether a prompt of these messages leaves room for a reply. A context never returns a prompt that
does not fit, keeps no state and changes no argument; its knobs are keyword-only, so that a recipe binds them with
`functools.partial`.

    full      opening + every turn as it was; only ever grows, so that the whole trajectory is one training row
    window    opening + the last k turns as they were
    digest    opening + of every turn the code, the policy's own summary and one line of feedback (Kevin)

`window` and `digest` drop turns, and the turn they drop may hold the best attempt; with `keep_best` it stays, as the
first turn of the history, as long as it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kernelwright.types import Fits, Message, Prompt, Turn

INSTRUCTION = "Answer with a better complete kernel."

_Render = Callable[[Sequence[Turn]], list[Message]]


class History(NamedTuple):
    """What there is to show of a trajectory."""

    # the newest summary turn, which stands for everything before it
    summary: Turn | None
    # the turns after it, oldest first
    turns: tuple[Turn, ...]
    # the attempt with the highest reward of the whole trajectory, the earliest among equals
    best: Turn | None


def history(turns: Sequence[Turn]) -> History:
    """The only way in which this module reads turns: the last summary, the turns after it, and the best attempt."""
    cut = max((index for index, turn in enumerate(turns) if turn.purpose == "summary"), default=-1)
    best = max((turn for turn in turns if turn.outcome), key=_reward, default=None)
    return History(turns[cut] if cut >= 0 else None, tuple(turns[cut + 1 :]), best)


def full(
    opening: tuple[Message, ...], turns: Sequence[Turn], fits: Fits, *, instruction: str = INSTRUCTION
) -> Prompt | None:
    """The opening and every turn as it was; None as soon as that does not fit.

    Every prompt is the one before it, the reply, and one more message, so a chat template that keeps replies continues
    it token for token.

    Args:
        instruction: constant last line of every message after the opening.
    """
    past = history(turns)
    messages = (*opening, *_summary(past, instruction), *_as_they_were(past.turns, instruction))
    return Prompt(messages=messages) if fits(messages) else None


def window(
    opening: tuple[Message, ...],
    turns: Sequence[Turn],
    fits: Fits,
    *,
    k: int = 3,
    keep_best: bool = True,
    instruction: str = INSTRUCTION,
) -> Prompt | None:
    """The opening and the last `k` turns as they were; fewer when they do not fit. Equal to `full` up to `k` turns.

    Args:
        k: turns shown at most, at least 1; a kept best attempt comes on top.
        keep_best: whether a best attempt that is older than these is shown first.
        instruction: constant last line of every message after the opening.
    """
    if k < 1:
        raise ValueError(f"a window shows at least one turn, got k={k}")
    past = history(turns)
    start = (*opening, *_summary(past, instruction))
    return _longest(start, past, fits, lambda shown: _as_they_were(shown, instruction), most=k, keep_best=keep_best)


def digest(
    opening: tuple[Message, ...],
    turns: Sequence[Turn],
    fits: Fits,
    *,
    keep_best: bool = True,
    instruction: str = INSTRUCTION,
) -> Prompt | None:
    """The opening, and of every turn its code block, its summary line and one line of feedback.

    Kevin, arXiv 2507.11948, section 4.2. The policy's reasoning is left out: the summary stands in for it. While the
    prompt does not fit, the oldest turns are dropped whole.

    Args:
        keep_best: whether the best attempt is dropped last (the paper: no).
        instruction: last line of the last message.
    """
    past = history(turns)
    start = (*opening, *_summary(past, instruction))
    return _longest(start, past, fits, lambda shown: _digests(shown, instruction), most=len(turns), keep_best=keep_best)


def _longest(
    start: tuple[Message, ...], past: History, fits: Fits, render: _Render, *, most: int, keep_best: bool
) -> Prompt | None:
    """The prompt with as many of the last turns as fit, one at least; with the best attempt if that fits beside one."""
    counts = range(min(most, len(past.turns)), 0, -1)
    if not counts:
        return Prompt(messages=start) if fits(start) else None
    choices = [past.turns[-count:] for count in counts]
    with_best = [_keeping(past.best, shown) for shown in choices] if keep_best else []
    for shown in (*with_best, *choices):
        messages = (*start, *render(shown))
        if fits(messages):
            return Prompt(messages=messages)
    return None


def _keeping(best: Turn | None, shown: tuple[Turn, ...]) -> tuple[Turn, ...]:
    # an equally good attempt among the shown ones says as much, and is newer
    if best is None or any(turn.outcome and _reward(turn) >= _reward(best) for turn in shown):
        return shown
    return (best, *shown)


def _reward(turn: Turn) -> float:
    return turn.outcome.reward if turn.outcome else float("-inf")


def _summary(past: History, instruction: str) -> list[Message]:
    if past.summary is None:
        return []
    return [Message(role="assistant", content=past.summary.text), Message(role="user", content=instruction)]


def _as_they_were(turns: Sequence[Turn], instruction: str) -> list[Message]:
    messages = []
    for turn in turns:
        feedback = f"{turn.outcome.feedback}\n{instruction}" if turn.outcome else instruction
        messages += [Message(role="assistant", content=turn.text), Message(role="user", content=feedback)]
    return messages


def _digests(turns: Sequence[Turn], instruction: str) -> list[Message]:
    messages = []
    for turn in turns:
        line = turn.outcome.feedback.partition("\n")[0] if turn.outcome else "Noted."
        ending = f"\n{instruction}" if turn is turns[-1] else ""
        messages += [Message(role="assistant", content=_digest(turn)), Message(role="user", content=line + ending)]
    return messages


def _digest(turn: Turn) -> str:
    if turn.purpose != "attempt":
        return turn.text
    block = "(no code)" if turn.source is None else f"{_fence(turn.text, turn.source)}\n{turn.source.rstrip()}\n```"
    return f"{block}\nSummary: {turn.summary}" if turn.summary else block


def _fence(text: str, source: str) -> str:
    """The line with which the policy opened its code block, so that no language is named here."""
    before = text[: max(text.rfind(source), 0)].splitlines()
    return before[-1].strip() if before and before[-1].lstrip().startswith("```") else "```"
