"""Folders of KernelBench problems: `level1/1_Square_matrix_multiplication_.py` and so on (Ouyang et al., 2502.10517).

`kernelbench:DIR#OPTIONS` takes a checkout, its folder `KernelBench`, or one level; the options, with commas between
them, are levels (`level1`), problems (`1-20`, `7`) and `shrink`.
"""

from __future__ import annotations

import re
from pathlib import Path

from kernelwright.errors import UserError
from kernelwright.tasks import files
from kernelwright.types import Task

_PROBLEM = re.compile(r"(\d+)_(.+)\.py")
_LEVEL = re.compile(r"level(\d+)")


def load(spec: str, *, small: bool = False) -> list[Task]:
    """The problems of a folder by level and number, each `kernelbench/LEVEL/FILE`.

    Args:
        spec: `DIR` or `DIR#OPTIONS`.
        small: as the option `shrink`.

    Raises:
        UserError: no such folder, no problem in it, or an option of another form.
        BadTask: a file that is no problem.
    """
    folder, _, text = spec.partition("#")
    options = [option for option in text.split(",") if option]
    small = small or "shrink" in options
    levels = {option for option in options if _LEVEL.fullmatch(option)}
    numbers = _numbers([option for option in options if option != "shrink" and option not in levels])
    found = [
        (level, number, file)
        for level, number, file in _problems(Path(folder))
        if (not levels or level in levels) and (not numbers or number in numbers)
    ]
    if not found:
        raise UserError(
            f"got '{spec}', where no problem is left; expected a KernelBench checkout or a folder of files such as "
            "level1/1_Square_matrix_multiplication_.py"
        )
    return [
        files.program(
            files.read(file),
            identifier=f"kernelbench/{level}/{file.stem}",
            where=str(file),
            tags=("kernelbench", level),
            statement=file.stem.partition("_")[2].strip("_").replace("_", " "),
            small=small,
        )
        for level, _, file in found
    ]


def _problems(folder: Path) -> list[tuple[str, int, Path]]:
    """(level, number, file) of all problems in a checkout, a folder of levels or a level."""
    if not folder.is_dir():
        raise UserError(f"got the folder '{folder}', which does not exist; expected a KernelBench checkout")
    root = folder / "KernelBench" if (folder / "KernelBench").is_dir() else folder
    levels = [path for path in root.iterdir() if path.is_dir() and _LEVEL.fullmatch(path.name)] or [root]
    found = [
        (level.name, int(match[1]), file)
        for level in levels
        for file in level.iterdir()
        if (match := _PROBLEM.fullmatch(file.name))
    ]
    return sorted(found, key=lambda problem: (problem[0], problem[1], problem[2].name))


def _numbers(options: list[str]) -> set[int]:
    numbers: set[int] = set()
    for option in options:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", option)
        if match is None:
            raise UserError(f"got the option '{option}', expected levels (level1), problems (7, 1-20) or shrink")
        numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers
