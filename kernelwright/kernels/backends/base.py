"""What a backend is, and the records that it hands back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kernelwright.kernels.reference import Case, Interface
from kernelwright.types import Location, Task

CallStatus = Literal["ok", "crash", "timeout", "exit", "guard", "input", "load", "shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A candidate that compiled."""

    path: Path
    # what the compiler reported, see `Evaluation.profile`
    profile: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A candidate that did not compile."""

    message: str
    location: Location | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What came of one call of the candidate."""

    status: CallStatus
    # what went wrong, in words; empty when nothing did
    message: str = ""
    # the candidate's output in the shape that was due; None unless the call came back
    output: np.ndarray | None = None
    # processor time in milliseconds: by the clock beside the candidate, and by the one out of its reach, which counts
    # a switch of processes as well
    ms: float = 0.0
    outside_ms: float = 0.0
    location: Location | None = None
    # where the candidate is called through a library: what it computed with the library, and its own kernels' launches
    borrowed: tuple[str, ...] = ()
    launches: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Where an evaluation may write: a folder of its own, and one that all evaluations of an Evaluator share."""

    own: Path
    shared: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A language that candidates are written in, and how they are built and run."""

    name: str
    # for prose, and the tag of a code block
    language: str
    fence: str
    # on what a verdict is reached, and whether times mean anything there
    verified: Literal["gpu", "cpu", "interpreter"]
    timed: bool
    # the rules of this backend for a task, as the policy reads them
    instructions: Callable[[Task], str]
    # None, or why this machine cannot use the backend and what to install
    available: Callable[[], str | None]
    build: Callable[[Interface, str, Workspace], Built | Rejected]
    # (built, interface, cases, limit in seconds for each call, workspace) -> one Call a case, fewer after a failure
    run: Callable[[Built, Interface, Sequence[Case], float, Workspace], list[Call]]


def store(path: Path, data: bytes) -> None:
    """Write a file aside, then put it in place, so that a thread that finds it finds all of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
