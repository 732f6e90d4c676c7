"""A task from a Python program in KernelBench form: `class Model`, `get_inputs()`, `get_init_inputs()`.

The program is the user's own and runs in this process. It is checked and timed at its own sizes; the extents of its
inputs become named sizes (equal ones share a name: n, m, k, d3, d4, ...), which a C kernel receives.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernelwright.errors import BadTask
from kernelwright.tasks.shrink import construct, shrink
from kernelwright.types import Task

# programs are text; what is longer is something else
_LONGEST = 1 << 20
_PARTS = ("Model", "get_inputs", "get_init_inputs")


def load(path: str, *, small: bool = False) -> Task:
    """Read one problem file, and call its model to see that it is one.

    Args:
        small: see `program`.

    Raises:
        BadTask: the file is missing or no text, what `program` raises, or a model that does not run, is random, or
            returns something else than one tensor.
    """
    file = Path(path)
    task = program(read(file), identifier=f"file/{word(file.stem)}", where=path, tags=("file",), small=small)
    _try(_execute(task.reference, path), path)
    return task


def read(file: Path) -> str:
    """The text of a program.

    Raises:
        BadTask: there is no such file, or it is no text of a reasonable size.
    """
    if not file.is_file():
        raise BadTask(f"got the task file '{file}', which does not exist; give the path of a KernelBench problem file")
    if (size := file.stat().st_size) > _LONGEST:
        raise BadTask(f"got the task file '{file}' of {size} bytes, expected a Python program of at most {_LONGEST}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadTask(f"got the task file '{file}', which is not UTF-8 text; expected a Python file") from None


def program(
    source: str, *, identifier: str, where: str, tags: Sequence[str] = (), statement: str = "", small: bool = False
) -> Task:
    """A task from the text of a program.

    Args:
        where: what to call the program in a complaint.
        statement: one line for lists; without it the first line of the model's docstring, or the last part of the name.
        small: whether sizes are halved until a computer without a GPU can run it, see `shrink`.

    Raises:
        BadTask: the program does not import or lacks a part, or it cannot be shrunk because it does not run.
    """
    if not source.strip():
        raise BadTask(f"{where} is empty; expected a program with {', '.join(_PARTS)}")
    module = _execute(source, where)
    text = statement or inspect.cleandoc(module["Model"].__doc__ or "").partition("\n")[0]
    return Task(
        id=identifier,
        statement=text or identifier.rpartition("/")[2],
        reference=shrink(source) if small else source,
        tags=tuple(tags),
    )


def _execute(source: str, where: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "kernelwright_task"}
    try:
        exec(compile(source, where, "exec"), module)
    except (Exception, SystemExit) as error:
        raise BadTask(f"{where} does not import: {type(error).__name__}: {error}") from error
    if missing := [name for name in _PARTS if name not in module]:
        raise BadTask(
            f"{where} has no {' and no '.join(missing)}; expected class Model, get_inputs() and get_init_inputs()"
        )
    return module


def _try(module: dict[str, Any], where: str) -> None:
    def output() -> Any:
        with torch.no_grad():
            return model(*[value.clone() if isinstance(value, torch.Tensor) else value for value in inputs])

    try:
        model = construct(module).eval()
        inputs = list(module["get_inputs"]())
        first, second = output(), output()
    except (Exception, SystemExit) as error:
        raise BadTask(f"{where} does not run: {type(error).__name__}: {error}") from error
    if not isinstance(first, torch.Tensor):
        raise BadTask(f"{where} returns {type(first).__name__}, expected one tensor")
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not tensors or not all(value.numel() for value in tensors):
        raise BadTask(f"{where} takes no tensor or an empty tensor; expected inputs with at least one element")
    if not torch.equal(first, second) and not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise BadTask(
            f"{where} is random: two runs on the same inputs differ; a reference must be a function of its inputs"
        )


def word(name: str) -> str:
    """A name without white space, as an id needs it."""
    return "_".join(name.split())
