"""A task family without compilers or clocks, for tests of what does not care what the tasks are about.

A reply's code block is a number; the task wants its own number. Being near earns a part, hitting it is CORRECT.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from kernelwright import credit, select, store
from kernelwright.context import full
from kernelwright.engines.scripted import ScriptedEngine
from kernelwright.errors import InfrastructureError
from kernelwright.loss import clipped
from kernelwright.prompts import read_reply
from kernelwright.samples import weighted
from kernelwright.types import Environment, Evaluation, Message, Optimiser, Outcome, Recipe, Sampling, Status, Task


def guess_task(number: int) -> Task:
    return Task(id=f"guess/{number}", statement=f"guess {number}", reference=str(number))


class GuessEpisode:
    """Right: 1; wrong: less the further off. With `broken`, every step fails on our side."""

    def __init__(self, task: Task, *, scale: float, broken: bool = False) -> None:
        self.task, self.scale, self.broken = task, scale, broken
        self.closed = False

    def step(self, text: str) -> Outcome:
        if self.broken:
            raise InfrastructureError("the worker\nis gone")
        source = read_reply(text).source
        if source is None:
            return Outcome(feedback="No code.", parts={"near": 0.0}, evaluation=self._evaluation(Status.NO_CODE))
        off = abs(float(source) - float(self.task.reference))
        status = Status.CORRECT if off == 0 else Status.WRONG
        return Outcome(
            feedback=f"Off by {off:g}.\nGo on.",
            parts={"near": self.scale / (1 + off)},
            evaluation=self._evaluation(status),
        )

    def _evaluation(self, status: Status) -> Evaluation:
        return Evaluation(task=self.task.id, backend="none", status=status)

    def close(self) -> None:
        self.closed = True


@contextmanager
def guessing(*, scale: float = 1.0) -> Iterator[Environment]:
    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        return (Message(role="user", content="Guess."),), GuessEpisode(task, scale=scale)

    yield environment


def reply(number: float) -> str:
    return f"I try.\n```\n{number}\n```\nSummary: now {number}"


def guess_recipe(**changes: object) -> Recipe:
    values = {
        "name": "guess",
        "paper": "none",
        "model": "scripted",
        "tasks": "none",
        "environment": partial(guessing, scale=1.0),
        "context": partial(full),
        "max_turns": 2,
        "group_size": 2,
        "tasks_per_step": 2,
        "sampling": Sampling(max_tokens=80, budget=1000),
        "select": partial(select.scored),
        "credit": partial(credit.credit, returns="reward_to_go", gamma=0.4, compare="task", scale="std"),
        "aggregate": partial(weighted),
        "evaluate_tasks": 0,
        "loss": partial(clipped, low=0.2, high=0.28),
        "optimiser": Optimiser(lr=1e-3, minibatches=2),
        "steps": 4,
        "evaluate_every": 2,
        "evaluate_samples": 2,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


def learner() -> ScriptedEngine:
    """A policy that is best after four updates and gets worse again, with some luck in each draw."""

    def replies(prompt: str, key: tuple[int, ...]) -> str:
        # guesses are within `spread` of 2, which is the middle of the tasks that tests use
        spread = 1 + abs(engine.policy - 4)
        return reply(2 + (sum(part * (3 * place + 5) for place, part in enumerate(key)) + len(prompt)) % spread)

    engine = ScriptedEngine(replies)
    return engine


def run_files(path: Path) -> dict[str, str]:
    """Everything of a run that equal runs share: all but clocks."""
    names = ["config.json", store.METRICS, store.GROUPS, store.EVALUATIONS]
    files = {name: (path / name).read_text() if (path / name).exists() else "" for name in names}
    for file in sorted((path / "checkpoints").rglob("*.json")):
        files[str(file.relative_to(path))] = file.read_text()
    return files


class LetterEpisode:
    """The reward is the share of vowels in the reply, which even a random model can learn to raise."""

    def step(self, text: str) -> Outcome:
        share = sum(character in "aeiou" for character in text) / max(len(text), 1)
        return Outcome(feedback=f"{share:.2f}", parts={"vowels": share})

    def close(self) -> None:
        pass


@contextmanager
def vowels() -> Iterator[Environment]:
    def environment(task: Task) -> tuple[tuple[Message, ...], LetterEpisode]:
        return (Message(role="user", content=task.statement),), LetterEpisode()

    yield environment
