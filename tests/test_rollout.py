"""Rollout against a scripted engine: token exactness, budgets, ends, order, and failures of our own side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from runs import GuessEpisode, guess_task, reply

from kernelwright.context import digest, full, window
from kernelwright.engines.scripted import ScriptedEngine
from kernelwright.errors import InfrastructureError
from kernelwright.rollout import rollout
from kernelwright.samples import rows
from kernelwright.types import Context, Fits, Group, Message, Outcome, Prompt, Sampling, Task, TrajectoryStop, Turn

SAMPLING = Sampling(max_tokens=80, budget=1000)
TASKS = [guess_task(1), guess_task(3)]
OPENING = (Message(role="user", content="Guess."),)


def guesses(prompt: str, key: tuple[int, ...]) -> str:
    """Another number for every prompt and key; sometimes no code at all, sometimes a reply that is cut."""
    number = (len(prompt) * 7 + sum(part * (place + 2) for place, part in enumerate(key))) % 6
    return "I give up." if number == 4 else "x" * 100 if number == 5 else reply(number)


def run(engine: ScriptedEngine, context: Context, **changes: Any) -> list[Group]:
    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        return OPENING, GuessEpisode(task, scale=1.0)

    values: dict[str, Any] = {
        "environment": environment,
        "context": context,
        "max_turns": 4,
        "group_size": 3,
        "sampling": SAMPLING,
    }
    return rollout(TASKS, engine, **{**values, **changes})


def test_groups_are_complete_and_in_order() -> None:
    groups = run(ScriptedEngine(guesses), full)
    assert [group.task for group in groups] == ["guess/1", "guess/3"]
    for group in groups:
        assert [len(one.turns) for one in group.trajectories] == [4, 4, 4]
        assert {one.stop for one in group.trajectories} == {TrajectoryStop.MAX_TURNS}
        for turn in (turn for one in group.trajectories for turn in one.turns):
            assert turn.outcome is not None and turn.outcome.evaluation is not None
            assert turn.outcome.evaluation.task == group.task
            assert (turn.source is None) == (turn.outcome.evaluation.status == "NO_CODE")


def test_replies_are_taken_apart() -> None:
    turn = run(ScriptedEngine([reply(2)]), full)[0].trajectories[0].turns[0]
    assert (turn.source, turn.summary) == ("2\n", "now 2")
    # one token a byte, so token ranges are character ranges
    parts = [turn.text[slice(*span)] for span in (turn.spans.plan, turn.spans.code, turn.spans.summary)]
    assert parts == ["I try.\n", "```\n2\n```", "Summary: now 2"]


@pytest.mark.parametrize("context", [full, partial(window, k=2), digest])
def test_every_prompt_and_reply_stands_in_one_row(context: Context) -> None:
    engine = ScriptedEngine(guesses)
    groups = run(engine, context)
    made = []
    for group in groups:
        ones = [[[1.0] * len(turn.completion.tokens) for turn in one.turns] for one in group.trajectories]
        made += rows(group, ones, [[True] * len(one.turns) for one in group.trajectories])
    replies = [(seen, turn) for seen, turn in zip(engine.seen, _in_order_asked(groups), strict=True)]
    assert len(replies) == 2 * 3 * 4
    for seen, turn in replies:
        whole = (*seen, *turn.completion.tokens)
        fitting = [row for row in made if row.tokens[: len(whole)] == whole]
        assert fitting, "the engine saw something that no row holds"
        assert any(all(row.mask[len(seen) : len(whole)]) for row in fitting)
    if context is full:
        # history only grew: a trajectory is one row
        assert len(made) == 2 * 3
    if context is digest:
        assert len(made) > 2 * 3


def _in_order_asked(groups: Sequence[Group]) -> list[Turn]:
    return [one.turns[turn] for turn in range(4) for group in groups for one in group.trajectories]


@pytest.mark.parametrize("context", [full, partial(window, k=2), digest])
@pytest.mark.parametrize("budget", [100, 150, 200, 260, 400])
def test_prompt_and_reply_never_exceed_the_budget(context: Context, budget: int) -> None:
    engine = ScriptedEngine(guesses)
    groups = run(engine, context, sampling=Sampling(max_tokens=80, budget=budget))
    assert all(len(seen) + 80 <= budget for seen in engine.seen)
    stops = {one.stop for group in groups for one in group.trajectories}
    assert stops <= {TrajectoryStop.MAX_TURNS, TrajectoryStop.CONTEXT_FULL}
    for one in (one for group in groups for one in group.trajectories):
        assert (one.stop is TrajectoryStop.CONTEXT_FULL) == (len(one.turns) < 4)
        assert bool(one.note) == (one.stop is TrajectoryStop.CONTEXT_FULL)
    if budget == 100 and context is full:
        assert {len(one.turns) for group in groups for one in group.trajectories} == {1}


def test_an_opening_that_does_not_fit_is_said() -> None:
    groups = run(ScriptedEngine(guesses), full, sampling=Sampling(max_tokens=80, budget=85))
    one = groups[0].trajectories[0]
    assert (one.turns, one.stop) == ((), TrajectoryStop.CONTEXT_FULL)
    assert one.note == "no prompt of at most 5 tokens at turn 0"


def test_a_context_that_ignores_the_budget_is_not_believed() -> None:
    def careless(opening: tuple[Message, ...], turns: Sequence[Turn], fits: Fits) -> Prompt:
        return full(opening, turns, lambda messages: True) or Prompt(messages=opening)

    engine = ScriptedEngine(guesses)
    run(engine, careless, sampling=Sampling(max_tokens=80, budget=200))
    assert max(map(len, engine.seen)) <= 120


def test_keys_are_step_task_member_turn() -> None:
    seen: list[tuple[int, ...]] = []

    def replies(prompt: str, key: tuple[int, ...]) -> str:
        seen.append(key)
        return reply(1)

    run(ScriptedEngine(replies), full, step=7, max_turns=2, group_size=2)
    expected = [(7, task, member, turn) for turn in range(2) for task in range(2) for member in range(2)]
    assert seen == expected


def test_the_number_of_workers_changes_nothing() -> None:
    assert run(ScriptedEngine(guesses), digest, workers=1) == run(ScriptedEngine(guesses), digest, workers=8)


def test_members_do_not_depend_on_who_else_is_alive() -> None:
    """A trajectory that ends early leaves the others' draws as they were."""
    environment = _first_of_each(lambda task: _Once(task, scale=1.0))
    short = run(ScriptedEngine(guesses), full, environment=environment, workers=1)
    long = run(ScriptedEngine(guesses), full)
    assert [len(one.turns) for one in short[0].trajectories] == [1, 4, 4]
    assert short[0].trajectories[0].stop is TrajectoryStop.DONE
    assert short[0].trajectories[1:] == long[0].trajectories[1:]
    assert short[1].trajectories[1:] == long[1].trajectories[1:]


