"""A task from a Python file in KernelBench form: `class Model`, `get_inputs()`, `get_init_inputs()`.

The file is the user's own program and runs in this process. The extents of its inputs become named sizes (equal ones
share a name: n, m, k, d3, d4, ...), which a kernel receives; it is checked and timed at the file's own sizes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from kernelwright.errors import BadTask
from kernelwright.types import Input, Task

_SIZE_NAMES = ("n", "m", "k")
# what a kernel's arguments cannot be called: the output, the sizes, and the keywords of C
_TAKEN = {
    "out", "kernel", *_SIZE_NAMES, "auto", "break", "case", "char", "const", "continue", "default", "do", "double",
    "else", "enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return",
    "short", "signed", "sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile",
    "while",
}  # fmt: skip


def load(path: str) -> Task:
    """Read one problem file.

    Raises:
        BadTask: the file is missing, does not import, lacks a part, does not run, is random, or takes something else
            than float32 tensors.
    """
    file = Path(path)
    if not file.is_file():
        raise BadTask(f"got the task file '{path}', which does not exist; give the path of a KernelBench problem file")
    try:
        source = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadTask(f"got the task file '{path}', which is not UTF-8 text; expected a Python file") from None
    module = _execute(source, path)
    model, inputs = _instantiate(module, path)
    names = _names(model, len(inputs), path)
    sizes: dict[int, str] = {}
    described = []
    for name, tensor in zip(names, inputs, strict=True):
        shape = tuple(_size_name(extent, sizes) for extent in tensor.shape)
        described.append(Input(name=name, shape=shape))
    own = {name: extent for extent, name in sizes.items()}
    _require_deterministic(model, inputs, path)
    return Task(
        id=f"file/{file.stem}",
        statement=(inspect.getdoc(type(model)) or file.stem) if type(model).__doc__ else file.stem,
        reference=source,
        inputs=tuple(described),
        check_shapes=(own,),
        time_shapes=(own,),
        tags=("file",),
    )


def _execute(source: str, path: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "kernelwright_task"}
    try:
        exec(compile(source, path, "exec"), module)
    except (Exception, SystemExit) as error:
        raise BadTask(f"{path} does not import: {type(error).__name__}: {error}") from error
    missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if name not in module]
    if missing:
        raise BadTask(
            f"{path} has no {' and no '.join(missing)}; expected class Model, get_inputs() and get_init_inputs()"
        )
    return module


def _instantiate(module: dict[str, Any], path: str) -> tuple[Any, list[Any]]:
    import torch

    try:
        model = module["Model"](*module["get_init_inputs"]()).eval()
        inputs = list(module["get_inputs"]())
        with torch.no_grad():
            output = model(*inputs)
    except (Exception, SystemExit) as error:
        raise BadTask(f"{path} does not run: {type(error).__name__}: {error}") from error
    kinds = [
        str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__ for value in [*inputs, output]
    ]
    if wrong := [kind for kind in kinds if kind != "torch.float32"]:
        raise BadTask(f"{path} takes or returns {wrong[0]}; expected float32 tensors in and one out")
    if not all(value.numel() for value in inputs):
        raise BadTask(f"{path} takes an empty tensor; expected inputs with at least one element")
    return model, inputs


def _names(model: Any, count: int, path: str) -> list[str]:
    """Names of the inputs: those of `forward`, which are also arguments of a kernel in C."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    names = own + [f"x{position}" for position in range(len(own), count)]
    for name in names:
        if name in _TAKEN or re.fullmatch(r"d\d+", name):
            raise BadTask(f"{path} calls an input '{name}', which means something else in a kernel; rename it")
    return names


def _size_name(extent: int, sizes: dict[int, str]) -> str:
    if extent not in sizes:
        sizes[extent] = _SIZE_NAMES[len(sizes)] if len(sizes) < len(_SIZE_NAMES) else f"d{len(sizes)}"
    return sizes[extent]


def _require_deterministic(model: Any, inputs: list[Any], path: str) -> None:
    import torch

    with torch.no_grad():
        first, second = (model(*[tensor.clone() for tensor in inputs]) for _ in range(2))
    if not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)):
        raise BadTask(
            f"{path} is random: two runs on the same inputs differ; a reference must be a function of its inputs"
        )
