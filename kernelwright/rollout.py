"""Tasks -> groups: how a task becomes turns.

All live trajectories of all tasks move in lock-step: one batch of prompts is sampled, then all replies are judged at
the same time, and so on. Batches are in the order (task, member), and the keys that decide a completion's random draws
are (step, task index, member, turn), so a result depends neither on threads nor on who else is still alive.

Tokens are the truth. Where the new prompt is the old one, the reply and more messages, and the chat template keeps
replies, the turn `continues`: only the new context tokens are encoded, and what was sampled is never tokenised again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kernelwright.chat import Chat
from kernelwright.errors import InfrastructureError, UserError
from kernelwright.prompts import read_reply, token_spans
from kernelwright.types import (
    Completion,
    Context,
    Engine,
    Environment,
    Episode,
    Group,
    Message,
    Outcome,
    Prompt,
    Sampling,
    Spans,
    Task,
    Trajectory,
    TrajectoryStop,
    Turn,
)

Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class _Live:
    """A trajectory that is being made."""

    # (task index, member)
    place: tuple[int, int]
    opening: tuple[Message, ...] = ()
    episode: Episode | None = None
    turns: list[Turn] = field(default_factory=list)
    # messages of the last prompt, and every prompt and reply token since its row began
    messages: tuple[Message, ...] = ()
    row: tuple[int, ...] = ()
    stop: TrajectoryStop | None = None
    note: str = ""

    def end(self, stop: TrajectoryStop, note: str = "") -> None:
        """Stop here; the note becomes one line."""
        self.stop, self.note = stop, " ".join(note.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What is asked of the policy next: a prompt, and its tokens as a whole or as a continuation."""

    live: _Live
    prompt: Prompt
    context: tuple[int, ...]
    continues: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.live.row, *self.context) if self.continues else self.context


def rollout(
    tasks: Sequence[Task],
    engine: Engine,
    *,
    environment: Environment,
    context: Context,
    max_turns: int,
    group_size: int,
    sampling: Sampling,
    step: int = 0,
    workers: int | None = None,
    seconds: MutableMapping[str, float] | None = None,
) -> list[Group]:
    """Sample `group_size` trajectories of at most `max_turns` attempts for each task  [P].

    Args:
        environment: opening messages and a fresh episode of a task; called once a trajectory.
        context: what the policy sees at each turn; None from it ends the trajectory as CONTEXT_FULL.
        step: first of the keys that decide the random draws; equal arguments give equal groups.
        workers: replies judged at the same time, by default one a CPU.
        seconds: receives the wall-clock seconds spent in "sample" and in "judge", added to what is there.

    A prompt and room for a whole reply (`sampling.max_tokens`) always fit into `sampling.budget`. An episode that
    raises InfrastructureError is asked once more; then its trajectory stops as INFRASTRUCTURE, without that turn.
    """
    chat = Chat(engine.tokenizer)
    clock: MutableMapping[str, float] = {} if seconds is None else seconds
    every = [_Live(place=(index, member)) for index in range(len(tasks)) for member in range(group_size)]
    pool = ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1)
    try:
        with _measured(clock, "judge"):
            list(pool.map(lambda live: _open(live, tasks[live.place[0]], environment), every))
        while any(live.stop is None for live in every):
            possible = [_request(live, chat, context, max_turns, sampling) for live in every if live.stop is None]
            requests = [request for request in possible if request is not None]
            with _measured(clock, "sample"):
                keys = [(step, *request.live.place, len(request.live.turns)) for request in requests]
                completions = engine.sample([request.tokens for request in requests], sampling, keys) if keys else []
            texts = [chat.decode(completion.tokens) for completion in completions]
            with _measured(clock, "judge"):
                outcomes = list(pool.map(_judge, requests, texts))
            for request, completion, text, outcome in zip(requests, completions, texts, outcomes, strict=True):
                _append(request, completion, text, outcome, chat)
    finally:
        pool.shutdown(cancel_futures=True)
        for live in every:
            if live.episode is not None:
                live.episode.close()
    members = [Trajectory(turns=tuple(live.turns), stop=_stop(live), note=live.note) for live in every]
    return [
        Group(task=task.id, trajectories=tuple(members[index * group_size : (index + 1) * group_size]))
        for index, task in enumerate(tasks)
    ]


