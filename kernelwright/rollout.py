"""Tasks -> groups: how a task becomes turns.

All live trajectories of all tasks move in lock-step: one batch of prompts is sampled, then all replies are judged at the
same time, and so on. Batches are in the order (task, member), and `keys` of a completion are (step, task index, member,
turn), so the result depends neither on threads nor on which other trajectories are still alive.

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
from kernelwright.errors import InfrastructureError
from kernelwright.prompts import Reply, read_reply, token_spans
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

Read = Callable[[str], Reply]
Result = TypeVar("Result")


@dataclass(kw_only=True, slots=True)
class _Live:
    """A trajectory that is being made."""

    # (task index, member)
    place: tuple[int, int]
    opening: tuple[Message, ...] = ()
    episode: Episode | None = None
    turns: list[Turn] = field(default_factory=list)
    # messages of the last prompt, and the tokens of its row: every prompt and reply token since the row began
    messages: tuple[Message, ...] = ()
    row_tokens: int = 0
    stop: TrajectoryStop | None = None
    note: str = ""

    @property
    def attempts(self) -> int:
        return sum(turn.purpose == "attempt" for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What is asked of the policy next: a prompt, and its tokens as a whole or as a continuation."""

    prompt: Prompt
    context: tuple[int, ...]
    continues: bool


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
    read: Read = read_reply,
    seconds: MutableMapping[str, float] | None = None,
) -> list[Group]:
    """Sample `group_size` trajectories of at most `max_turns` attempts for each task  [P].

    Args:
        environment: opening messages and a fresh episode of a task; called once a trajectory.
        context: what the policy sees at each turn; None from it ends the trajectory as CONTEXT_FULL.
        step: first of the keys that decide the random draws; equal arguments give equal groups.
        workers: replies judged at the same time, by default one a CPU.
        read: takes a reply apart into source, summary and parts.
        seconds: receives the wall-clock seconds spent in "sample" and in "judge", added to what is there.

    A prompt and room for a whole reply (`sampling.max_tokens`) always fit into `sampling.budget`. An episode that raises
    InfrastructureError is asked once more; after that its trajectory stops as INFRASTRUCTURE, without the turn.
    """
    chat = Chat(engine.tokenizer)
    clock: MutableMapping[str, float] = {} if seconds is None else seconds
    every = [_Live(place=(index, member)) for index in range(len(tasks)) for member in range(group_size)]
    # the row of a continued turn is what its prompt was, so the tokens of each row are kept outside the records
    rows: dict[tuple[int, int], list[int]] = {live.place: [] for live in every}
    pool = ThreadPoolExecutor(max_workers=workers or os.cpu_count() or 1)
    try:
        with _measured(clock, "judge"):
            list(pool.map(lambda live: _open(live, tasks[live.place[0]], environment), every))
        while live := [one for one in every if one.stop is None]:
            requests = [
                _request(one, chat=chat, context=context, max_turns=max_turns, sampling=sampling) for one in live
            ]
            asked = [(one, request) for one, request in zip(live, requests, strict=True) if request is not None]
            if not asked:
                continue
            for one, request in asked:
                rows[one.place] = (rows[one.place] if request.continues else []) + list(request.context)
            with _measured(clock, "sample"):
                contexts = [rows[one.place] for one, _ in asked]
                completions = engine.sample(
                    contexts, sampling, [(step, *one.place, len(one.turns)) for one, _ in asked]
                )
            texts = [chat.decode(completion.tokens) for completion in completions]
            with _measured(clock, "judge"):
                judged = list(pool.map(_judge, [one for one, _ in asked], [request for _, request in asked], texts))
            for (one, request), completion, text, outcome in zip(asked, completions, texts, judged, strict=True):
                rows[one.place] += completion.tokens
                _append(one, request, completion, text, outcome, chat=chat, read=read)
    finally:
        pool.shutdown(cancel_futures=True)
        for one in every:
            if one.episode is not None:
                one.episode.close()
    return [
        Group(task=task.id, trajectories=tuple(_finished(one) for one in every if one.place[0] == index))
        for index, task in enumerate(tasks)
    ]


def _open(live: _Live, task: Task, environment: Environment) -> None:
    try:
        live.opening, live.episode = _twice(lambda: environment(task))
    except InfrastructureError as error:
        _end(live, TrajectoryStop.INFRASTRUCTURE, str(error))


def _request(live: _Live, *, chat: Chat, context: Context, max_turns: int, sampling: Sampling) -> _Request | None:
    """The next request of a trajectory, or None when it has ended."""
    if live.attempts >= max_turns:
        return _end(live, TrajectoryStop.MAX_TURNS)
    # a context that keeps asking for summaries instead of attempts makes no progress
    if len(live.turns) - live.attempts > max_turns:
        return _end(live, TrajectoryStop.CONTEXT_FULL, "the context asked for more notes than attempts")
    room = sampling.budget - sampling.max_tokens
    sizes: dict[tuple[Message, ...], tuple[tuple[int, ...], bool]] = {}

    def tokens(messages: Sequence[Message]) -> tuple[tuple[int, ...], bool]:
        key = tuple(messages)
        if key not in sizes:
            sizes[key] = _tokens(live, key, chat)
        return sizes[key]

    def fits(messages: Sequence[Message]) -> bool:
        new, continues = tokens(messages)
        return len(new) + (live.row_tokens if continues else 0) <= room

    prompt = context(live.opening, live.turns, fits)
    if prompt is None or not fits(prompt.messages):
        return _end(live, TrajectoryStop.CONTEXT_FULL, f"no prompt of {room} tokens or less at turn {len(live.turns)}")
    new, continues = tokens(prompt.messages)
    return _Request(prompt=prompt, context=new, continues=continues)


def _tokens(live: _Live, messages: tuple[Message, ...], chat: Chat) -> tuple[tuple[int, ...], bool]:
    if live.turns:
        last = live.turns[-1]
        added = chat.extend(live.messages, last.completion, last.text, messages)
        if added:
            return tuple(added), True
    return tuple(chat.encode(messages)), False


def _judge(live: _Live, request: _Request, text: str) -> Outcome | None:
    """The outcome of an attempt, None for anything else or when our side failed."""
    episode = live.episode
    if request.prompt.purpose != "attempt" or episode is None:
        return None
    try:
        return _twice(lambda: episode.step(text))
    except InfrastructureError as error:
        return _end(live, TrajectoryStop.INFRASTRUCTURE, str(error))


def _append(
    live: _Live,
    request: _Request,
    completion: Completion,
    text: str,
    outcome: Outcome | None,
    *,
    chat: Chat,
    read: Read,
) -> None:
    """Add the finished turn to its trajectory, unless it could not be judged."""
    if live.stop is not None:
        return
    attempt = request.prompt.purpose == "attempt"
    reply = read(text) if attempt else None
    live.turns.append(
        Turn(
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
    )
    live.row_tokens = (live.row_tokens if request.continues else 0) + len(request.context) + len(completion.tokens)
    live.messages = request.prompt.messages
    if outcome is not None and outcome.done:
        _end(live, TrajectoryStop.DONE)


def _end(live: _Live, stop: TrajectoryStop, note: str = "") -> None:
    live.stop, live.note = stop, " ".join(note.split())


def _finished(live: _Live) -> Trajectory:
    if live.stop is None:
        raise AssertionError("a trajectory left the loop alive")
    return Trajectory(turns=tuple(live.turns), stop=live.stop, note=live.note)


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
