"""What a starter policy does before any RL: the shares that say whether it has something to learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from kernelwright.context import digest
from kernelwright.engines.local import LocalEngine
from kernelwright.environments.refine import refining
from kernelwright.measure import evaluation_numbers
from kernelwright.reward import kevin
from kernelwright.rollout import rollout
from kernelwright.tasks import load
from kernelwright.types import Sampling, Status


def survey(
    model: str, *, tasks: str = "builtin:train", turns: int = 3, samples: int = 2, log: Callable[[str], None] = print
) -> None:
    """Print, for the policy in the folder `model`: kinds of first attempts, correct and speed by turn."""
    engine = LocalEngine.from_pretrained(model)
    with refining(backend="c", reward=partial(kevin, cap=2.0)) as environment:
        groups = rollout(
            load(tasks),
            engine,
            environment=environment,
            context=digest,
            max_turns=turns,
            group_size=samples,
            sampling=Sampling(max_tokens=96, budget=1024, seed=7),
        )
    first = [one.turns[0].outcome for group in groups for one in group.trajectories if one.turns]
    kinds = Counter(outcome.evaluation.status for outcome in first if outcome and outcome.evaluation)
    log("first attempts: " + ", ".join(f"{status.value} {kinds[status] / len(first):.1%}" for status in Status))
    numbers = evaluation_numbers(groups, turns=turns)
    for turn, line in enumerate(numbers["turns"], start=1):
        speed = line["speedup_geomean"]
        log(f"turn {turn}: correct {line['correct']:.1%}, geometric mean speedup of correct ones {speed or 0:.2f}")
    log(f"best of {turns} turns: correct {numbers['avg']['correct']:.1%}, score {numbers['avg']['score']:.2f}")
