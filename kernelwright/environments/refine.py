"""Serial refinement: every reply carries a complete candidate, which is evaluated, rewarded and answered with feedback.

`refine` is the environment of one task; `refining` holds what all tasks share (the evaluator with its workers and
cache) and is what a recipe names:

    with refining(backend="c", reward=kevin) as environment:
        opening, episode = environment(task)
        outcome = episode.step(reply)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

from kernelwright import prompts
from kernelwright.errors import UserError
from kernelwright.feedback import feedback
from kernelwright.kernels import Backend, Evaluator
from kernelwright.types import Evaluation, Message, Outcome, Task

Reward = Callable[[Evaluation], Mapping[str, float]]
Style = Literal["line", "full", "record"]


class Evaluates(Protocol):
    """The part of `kernelwright.kernels.Evaluator` that an episode needs."""

    @property
    def backend(self) -> Backend:
        """The language that candidates are written in; tells what the opening asks for."""
        ...

    def evaluate(self, task: Task, source: str | None) -> Evaluation:
        """What happened to one candidate; None is a reply without code."""
        ...


class Refinement:
    """The episode of `refine`: single-use, each step independent of the ones before."""

    def __init__(
        self,
        task: Task,
        *,
        evaluator: Evaluates,
        reward: Reward,
        feedback_style: Style = "full",
        target: float | None = None,
    ) -> None:
        if target is not None and not target > 0:
            raise UserError(
                f"target={target}: expected a speedup above 0 at which an episode is done, or None for never"
            )
        self._target = math.inf if target is None else target
        self._task = task
        self._evaluator = evaluator
        self._reward = reward
        self._style: Style = feedback_style

    def step(self, text: str) -> Outcome:
        """Evaluate the code block of a reply. Done at the target; else the rollout says how many turns there are.

        Raises:
            InfrastructureError: the evaluation failed for a reason that is not the candidate's.
        """
        evaluation = self._evaluator.evaluate(self._task, prompts.read_reply(text).source)
        return Outcome(
            feedback=feedback(evaluation, style=self._style),
            parts=dict(self._reward(evaluation)),
            evaluation=evaluation,
            done=(evaluation.speedup or 0.0) >= self._target,
        )

    def close(self) -> None:
        """Nothing to free: the evaluator belongs to the caller."""


def refine(
    task: Task,
    *,
    evaluator: Evaluates,
    reward: Reward,
    feedback_style: Style = "full",
    target: float | None = None,
    example: str = "",
) -> tuple[tuple[Message, ...], Refinement]:
    """Opening messages and episode of one trajectory.

    Args:
        evaluator: judges candidates; its backend decides what the opening asks for.
        reward: named parts of the reward of one evaluation, such as `kernelwright.reward.kevin`.
        feedback_style: see `kernelwright.feedback.feedback`.
        target: speedup at which the episode is done, such as the one above which no more is paid; None for never.
        example: a worked example for the opening.

    Raises:
        UserError: a `target` that is not positive.
    """
    backend = evaluator.backend
    opening = prompts.opening(
        task, language=backend.language, fence=backend.fence, instructions=backend.instructions(task), example=example
    )
    return opening, Refinement(task, evaluator=evaluator, reward=reward, feedback_style=feedback_style, target=target)


class Refining:
    """`refine` with everything but the task bound; what `refining` gives."""

    def __init__(
        self, evaluator: Evaluator, *, reward: Reward, feedback_style: Style, target: float | None, example: str
    ) -> None:
        self._evaluator = evaluator
        self._reward = reward
        self._style: Style = feedback_style
        self._target = target
        self._example = example

    def __call__(self, task: Task) -> tuple[tuple[Message, ...], Refinement]:
        """Opening messages and episode of one trajectory of `task`."""
        return refine(
            task,
            evaluator=self._evaluator,
            reward=self._reward,
            feedback_style=self._style,
            target=self._target,
            example=self._example,
        )

    def counters(self) -> dict[str, int]:
        """Evaluations since the start that came from the cache (`hits`) and that did not (`misses`)."""
        return {"hits": self._evaluator.hits, "misses": self._evaluator.misses}


@contextmanager
def refining(
    *,
    backend: str = "c",
    reward: Reward,
    feedback_style: Style = "full",
    target: float | None = None,
    example: str = "",
    timing: bool = True,
    workers: int | None = None,
    seed: int = 0,
) -> Iterator[Refining]:
    """The environment of a recipe: an evaluator for as long as the `with` block lasts, and `refine` on it.

    Args:
        backend: name in `kernelwright.kernels.BACKENDS`.
        reward: see `refine`; so are `feedback_style`, `target` and `example`.
        timing: whether correct candidates are timed. Without, equal runs are equal to the last bit.
        workers: evaluations at the same time, by default one a CPU.
        seed: of the inputs that candidates are checked on.

    Raises:
        UnknownName: the backend does not exist.
        MissingTool: the backend does not work on this machine.
    """
    with Evaluator(backend=backend, workers=workers, timing=timing, seed=seed) as evaluator:
        yield Refining(evaluator, reward=reward, feedback_style=feedback_style, target=target, example=example)
