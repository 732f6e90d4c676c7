"""`import kernelwright`: what the contract promises, and how quickly."""

from __future__ import annotations

import subprocess
import sys

import kernelwright

PROMISED = ["Evaluation", "Group", "Recipe", "Sample", "Task", "Trajectory", "Turn", "evaluate", "rollout", "train"]


def fresh(program: str) -> str:
    """Output of `program` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_promised_name_is_there() -> None:
    assert sorted(kernelwright.__all__) == PROMISED
    for name in PROMISED:
        assert callable(getattr(kernelwright, name)), name


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = (
        "import kernelwright, sys; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert fresh(heavy) == "[]"


def test_train_is_the_function_whoever_imports_first() -> None:
    for first in ("import kernelwright.train", "from kernelwright.train import Event", "pass"):
        program = f"{first}\nfrom kernelwright import rollout, train\nprint(rollout.__name__, train.__name__)"
        assert fresh(program) == "rollout train"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kernelwright, "trainer")
