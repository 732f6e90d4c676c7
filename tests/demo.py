"""A run directory with real evaluations and no model: a script that gets better from step to step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_model import tiny_tokenizer

from kernelwright.engines.scripted import ScriptedEngine
from kernelwright.recipes import RECIPES
from kernelwright.recipes.override import override
from kernelwright.tasks import load
from kernelwright.train import train

_BODY = "    long size = (long)n * m;\n    for (long i = 0; i < size; i++) out[i] = {value};\n"
_SIGNATURE = "void kernel(const float *x, float *out, int n, int m) {\n"
_HEAD = '#pragma GCC optimize("Ofast")\n#include <math.h>\n'
# of each task a right expression, and one that is wrong in an instructive way
_VALUES = {"builtin/relu": ("x[i] > 0 ? x[i] : 0", "x[i]"), "builtin/abs": ("fabsf(x[i])", "-x[i]")}


class _Saving(ScriptedEngine):
    def save(self, path: str) -> None:
        super().save(path)
        tokenizer: Any = self.tokenizer
        tokenizer.save_pretrained(path)


def demo_run(path: Path, *, steps: int = 3) -> Path:
    """Train the script for some steps into `path`."""
    changes = (f"steps={steps}", "tasks_per_step=2", "group_size=4", "evaluate_every=2", "evaluate_samples=2")
    recipe = replace(
        override(RECIPES["quickstart"](), [*changes, "sampling.max_tokens=400", "sampling.budget=4000"]), name="demo"
    )
    tasks = [load(name)[0] for name in _VALUES]
    engine = _Saving(_script(steps), tokenizer=tiny_tokenizer())
    return train(recipe, engine=engine, out=path, tasks=tasks, validation=tasks, heldout=tasks)


def _script(steps: int) -> Any:
    # keys start with the step; measurements are at step 0 and see the skill of the last step before them
    latest = 0

    def reply(prompt: str, key: tuple[int, ...]) -> str:
        nonlocal latest
        latest = max(latest, key[0])
        draw = random.Random(repr(key))
        right, wrong = _VALUES["builtin/relu" if "relu" in prompt else "builtin/abs"]
        skill = 0.25 + 0.6 * latest / steps + 0.1 * key[-1]
        value, plan = right, "Add <Ofast> so that the loop vectorises & stays short."
        if draw.random() > skill:
            bugs = [
                (wrong, "Try less."),
                (right.replace("]", "", 1), "Index less."),
                ("x[i + 100000000]", "Look ahead."),
            ]
            value, plan = draw.choice(bugs)
        if draw.random() > 0.97:
            return "I would rather write prose </script>."
        code = _HEAD + _SIGNATURE + _BODY.format(value=value) + "}\n"
        return f"{plan}\n```c\n{code}```\nSummary: {plan.lower()}"

    return reply
