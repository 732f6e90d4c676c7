"""Every exception this package raises on purpose, and who owns it.

    KernelwrightError
    ├── UserError (ValueError)            got, expected, do this; the command line prints one line and exits 2
    │   ├── UnknownName                   a recipe, task, option or `--set` key that does not exist; names the nearest
    │   ├── BadTask                       a task file that does not import, has no Model, or is random
    │   ├── BadModel                      a model folder that is missing, corrupt or no causal LM
    │   └── BadRun                        a run directory that is unreadable, unwritable or of another recipe
    ├── MissingTool (RuntimeError)        this machine lacks a compiler, a device or an optional package
    └── InfrastructureError (RuntimeError) a worker, device or disk failed; retried, never turned into a reward of 0

A failure of the model's own code is no exception at all: it is an `Evaluation`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KernelwrightError(Exception):
    """Base class of everything below."""


class UserError(KernelwrightError, ValueError):
    """The caller's mistake. The message is one line: what was got, what was expected, what to do."""


class UnknownName(UserError):
    """A name that is not among the known ones; the message names the nearest."""

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(got, names, n=1, cutoff=0.4)
        hint = (
            f"did you mean '{near[0]}'?"
            if near
            else f"known: {', '.join(names[:12])}{' ...' if len(names) > 12 else ''}"
        )
        super().__init__(f"unknown {kind} '{got}'; {hint}")


class BadTask(UserError):
    """A task that cannot be used as one."""


class BadModel(UserError):
    """A model path or id that does not load as a causal language model."""


class BadRun(UserError):
    """A run directory that cannot be written, read or continued."""


class MissingTool(KernelwrightError, RuntimeError):
    """Something has to be installed on this machine first; the message says what."""


class InfrastructureError(KernelwrightError, RuntimeError):
    """Our side failed (a worker, a device, a disk), not the policy's code."""
