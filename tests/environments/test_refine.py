"""The refinement environment on an evaluator that only looks at the text."""

from __future__ import annotations

from functools import partial

import pytest

from kernelwright.environments.refine import refine, refining
from kernelwright.errors import InfrastructureError, MissingTool, UnknownName, UserError
from kernelwright.feedback import feedback
from kernelwright.kernels import BACKENDS, Backend
from kernelwright.reward import kevin
from kernelwright.tasks import load
from kernelwright.types import Evaluation, Status, Task

TASK: Task = load("builtin")[0]


class Looks:
    """Says CORRECT, at twice the reference's speed, of any source with the word "good"."""

    backend: Backend = BACKENDS["c"]

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def evaluate(self, task: Task, source: str | None) -> Evaluation:
        self.asked.append(source)
        if source is None:
            return Evaluation(task=task.id, backend="c", status=Status.NO_CODE)
        if "good" in source:
            return Evaluation(task=task.id, backend="c", status=Status.CORRECT, kernel_ms=(1.0,), reference_ms=(2.0,))
        return Evaluation(task=task.id, backend="c", status=Status.WRONG, message="all elements differ")


class Fails(Looks):
    def evaluate(self, task: Task, source: str | None) -> Evaluation:
        raise InfrastructureError("no process")


def test_a_reply_is_evaluated_rewarded_and_answered() -> None:
    looks = Looks()
    _, episode = refine(TASK, evaluator=looks, reward=partial(kevin, correct=0.3))
    wrong = episode.step("A plan.\n```c\nbad\n```\n")
    good = episode.step("Not this:\n```c\nbad\n```\n```c\ngood\n```\nSummary: better")
    none = episode.step("I do not know.")
    assert looks.asked == ["bad\n", "good\n", None]
    assert (wrong.reward, wrong.feedback) == (0.0, "Wrong result: all elements differ.")
    assert good.parts == {"correct": 0.3, "speed": 2.0}
    assert good.evaluation is not None and good.feedback == feedback(good.evaluation, style="full")
    assert none.reward == 0.0 and none.feedback.startswith("No code")
    assert not (wrong.done or good.done or none.done)


def test_an_episode_is_done_at_its_target() -> None:
    for target, done in ((1.5, True), (2.0, True), (2.1, False), (None, False)):
        _, episode = refine(TASK, evaluator=Looks(), reward=kevin, target=target)
        assert not episode.step("```c\nbad\n```\n").done
        assert episode.step("```c\ngood\n```\n").done is done
    with pytest.raises(UserError, match="target=0"):
        refine(TASK, evaluator=Looks(), reward=kevin, target=0)


def test_feedback_style() -> None:
    reply = "```c\ngood\n```\n"
    line, record = (
        refine(TASK, evaluator=Looks(), reward=kevin, feedback_style=style)[1].step(reply).feedback
        for style in ("line", "record")
    )
    assert line.startswith("Correct: 2") and "\n" not in line
    assert '"speedup": 2.0' in record


def test_the_opening_holds_the_task_and_an_example_once() -> None:
    opening, _ = refine(TASK, evaluator=Looks(), reward=kevin)
    with_example, _ = refine(TASK, evaluator=Looks(), reward=kevin, example="For example, this.")
    assert TASK.reference.strip() in opening[0].content
    assert BACKENDS["c"].instructions(TASK).strip() in opening[0].content
    assert with_example[0].content == f"{opening[0].content}\nFor example, this.\n"


def test_our_failure_is_no_outcome() -> None:
    _, episode = refine(TASK, evaluator=Fails(), reward=kevin)
    with pytest.raises(InfrastructureError, match="no process"):
        episode.step("```c\ngood\n```\n")


def test_refining_shares_one_evaluator() -> None:
    reply = "```c\nthis is no C\n```\n"
    try:
        with refining(reward=kevin, timing=False) as environment:
            _, first = environment(TASK)
            _, second = environment(TASK)
            outcomes = [first.step(reply), second.step(reply)]
            assert environment.counters() == {"hits": 1, "misses": 1}
    except MissingTool as error:
        pytest.skip(str(error))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].evaluation is not None and outcomes[0].evaluation.status is Status.COMPILE_ERROR


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UnknownName, match="'fortran'"), refining(backend="fortran", reward=kevin):
        pass
