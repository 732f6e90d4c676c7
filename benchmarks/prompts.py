"""Is every prompt that was ever sent, token for token, the beginning of the row it is trained in?

    python benchmarks/prompts.py [--steps 3] [--budget 400] [--contexts full window digest]

Trains the starter for a few steps under each context and compares what the engine was asked with what it was trained
on. The budget is small, so that contexts have to drop turns. Prints a line a context and exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernelwright import train
from kernelwright.context import digest, full, window
from kernelwright.engines.local import LocalEngine, read_model
from kernelwright.recipes import recipe
from kernelwright.starter import path
from kernelwright.types import Completion, Sample, Sampling


class Recorder(LocalEngine):
    """A local engine that remembers what passed through it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[tuple[int, ...], Completion]] = []
        self.trained: list[Sample] = []

    def sample(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """As the engine, recorded."""
        completions = super().sample(contexts, sampling, keys)
        self.asked += [(tuple(context), one) for context, one in zip(contexts, completions, strict=True)]
        return completions

    def update(self, rows: Sequence[Sample], *arguments: Any, **options: Any) -> dict[str, float]:
        """As the engine, recorded."""
        self.trained += rows
        return super().update(rows, *arguments, **options)


def begins_one(sent: tuple[int, ...], rows: Sequence[tuple[int, ...]]) -> bool:
    """Whether one of the sorted rows begins with what was sent: it would be the first that is not before it."""
    place = bisect_left(rows, sent)
    return place < len(rows) and rows[place][: len(sent)] == sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=int, default=400)
    contexts = {"full": partial(full), "window": partial(window, k=1), "digest": partial(digest)}
    parser.add_argument("--contexts", nargs="+", choices=list(contexts), default=list(contexts))
    arguments = parser.parse_args()
    failures = 0
    for name in arguments.contexts:
        context = contexts[name]
        engine = Recorder(*read_model(path()))
        chosen = recipe("quickstart")
        chosen = replace(
            chosen,
            context=context,
            max_turns=4,
            steps=arguments.steps,
            heldout=None,
            validation=None,
            evaluate_every=0,
            evaluate_tasks=0,
            sampling=replace(chosen.sampling, budget=arguments.budget),
        )
        with tempfile.TemporaryDirectory() as out:
            train(chosen, engine=engine, out=out)
        rows = sorted(tuple(row.tokens) for row in engine.trained)
        lost = sum(not begins_one(context + completion.tokens, rows) for context, completion in engine.asked)
        longest = max(len(context) + chosen.sampling.max_tokens for context, _ in engine.asked)
        failures += lost + (longest > arguments.budget)
        print(
            f"{name:8} {len(engine.asked)} prompts, {len(rows)} rows, {lost} prompts not in a row, "
            f"longest prompt and its room {longest} of {arguments.budget} tokens"
        )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
