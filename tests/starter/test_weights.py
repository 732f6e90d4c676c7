"""The starter policy that ships: its size, its form, and that it has something to learn."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from kernelwright.chat import Chat
from kernelwright.context import digest
from kernelwright.engines.local import LocalEngine
from kernelwright.environments.refine import refining
from kernelwright.reward import correctness
from kernelwright.rollout import rollout
from kernelwright.starter import path
from kernelwright.tasks import load
from kernelwright.types import Message, Sampling, Status


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine.from_pretrained(path(), device="cpu")


def test_it_is_at_most_eight_megabytes():
    assert sum(file.stat().st_size for file in Path(path()).iterdir()) <= 8e6


def test_its_chat_template_only_ever_grows(engine):
    chat = Chat(engine.tokenizer)
    opening = (Message(role="user", content="task"),)
    longer = (*opening, Message(role="assistant", content="reply"), Message(role="user", content="feedback"))
    first, second = chat.encode(opening), chat.encode(longer)
    assert second[: len(first)] == first


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_it_writes_right_and_wrong_kernels(engine):
    with refining(backend="c", reward=correctness, timing=False) as environment:
        groups = rollout(
            load("builtin:train")[::5],
            engine,
            environment=environment,
            context=digest,
            max_turns=1,
            group_size=3,
            sampling=Sampling(max_tokens=128, budget=1024, seed=3),
        )
    outcomes = [one.turns[0].outcome for group in groups for one in group.trajectories]
    kinds = Counter(outcome.evaluation.status for outcome in outcomes if outcome and outcome.evaluation)
    # 20 to 50 % by `scripts/build_starter`'s survey of all tasks; four standard errors of this smaller one on top
    assert 0.1 < kinds[Status.CORRECT] / len(outcomes) < 0.62
    assert kinds[Status.WRONG] and kinds[Status.COMPILE_ERROR]
