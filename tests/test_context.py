"""What the policy sees: three contexts on hand-made turns, and properties on random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kernelwright.context import INSTRUCTION, digest, full, history, window
from kernelwright.types import Completion, Message, Outcome, Prompt, Spans, Turn

OPENING = (Message(role="system", content="You write code."), Message(role="user", content="Do it."))


def turn(
    text: str, reward: float, *, source: str | None = None, summary: str = "", feedback: str = "Wrong.\nAt 3."
) -> Turn:
    return Turn(
        purpose="attempt",
        context=(1,),
        continues=False,
        completion=Completion(tokens=(1,), logprobs=(-0.5,), temperature=1.0, top_p=1.0, stop="end"),
        text=text,
        source=source,
        spans=Spans(),
        summary=summary,
        outcome=Outcome(feedback=feedback, parts={"score": reward}),
    )


def summary_turn(text: str) -> Turn:
    return Turn(
        purpose="summary",
        context=(1,),
        continues=False,
        completion=Completion(tokens=(1,), logprobs=(-0.5,), temperature=1.0, top_p=1.0, stop="end"),
        text=text,
        source=None,
        spans=Spans(),
    )


def anything(messages: Sequence[Message]) -> bool:
    return True


def at_most(characters: int) -> Callable[[Sequence[Message]], bool]:
    return lambda messages: sum(len(message.content) for message in messages) <= characters


def contents(prompt: Prompt | None) -> list[str]:
    assert prompt is not None
    return [message.content for message in prompt.messages]


def test_every_context_starts_with_the_opening_alone() -> None:
    for context in (full, window, digest):
        assert context(OPENING, [], anything) == Prompt(messages=OPENING)
        assert context(OPENING, [], at_most(20)) is None


def test_full_shows_replies_and_feedback_as_they_were() -> None:
    prompt = full(OPENING, [turn("first", 0.0), turn("second", 1.0, feedback="Correct.")], anything)
    assert contents(prompt)[2:] == ["first", f"Wrong.\nAt 3.\n{INSTRUCTION}", "second", f"Correct.\n{INSTRUCTION}"]
    assert prompt is not None and [message.role for message in prompt.messages[2:]] == ["assistant", "user"] * 2


def test_full_only_grows_and_ends_when_it_does_not_fit() -> None:
    turns = [turn(f"reply {number}", number) for number in range(5)]
    prompts = [full(OPENING, turns[:count], anything) for count in range(6)]
    for before, after in itertools.pairwise(prompts):
        assert before is not None and after is not None
        assert after.messages[: len(before.messages)] == before.messages
        assert len(after.messages) == len(before.messages) + 2
    assert full(OPENING, turns, at_most(100)) is None


def test_window_keeps_the_last_turns_and_a_better_older_one() -> None:
    turns = [turn("best", 2.0), turn("b", 0.0), turn("c", 1.0), turn("d", 0.0)]
    assert contents(window(OPENING, turns, anything, k=2))[2::2] == ["best", "c", "d"]
    assert contents(window(OPENING, turns, anything, k=2, keep_best=False))[2::2] == ["c", "d"]
    # an equally good attempt that is shown anyway needs no older one
    assert contents(window(OPENING, [*turns, turn("e", 2.0)], anything, k=2))[2::2] == ["d", "e"]


def test_window_equals_full_while_it_is_wide_enough() -> None:
    turns = [turn(f"reply {number}", -number) for number in range(4)]
    for count in range(4):
        assert window(OPENING, turns[:count], anything, k=3) == full(OPENING, turns[:count], anything)
    assert window(OPENING, turns, anything, k=3, keep_best=False) != full(OPENING, turns, anything)


def test_window_of_no_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="k=0"):
        window(OPENING, [], anything, k=0)


def test_window_prefers_the_best_attempt_to_a_longer_tail() -> None:
    # room for the opening and two turns of 10 + 10 characters, feedback and instruction included
    turns = [turn("A" * 10, 5.0), turn("B" * 10, 0.0), turn("C" * 10, 0.0)]
    size = 21 + 2 * (10 + len("Wrong.\nAt 3.\n") + len(INSTRUCTION))
    assert contents(window(OPENING, turns, at_most(size), k=3))[2::2] == ["A" * 10, "C" * 10]
    assert contents(window(OPENING, turns, at_most(size), k=3, keep_best=False))[2::2] == ["B" * 10, "C" * 10]


def test_digest_shows_code_summary_and_one_line() -> None:
    text = "Long thoughts.\n```c\nint a;\n```\nSummary: made a"
    turns = [turn(text, 0.3, source="int a;\n", summary="made a"), turn("only thoughts", 0.0, feedback="No code.")]
    assert contents(digest(OPENING, turns, anything))[2:] == [
        "```c\nint a;\n```\nSummary: made a",
        "Wrong.",
        "(no code)",
        f"No code.\n{INSTRUCTION}",
    ]


def test_digest_drops_the_oldest_turn_whole_and_gives_up_last() -> None:
    turns = [turn(f"```\n{letter}\n```", 0.0, source=f"{letter}\n") for letter in "abc"]
    whole = sum(map(len, contents(digest(OPENING, turns, anything))))
    assert contents(digest(OPENING, turns, at_most(whole)))[2::2] == ["```\na\n```", "```\nb\n```", "```\nc\n```"]
    assert contents(digest(OPENING, turns, at_most(whole - 1)))[2::2] == ["```\nb\n```", "```\nc\n```"]
    assert digest(OPENING, turns, at_most(30)) is None


def test_history_begins_after_the_last_summary() -> None:
    turns = [turn("a", 3.0), summary_turn("so far: a"), turn("b", 1.0), summary_turn("so far: a, b"), turn("c", 2.0)]
    past = history(turns)
    assert past.summary is turns[3] and past.turns == (turns[4],) and past.best is turns[0]
    for context in (full, partial(window, keep_best=False)):
        assert contents(context(OPENING, turns, anything))[2::2] == ["so far: a, b", "c"]
    assert contents(window(OPENING, turns, anything))[2::2] == ["so far: a, b", "a", "c"]
    assert contents(full(OPENING, turns[:4], anything))[2:] == ["so far: a, b", INSTRUCTION]


@pytest.mark.parametrize("seed", range(200))
def test_random_histories(seed: int) -> None:
    """Never over the budget, the latest turn always there, the best one whenever it fits beside it."""
    draw = random.Random(seed)
    turns = [
        turn(
            f"{number}:" + "x" * draw.randrange(60),
            draw.choice([0.0, 0.3, draw.random()]),
            feedback="F" * draw.randrange(40),
        )
        for number in range(draw.randrange(1, 7))
    ]
    budget = draw.randrange(30, 500)
    best = max(turns, key=lambda one: one.outcome.reward if one.outcome else 0.0)
    for context in (partial(window, k=draw.randrange(1, 4)), partial(window, k=9)):
        prompt = context(OPENING, turns, at_most(budget))
        smallest = full(OPENING, turns[-1:], anything)
        assert smallest is not None
        if prompt is None:
            assert not at_most(budget)(smallest.messages)
            continue
        assert at_most(budget)(prompt.messages)
        shown = contents(prompt)[2::2]
        assert shown[-1] == turns[-1].text
        # shown turns are some of the turns, in their order
        assert [one.text for one in turns if one.text in shown] == shown
        pair = full(OPENING, [best, turns[-1]] if best is not turns[-1] else [best], at_most(budget))
        if pair is not None:
            rewards = [one.outcome.reward for one in turns if one.outcome and one.text in shown]
            assert best.outcome is not None and max(rewards) == best.outcome.reward
    short = digest(OPENING, turns, at_most(budget))
    assert short is None or at_most(budget)(short.messages)
