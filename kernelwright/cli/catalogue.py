"""`tasks` and `recipes`: what there is to train on and how."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Task

tasks = typer.Typer(help="List, show and validate tasks.", no_args_is_help=False)

Spec = Annotated[
    str,
    typer.Argument(help="builtin, builtin:heldout, builtin/NAME, file:PATH.py, kernelbench:DIR, table:PATH or hub:ID"),
]
Shrink = Annotated[bool, typer.Option("--shrink", help="Halve a program's sizes until a CPU can run it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def some_tasks(spec: str, *, shrink: bool = False) -> list[Task]:
    """The tasks of `spec`; a builtin task may leave out `builtin/`."""
    from kernelwright.tasks import load

    bare = not spec.startswith("builtin") and not any(sign in spec for sign in ":/.")
    return load(f"builtin/{spec}" if bare else spec, small=shrink)


def one_task(spec: str, *, shrink: bool = False) -> Task:
    """The only task of `spec`. Raises UserError when there are several."""
    found = some_tasks(spec, shrink=shrink)
    if len(found) != 1:
        raise UserError(
            f"got '{spec}', which is {len(found)} tasks, expected one; `kernelwright tasks list {spec}` names them"
        )
    return found[0]


@tasks.command("list")
def list_tasks(spec: Spec = "builtin", *, as_json: Json = False) -> None:
    """Name the tasks of SPEC."""
    found = some_tasks(spec)
    if as_json:
        rows = [{"id": task.id, "statement": task.statement, "tags": list(task.tags)} for task in found]
        print(json.dumps(rows, indent=2))
        return
    width = max((len(task.id) for task in found), default=0)
    for task in found:
        print(f"{task.id:<{width}}  {' '.join(task.statement.split())}")


@tasks.command("show")
def show_task(
    task: Annotated[str, typer.Argument(help="One task, such as builtin/NAME or file:PATH.py")],
    *,
    backend: Annotated[str, typer.Option(help="What the kernel is to be written in.")] = "c",
    shrink: Shrink = False,
) -> None:
    """Print exactly what the model is told."""
    from kernelwright import prompts
    from kernelwright.kernels import BACKENDS

    chosen = one_task(task, shrink=shrink)
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    rules = BACKENDS[backend]
    messages = prompts.opening(
        chosen, language=rules.language, fence=rules.fence, instructions=rules.instructions(chosen)
    )
    for message in messages:
        print(message.content, end="" if message.content.endswith("\n") else "\n")


@tasks.command("validate")
def validate_tasks(spec: Spec, *, shrink: Shrink = False) -> None:
    """Run the self-checks of each task; exit 1 when one fails."""
    from kernelwright.kernels import validate

    found = some_tasks(spec, shrink=shrink)
    wrong = 0
    for task in found:
        complaints = validate(task)
        wrong += bool(complaints)
        for complaint in complaints:
            print(f"{task.id}: {complaint}")
    print(f"{len(found) - wrong} of {len(found)} tasks are fine")
    if wrong:
        raise typer.Exit(1)


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe; without it, all are listed.")] = None,
    *,
    as_json: Json = False,
) -> None:
    """The published systems as presets: every knob, and the paper it is from."""
    from kernelwright.recipes import RECIPES, recipe
    from kernelwright.recipes.override import knobs

    if name is None:
        every = {key: make().paper for key, make in RECIPES.items()}
        if as_json:
            print(json.dumps(every, indent=2))
        else:
            width = max(map(len, every))
            print("\n".join(f"{key:<{width}}  {paper}" for key, paper in every.items()))
        return
    values = {key: _plain(value) for key, value in knobs(recipe(name)).items()}
    if as_json:
        print(json.dumps(values, indent=2))
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key:<{width}}  {value if isinstance(value, str) else json.dumps(value)}")


def _plain(value: Any) -> Any:
    """A knob's value as JSON can hold it."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return asdict(value)
