"""Where tasks come from: `load(spec)` turns a SPEC of the command line into tasks.

builtin                 all builtin tasks          builtin:train | :validation | :heldout   one set
builtin/NAME            one of them                file:PATH.py                             a KernelBench problem file
kernelbench:DIR         a KernelBench checkout, or a folder of problem files; #level1, #1-20, #shrink narrow it
table:PATH              .jsonl or .parquet with the columns of a published set, see `tables`
hub:ID                  the same from the hub

`#shrink` at the end of the last four halves sizes until a computer without a GPU can run the program, see `shrink`.
"""

from __future__ import annotations

from kernelwright.errors import UserError
from kernelwright.tasks import builtin, files, kernelbench, tables
from kernelwright.types import Task

SPECS = (
    "builtin",
    "builtin:train",
    "builtin:validation",
    "builtin:heldout",
    "builtin/NAME",
    "file:PATH.py",
    "kernelbench:DIR",
    "table:PATH",
    "hub:ID",
)


def load(spec: str, *, small: bool = False) -> list[Task]:
    """The tasks that `spec` names.

    Args:
        small: whether programs of others are shrunk until a computer without a GPU can run them, see `shrink.shrink`.

    Raises:
        UnknownName: no such builtin set or task.
        BadTask: a file or a row that is no task.
        MissingTool: a package that the spec needs is missing.
        UserError: a spec of another form, or one that names nothing.
    """
    kind, colon, rest = spec.partition(":")
    if kind != "kernelbench" and rest.endswith("#shrink"):
        return load(spec.removesuffix("#shrink"), small=True)
    if spec == "builtin":
        return [task for name in builtin.SETS for task in builtin.load(name)]
    if spec.startswith("builtin/"):
        return [builtin.find(spec.removeprefix("builtin/"))]
    if spec.endswith(".py") and not colon:
        return [files.load(spec, small=small)]
    if colon and kind == "builtin":
        return list(builtin.load(rest))
    if colon and kind == "file":
        return [files.load(rest, small=small)]
    if rest and kind == "kernelbench":
        return kernelbench.load(rest, small=small)
    if rest and kind == "table":
        return tables.load(rest, small=small)
    if rest and kind == "hub":
        return tables.hub(rest, small=small)
    raise UserError(f"got the task spec '{spec}', expected one of {', '.join(SPECS)}")
