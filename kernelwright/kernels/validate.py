"""Self-checks of a task."""

from __future__ import annotations

from kernelwright.types import Task


def validate(task: Task) -> list[str]:
    """Complaints about a task; empty when it is fine."""
    return [] if task.reference else ["no reference"]
