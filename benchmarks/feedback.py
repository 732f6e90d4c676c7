"""Is feedback worth anything? The best of T turns against the best of T fresh attempts, on tasks nobody trained on.

    python benchmarks/feedback.py --multi MODEL... [--single MODEL...] [--tasks SPEC] [--turns 3] [--samples 4]

Both sides generate the same number of kernels. With one model, its own turns are compared with its own fresh attempts
(before RL); with two, the turns of the policy trained with several turns with the fresh attempts of the one trained
with one. Several models of a side (seeds) are averaged task by task. Intervals: 95 %, bootstrap over tasks, paired.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from kernelwright.engines.local import LocalEngine
from kernelwright.recipes import recipe
from kernelwright.rollout import rollout
from kernelwright.starter import path
from kernelwright.tasks import load
from kernelwright.types import Group, Outcome, Task


def measured(model: str, tasks: Sequence[Task], *, turns: int, members: int, seed: int) -> list[Group]:
    """Groups of `members` trajectories with `turns` turns, one group a task, sampled and judged as in `quickstart`."""
    chosen = recipe("quickstart")
    engine = LocalEngine.from_pretrained(path() if model == "starter" else model)
    with chosen.environment() as environment:
        return rollout(
            tasks,
            engine,
            environment=environment,
            context=chosen.context,
            max_turns=turns,
            group_size=members,
            sampling=replace(chosen.sampling, seed=seed),
        )


def outcomes(group: Group) -> list[list[Outcome]]:
    """The outcomes of each trajectory."""
    return [[turn.outcome for turn in one.turns if turn.outcome] for one in group.trajectories]


def best(candidates: Sequence[Outcome]) -> tuple[float, float]:
    """(any correct, highest reward) of some attempts."""
    right = any(outcome.evaluation and outcome.evaluation.trusted for outcome in candidates)
    return float(right), max((outcome.reward for outcome in candidates), default=0.0)


def per_task(groups: Sequence[Group], *, together: int) -> np.ndarray:
    """Mean over the sets of a task of (any correct, best score), `together` trajectories being a set  [tasks, 2]."""
    rows = []
    for group in groups:
        every = outcomes(group)
        sets = [list(chain(*every[start : start + together])) for start in range(0, len(every), together)]
        rows.append(np.mean([best(chosen) for chosen in sets], axis=0))
    return np.array(rows)


def interval(values: np.ndarray, *, draws: int = 10_000) -> tuple[float, float, float]:
    """Mean over tasks and its 95 % bootstrap interval."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--multi", nargs="+", required=True, help="model folders whose turns are measured, or 'starter'"
    )
    parser.add_argument(
        "--single", nargs="+", help="model folders whose fresh attempts are measured (default: --multi)"
    )
    parser.add_argument("--tasks", default="builtin:heldout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="sets of T kernels a task")
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    tasks, turns = load(arguments.tasks), arguments.turns
    sides = {
        "turns": (arguments.multi, turns, arguments.samples),
        "fresh": (arguments.single or arguments.multi, 1, arguments.samples * turns),
    }
    means: dict[str, np.ndarray] = {}
    for side, (models, length, members) in sides.items():
        found = [
            per_task(
                measured(model, tasks, turns=length, members=members, seed=arguments.seed + number),
                together=members // arguments.samples,
            )
            for number, model in enumerate(models)
        ]
        for model, table in zip(models, found, strict=True):
            print(f"{side}  {model}: correct {table[:, 0].mean():.1%}, score {table[:, 1].mean():.3f}", flush=True)
        means[side] = np.mean(found, axis=0)
    for column, name in enumerate(("correct", "score")):
        line = {side: [round(value, 4) for value in interval(means[side][:, column])] for side in sides}
        difference = interval(means["turns"][:, column] - means["fresh"][:, column])
        print(
            json.dumps({"measure": name, "tasks": len(tasks), **line, "difference": [round(v, 4) for v in difference]})
        )


if __name__ == "__main__":
    main()