class _Once(GuessEpisode):
    def step(self, text: str) -> Outcome:
        outcome = super().step(text)
        return Outcome(feedback=outcome.feedback, parts=outcome.parts, evaluation=outcome.evaluation, done=True)


def _first_of_each(make: Callable[[Task], GuessEpisode]) -> Callable[[Task], tuple[tuple[Message, ...], GuessEpisode]]:
    """An environment whose first episode of every task comes from `make`; needs one worker to know which is first."""
    begun: set[str] = set()

    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        first = task.id not in begun
        begun.add(task.id)
        return OPENING, make(task) if first else GuessEpisode(task, scale=1.0)

    return environment


class _Flaky(GuessEpisode):
    """Our side fails `failures` times, then works."""

    def __init__(self, task: Task, *, failures: int) -> None:
        super().__init__(task, scale=1.0)
        self.failures = failures

    def step(self, text: str) -> Outcome:
        if self.failures:
            self.failures -= 1
            raise InfrastructureError("the worker\nis gone")
        return super().step(text)


def test_one_failure_of_our_side_is_not_seen() -> None:
    environment = _first_of_each(lambda task: _Flaky(task, failures=1))
    assert run(ScriptedEngine(guesses), full, environment=environment, workers=1) == run(ScriptedEngine(guesses), full)


def test_two_failures_end_the_trajectory_and_are_no_reward() -> None:
    environment = _first_of_each(lambda task: _Flaky(task, failures=2))
    groups = run(ScriptedEngine(guesses), full, environment=environment, workers=1)
    broken = groups[0].trajectories[0]
    assert (broken.stop, broken.note, broken.rewards) == (TrajectoryStop.INFRASTRUCTURE, "the worker is gone", ())
    assert groups[0].trajectories[1:] == run(ScriptedEngine(guesses), full)[0].trajectories[1:]


def test_an_environment_that_does_not_open_is_our_failure() -> None:
    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        if task.id == "guess/3":
            raise InfrastructureError("no disk")
        return OPENING, GuessEpisode(task, scale=1.0)

    groups = run(ScriptedEngine(guesses), full, environment=environment)
    assert {one.stop for one in groups[0].trajectories} == {TrajectoryStop.MAX_TURNS}
    assert {(one.stop, one.note) for one in groups[1].trajectories} == {(TrajectoryStop.INFRASTRUCTURE, "no disk")}


def test_any_other_exception_passes_and_closes_the_episodes() -> None:
    made: list[GuessEpisode] = []

    class Buggy(GuessEpisode):
        def step(self, text: str) -> Outcome:
            raise ZeroDivisionError("a bug")

    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        made.append(Buggy(task, scale=1.0))
        return OPENING, made[-1]

    with pytest.raises(ZeroDivisionError):
        run(ScriptedEngine(guesses), full, environment=environment)
    assert len(made) == 6 and all(episode.closed for episode in made)


def _summarising(opening: tuple[Message, ...], turns: Sequence[Turn], fits: Fits) -> Prompt | None:
    """Asks for a summary after every second attempt."""
    if len(turns) >= 2 and all(turn.purpose == "attempt" for turn in turns[-2:]):
        prompt = full(opening, turns, fits)
        return prompt and Prompt(messages=prompt.messages, purpose="summary")
    return full(opening, turns, fits)


def test_a_summary_is_a_turn_without_outcome_that_costs_no_attempt() -> None:
    one = run(ScriptedEngine([reply(2)]), _summarising)[0].trajectories[0]
    assert [turn.purpose for turn in one.turns] == ["attempt", "attempt", "summary", "attempt", "attempt"]
    assert one.turns[2].outcome is None and one.turns[2].source is None and one.turns[2].text == reply(2)
    assert [turn.continues for turn in one.turns] == [False, True, True, False, True]
    assert one.stop is TrajectoryStop.MAX_TURNS


def test_a_context_that_only_asks_for_summaries_is_ended() -> None:
    def stuck(opening: tuple[Message, ...], turns: Sequence[Turn], fits: Fits) -> Prompt:
        return Prompt(messages=opening, purpose="summary")

    one = run(ScriptedEngine([reply(2)]), stuck)[0].trajectories[0]
    assert one.stop is TrajectoryStop.CONTEXT_FULL and "summaries" in one.note and len(one.turns) == 5


def test_seconds_are_added_up_by_stage() -> None:
    seconds = {"judge": 100.0}
    run(ScriptedEngine(guesses), full, seconds=seconds)
    assert set(seconds) == {"sample", "judge"}
    assert 100.0 < seconds["judge"] < 110.0 and 0.0 < seconds["sample"] < 10.0
