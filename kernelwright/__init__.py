"""Multi-turn reinforcement learning that teaches language models to write fast kernels.

    from kernelwright import Task, Evaluation, Turn, Trajectory, Group, Sample, Recipe, evaluate, rollout, train

Everything else is reached by its module name. The functions are imported when they are asked for, so that importing the
package is quick.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernelwright.types import Evaluation, Group, Recipe, Sample, Task, Trajectory, Turn

if TYPE_CHECKING:
    from kernelwright.kernels import evaluate
    from kernelwright.rollout import rollout
    from kernelwright.train import train

__all__ = [
    "Evaluation",
    "Group",
    "Recipe",
    "Sample",
    "Task",
    "Trajectory",
    "Turn",
    "evaluate",
    "rollout",
    "train",
]

_WHERE = {"evaluate": "kernelwright.kernels", "rollout": "kernelwright.rollout", "train": "kernelwright.train"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kernelwright' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


class _Package(ModuleType):
    """Two modules share their name with their function; here the name means the function, whoever imports first."""

    def __setattr__(self, name: str, value: Any) -> None:
        # the import system sets every submodule as an attribute of its package
        if isinstance(value, ModuleType) and _WHERE.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
