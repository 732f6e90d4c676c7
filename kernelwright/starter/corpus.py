"""Dialogues from which the starter policy learns to write, to slip, and to answer feedback.

A dialogue is simulated: a draft is written, the evaluator really compiles, checks and times it, and the next draft
answers that feedback, mostly but not always well. The shares below make a policy with something to learn: it knows
every operator, but believes some wrong formulas, slips, prefers slow spellings, and breaks working kernels now and
then. No chain of the validation and held-out sets appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from kernelwright.starter.drafts import LOUD, Draft, SlipKind, repaired, source, spelling
from kernelwright.tasks import builtin
from kernelwright.tasks.operators import OPERATORS, UNPRACTISED, composable
from kernelwright.types import Evaluation, Status

# share of first attempts that hold a misconception where there is one: of operators that training tasks contain, and of
# the others, which no reward speaks of
BELIEVES, BELIEVES_UNPRACTISED = 0.75, 0.92
# share of attempts with a slip, and how the slips divide
SLIPS = 0.24
SLIP_SHARES: dict[SlipKind, float] = {
    "no_code": 2, "semicolon": 5, "undeclared": 4, "brace": 3, "crash": 3, "endless": 2,
    "bounds": 4, "overrun": 3, "initial": 3, "stride": 3, "drop": 5,
}  # fmt: skip
# share of answers that cure a fault the feedback is about
CURES_SLIP, CURES_MISCONCEPTION = 0.72, 0.66
# share of correct kernels that are given again as they are: what to do when nothing is left to gain
KEEPS = 0.3
# share of improvements of a correct kernel that break it
BREAKS = 0.2
# share of first attempts in the fast spelling, by decision
SINGLE, FAST_MATHS, ROWS_OUTSIDE = 0.35, 0.08, 0.5
# share of improvements that take up each fast spelling
TAKES_UP = 0.5

Judge = Callable[[tuple[str, ...], str | None], Evaluation]


class Reply(NamedTuple):
    """One assistant message of a dialogue, with the draft it was written from."""

    text: str
    source: str | None
    summary: str
    draft: Draft


class Exchange(NamedTuple):
    """A reply and what the evaluator said; the last exchange of a dialogue was not evaluated."""

    reply: Reply
    evaluation: Evaluation | None


class Dialogue(NamedTuple):
    """A task's chain and its exchanges, at least one."""

    chain: tuple[str, ...]
    exchanges: tuple[Exchange, ...]


def random_chains(rng: Random) -> Iterator[tuple[str, ...]]:
    """Endless composable chains of one to three operators, none of the validation or held-out tasks."""
    reserved = {*builtin.chains("validation"), *builtin.chains("heldout")}
    names = list(OPERATORS)
    while True:
        length = rng.choices((1, 2, 3), (0.14, 0.38, 0.48))[0]
        chain = tuple(rng.choice(names) for _ in range(length))
        heavy = sum(OPERATORS[name].kind != "element" for name in chain)
        if composable(chain) and len(set(chain)) == length and heavy <= 2 and chain not in reserved:
            yield chain


def first_draft(chain: tuple[str, ...], rng: Random) -> Draft:
    """An attempt without feedback."""
    choices = []
    for name in chain:
        found = spelling(name)
        believes = BELIEVES_UNPRACTISED if name in UNPRACTISED else BELIEVES
        wrong = found is not None and found.misconception is not None and rng.random() < believes
        choices.append(-1 if wrong else rng.randrange(len(found.right)) if found else 0)
    return Draft(
        chain=chain,
        spellings=tuple(choices),
        single=rng.random() < SINGLE,
        fast_maths=rng.random() < FAST_MATHS,
        rows_outside=rng.random() < ROWS_OUTSIDE,
        slip=_slip(rng, SLIPS),
    )


def _slip(rng: Random, share: float) -> SlipKind | None:
    if rng.random() >= share:
        return None
    return rng.choices(list(SLIP_SHARES), list(SLIP_SHARES.values()))[0]


def first_reply(chain: tuple[str, ...], rng: Random) -> Reply:
    """The reply of a first attempt."""
    draft = first_draft(chain, rng)
    precision = "single" if draft.single else "double"
    return reply(draft, f"{' then '.join(chain)} in {precision} precision.", "first version.")


def next_reply(previous: Reply, evaluation: Evaluation, rng: Random) -> Reply:
    """The answer to the feedback on `previous`."""
    draft = previous.draft
    if evaluation.trusted:
        return _improve(draft, rng)
    loud = draft.slip in LOUD
    names = draft.misconceptions
    cure_slip = draft.slip is not None and rng.random() < CURES_SLIP
    cure_names = bool(names) and not loud and evaluation.status is Status.WRONG and rng.random() < CURES_MISCONCEPTION
    cured = repaired(draft, slip=cure_slip, misconceptions=cure_names)
    if cured.slip is None:
        cured = replace(cured, slip=_slip(rng, SLIPS * 0.3))
    if cure_names:
        return reply(
            cured,
            f"other formula instead of {' then '.join(names)}.",
            f"changed the formula of {' then '.join(names)}.",
        )
    return reply(cured, _REMEDIES[evaluation.status], "mended the fault.")


_REMEDIES = {
    Status.NO_CODE: "give the code block.",
    Status.COMPILE_ERROR: "mend the syntax.",
    Status.CRASH: "mend the loop index.",
    Status.TIMEOUT: "mend the endless loop.",
    Status.WRONG: "check every operator and bound.",
    Status.CORRECT: "compute it all.",
}


def _improve(draft: Draft, rng: Random) -> Reply:
    """Keep a correct kernel, make it faster, or break it."""
    if rng.random() < KEEPS:
        return reply(draft, "keep what works.", "unchanged.")
    faster = replace(
        draft,
        single=draft.single or rng.random() < TAKES_UP,
        fast_maths=draft.fast_maths or rng.random() < TAKES_UP,
        rows_outside=draft.rows_outside or rng.random() < TAKES_UP,
        slip=_slip(rng, BREAKS),
    )
    changes = [
        text
        for text, old, new in (
            ("single precision", draft.single, faster.single),
            ("fast maths", draft.fast_maths, faster.fast_maths),
            ("rows outside", draft.rows_outside, faster.rows_outside),
        )
        if new and not old
    ]
    plan = f"faster: {', '.join(changes)}." if changes else "keep what works."
    return reply(faster, plan, f"{', '.join(changes)}." if changes else "unchanged.")


def reply(draft: Draft, plan: str, summary: str) -> Reply:
    """The text of an assistant message."""
    if draft.slip == "no_code":
        return Reply(f"Plan: {plan}\nOne loop over the rows does it.\n", None, "", draft)
    text = source(draft)
    return Reply(f"Plan: {plan}\n```c\n{text}```\nSummary: {summary}\n", text, summary, draft)


def dialogue(chain: tuple[str, ...], turns: int, judge: Judge, rng: Random) -> Dialogue:
    """Simulate one dialogue; `judge(chain, source)` evaluates every reply but the last."""
    exchanges: list[Exchange] = []
    current = first_reply(chain, rng)
    for _ in range(turns - 1):
        evaluation = judge(chain, current.source)
        exchanges.append(Exchange(current, evaluation))
        current = next_reply(current, evaluation, rng)
    return Dialogue(chain, (*exchanges, Exchange(current, None)))
