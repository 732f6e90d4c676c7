"""Where tasks come from: `load(spec)` turns a SPEC of the command line into tasks.

builtin                 all builtin tasks          builtin:train | :validation | :heldout   one set
builtin/NAME            one of them                file:PATH.py                             a KernelBench problem file
"""

from __future__ import annotations

from kernelwright.errors import UserError
from kernelwright.tasks import builtin, files
from kernelwright.types import Task

SPECS = ("builtin", "builtin:train", "builtin:validation", "builtin:heldout", "builtin/NAME", "file:PATH.py")


def load(spec: str) -> list[Task]:
    """The tasks that `spec` names.

    Raises:
        UnknownName: no such builtin set or task.
        BadTask: a file that is no task.
        UserError: a spec of another form.
    """
    if spec == "builtin":
        return [task for name in builtin.SETS for task in builtin.load(name)]
    if spec.startswith("builtin:"):
        return list(builtin.load(spec.removeprefix("builtin:")))
    if spec.startswith("builtin/"):
        return [builtin.find(spec.removeprefix("builtin/"))]
    if spec.startswith("file:"):
        return [files.load(spec.removeprefix("file:"))]
    if spec.endswith(".py"):
        return [files.load(spec)]
    raise UserError(f"got the task spec '{spec}', expected one of {', '.join(SPECS)}")
