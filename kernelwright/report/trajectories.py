"""Which trajectories of a run go into the report, and how one looks there.

A trajectory: {step, task, member, stop, note, turns [K]}. A turn: {purpose, prompt, context (its tokens), continues,
pieces [T] (text of each token), logprobs [T], advantages (T numbers, or one for all), spans {name: [from, to]}, length,
cut, reward, parts, feedback, evaluation}. Where the run has no tokenizer, `pieces` is the whole reply, `logprobs` is
null and `spans` is empty, so that the reply has one colour.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kernelwright import store
from kernelwright.types import Evaluation, Trajectory, Turn

_STEPS, _TASKS, _MEMBERS = 8, 3, 8
# of JSON; with short replies all chosen trajectories fit, with 16,000-token replies only some do
_BYTES = 4_000_000
_PROMPT_CHARACTERS = 30_000


def chosen_trajectories(folder: Path, steps: Sequence[int]) -> tuple[str, list[dict[str, Any]]]:
    """A sentence about the choice, and the trajectories, ordered by step, task and member.

    Chosen are evenly spread steps and, of each, the groups whose rewards differ most: those that taught most.
    """
    show = _Shown(folder)
    lines = _chosen_groups(folder, _spread(steps, _STEPS))
    total = 0
    found: list[dict[str, Any]] = []
    for line in lines:
        for member in range(min(len(line.group.trajectories), _MEMBERS)):
            shown = show.trajectory(line, member)
            total += len(msgspec.json.encode(shown))
            if found and total > _BYTES:
                return _sentence(folder, found), _ordered(found)
            found.append(shown)
    return _sentence(folder, found), _ordered(found)


def _chosen_groups(folder: Path, steps: Sequence[int]) -> Iterator[store.GroupLine]:
    """The best group of every chosen step, then the second best of every step, and so on."""
    best: dict[int, list[tuple[float, int, store.GroupLine]]] = {step: [] for step in steps}
    for number, line in enumerate(store.groups(folder)):
        if line.step in best:
            # `number` decides between equal spreads, and keeps the lines themselves from being compared
            heapq.heappush(best[line.step], (_reward_spread(line), -number, line))
            if len(best[line.step]) > _TASKS:
                heapq.heappop(best[line.step])
    ranked = [sorted(groups, reverse=True) for groups in best.values()]
    for rank in range(_TASKS):
        yield from (groups[rank][2] for groups in ranked if rank < len(groups))


def _reward_spread(line: store.GroupLine) -> float:
    rewards = [reward for one in line.group.trajectories for reward in one.rewards if reward is not None]
    if len(rewards) < 2:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spaced, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _ordered(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda one: (one["step"], one["task"], one["member"]))


def _sentence(folder: Path, found: Sequence[dict[str, Any]]) -> str:
    steps = {one["step"] for one in found}
    return (
        f"{len(found)} trajectories from {len(steps)} steps: of each step the tasks whose rewards differ most. "
        f"All of them are in {folder.name}/{store.GROUPS}."
    )


class _Shown:
    """Makes trajectories as the page wants them, with the tokenizer that the run's checkpoints hold."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("checkpoints/**/tokenizer.json"))
        self._tokenizer = Tokenizer.from_file(str(files[-1])) if files else None

    def trajectory(self, line: store.GroupLine, member: int) -> dict[str, Any]:
        """Trajectory number `member` of a group."""
        one: Trajectory = line.group.trajectories[member]
        return {
            "step": line.step,
            "task": line.group.task,
            "member": member,
            "stop": one.stop,
            "note": one.note,
            "turns": [
                self._turn(turn, advantages)
                for turn, advantages in zip(one.turns, line.advantages[member], strict=True)
            ],
        }

    def _turn(self, turn: Turn, advantages: float | list[float]) -> dict[str, Any]:
        completion, outcome = turn.completion, turn.outcome
        return {
            "purpose": turn.purpose,
            "prompt": self._prompt(turn.context),
            "context": len(turn.context),
            "continues": turn.continues,
            "length": len(completion.tokens),
            "cut": completion.stop == "length",
            "reward": round(outcome.reward, 4) if outcome else None,
            "parts": dict(outcome.parts) if outcome else None,
            "feedback": outcome.feedback if outcome else None,
            "evaluation": _evaluation(outcome.evaluation) if outcome and outcome.evaluation else None,
            **self._reply(turn, advantages),
        }

    def _reply(self, turn: Turn, advantages: float | list[float]) -> dict[str, Any]:
        if self._tokenizer is None:
            flat = advantages if isinstance(advantages, list) else [advantages]
            mean = sum(flat) / len(flat)
            return {"pieces": [turn.text], "logprobs": None, "advantages": _rounded(mean), "spans": {}}
        return {
            "pieces": pieces(self._tokenizer, turn.completion.tokens),
            "logprobs": [round(value, 2) for value in turn.completion.logprobs],
            "advantages": [_rounded(value) for value in advantages]
            if isinstance(advantages, list)
            else _rounded(advantages),
            "spans": {name: span for name, span in asdict(turn.spans).items() if span[1] > span[0]},
        }

    def _prompt(self, context: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return f"({len(context)} tokens; the run directory holds no tokenizer to read them with)"
        text = self._tokenizer.decode(list(context), skip_special_tokens=False)
        half = _PROMPT_CHARACTERS // 2
        return text if len(text) <= 2 * half else f"{text[:half]}\n[... shortened ...]\n{text[-half:]}"


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token  [T]; together they are the reply.

    Special tokens are empty, and of a character that is spread over several tokens the last one has it all.
    """
    stream: Any = DecodeStream(skip_special_tokens=True)
    step: Callable[[Tokenizer, int], str | None] = stream.step
    return [step(tokenizer, token) or "" for token in tokens]


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "status": evaluation.status,
        "message": evaluation.message,
        "location": asdict(evaluation.location) if evaluation.location else None,
        "error_index": evaluation.error_index,
        "got": evaluation.got,
        "expected": evaluation.expected,
        "speedup": _rounded(evaluation.speedup) if evaluation.speedup is not None else None,
        "kernel_ms": _rounded(median(evaluation.kernel_ms)) if evaluation.kernel_ms else None,
        "reference_ms": _rounded(median(evaluation.reference_ms)) if evaluation.reference_ms else None,
        "profile": dict(evaluation.profile),
        "hacks": [asdict(hack) for hack in evaluation.hacks],
        "verified": evaluation.verified,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