def refuse_nothing(groups: Sequence[Group]) -> None:
    """Say why a rollout holds no turn at all: there is nothing in it to train on, and a score of 0 would be a lie.

    Raises:
        UserError: no opening fits into the budget.
        InfrastructureError: no reply could be judged.
    """
    members = [one for group in groups for one in group.trajectories]
    if not members or any(one.turns for one in members):
        return
    if members[0].stop is TrajectoryStop.CONTEXT_FULL:
        raise UserError(
            f"the opening of task '{groups[0].task}' does not fit: {members[0].note}; raise sampling.budget"
        )
    raise InfrastructureError(f"no reply could be judged: {members[0].note}")


def _open(live: _Live, task: Task, environment: Environment) -> None:
    try:
        live.opening, live.episode = _twice(lambda: environment(task))
    except InfrastructureError as error:
        live.end(TrajectoryStop.INFRASTRUCTURE, str(error))


def _request(live: _Live, chat: Chat, context: Context, max_turns: int, sampling: Sampling) -> _Request | None:
    """The next request of a trajectory; None when this is its end, which is then noted on it."""
    attempts = sum(turn.purpose == "attempt" for turn in live.turns)
    # a context that keeps asking for summaries instead of attempts makes no progress
    if len(live.turns) - attempts > max_turns:
        return live.end(TrajectoryStop.CONTEXT_FULL, "the context asked for more summaries than there are attempts")
    if attempts == max_turns:
        return live.end(TrajectoryStop.MAX_TURNS)
    room = sampling.budget - sampling.max_tokens
    known: dict[tuple[Message, ...], tuple[tuple[int, ...], bool]] = {}

    def tokens(messages: Sequence[Message]) -> tuple[tuple[int, ...], bool]:
        key = tuple(messages)
        if key not in known:
            known[key] = _tokens(live, key, chat)
        return known[key]

    def fits(messages: Sequence[Message]) -> bool:
        new, continues = tokens(messages)
        return len(new) + (len(live.row) if continues else 0) <= room

    prompt = context(live.opening, live.turns, fits)
    if prompt is None or not fits(prompt.messages):
        return live.end(TrajectoryStop.CONTEXT_FULL, f"no prompt of at most {room} tokens at turn {len(live.turns)}")
    new, continues = tokens(prompt.messages)
    return _Request(live=live, prompt=prompt, context=new, continues=continues)


def _tokens(live: _Live, messages: tuple[Message, ...], chat: Chat) -> tuple[tuple[int, ...], bool]:
    """Tokens of a prompt and True where they only continue the row, False where they are all of it."""
    if live.turns:
        last = live.turns[-1]
        added = chat.extend(live.messages, last.completion, last.text, messages)
        if added:
            return tuple(added), True
    return tuple(chat.encode(messages)), False


def _judge(request: _Request, text: str) -> Outcome | None:
    """The outcome of an attempt; None for anything else, and where our side failed, which ends the trajectory."""
    episode = request.live.episode
    if request.prompt.purpose != "attempt" or episode is None:
        return None
    try:
        return _twice(lambda: episode.step(text))
    except InfrastructureError as error:
        return request.live.end(TrajectoryStop.INFRASTRUCTURE, str(error))


def _append(request: _Request, completion: Completion, text: str, outcome: Outcome | None, chat: Chat) -> None:
    """Add the finished turn to its trajectory, unless it could not be judged."""
    live = request.live
    if live.stop is not None:
        return
    reply = read_reply(text) if request.prompt.purpose == "attempt" else None
    turn = Turn(
        purpose=request.prompt.purpose,
        context=request.context,
        continues=request.continues,
        completion=completion,
        text=text,
        source=reply.source if reply else None,
        spans=token_spans(reply, chat.starts(completion.tokens)) if reply else Spans(),
        summary=reply.summary if reply else "",
        outcome=outcome,
    )
    live.turns.append(turn)
    live.row = (*request.tokens, *completion.tokens)
    live.messages = request.prompt.messages
    if outcome is not None and outcome.done:
        live.end(TrajectoryStop.DONE)


def _stop(live: _Live) -> TrajectoryStop:
    if live.stop is None:
        raise AssertionError("the loop ended before this trajectory did")
    return live.stop


def _twice(call: Callable[[], Result]) -> Result:
    """The result of `call`, which may fail once on our side."""
    try:
        return call()
    except InfrastructureError:
        return call()


@contextmanager
def _measured(clock: MutableMapping[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    clock[stage] = clock.get(stage, 0.0) + time.perf_counter() - start
