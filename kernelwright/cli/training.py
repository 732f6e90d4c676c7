"""`train`, `evaluate`, `refine` and `report`: what needs a policy, or a run of one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelwright.cli.catalogue import Json, one_task
from kernelwright.errors import BadRun, UnknownName, UserError

if TYPE_CHECKING:
    from kernelwright.types import Recipe, Trajectory

Model = Annotated[str | None, typer.Option(help="A Hugging Face id or a folder; default: the built-in starter policy.")]
Backend = Annotated[str | None, typer.Option(help="What kernels are written in, such as c or triton.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a knob; `recipes NAME` lists the keys.")
]
Turns = Annotated[int | None, typer.Option(min=1, help="Turns of a trajectory.")]


def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe, see `kernelwright recipes`.")] = None,
    *,
    tasks: Annotated[str | None, typer.Option(help="Task SPEC to train on.")] = None,
    model: Model = None,
    backend: Backend = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default: the next free runs/NAME-N.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Number of steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything that is drawn.")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a policy, measure it before and after, and write a report. Without a recipe: quickstart."""
    options = {"tasks": tasks, "model": model, "backend": backend, "steps": steps, "seed": seed}
    chosen = _recipe(recipe, out if resume else None, options, settings or [])

    from kernelwright.cli.live import Live
    from kernelwright.recipes.rehearsal import rehearse
    from kernelwright.report import write
    from kernelwright.train import train as run

    rehearse(chosen)
    live = Live()
    try:
        with live:
            path = run(chosen, out=out, resume=resume, progress=live)
    except KeyboardInterrupt:
        where = live.path or (out if out and (out / "config.json").exists() else None)
        again = f"continue with: kernelwright train --out {where} --resume" if where else "nothing was written"
        print(f"kernelwright: stopped; {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    live.summary(path)
    print(f"report: {write(path)}")


def evaluate(
    *,
    model: Model = None,
    tasks: Annotated[str, typer.Option(help="Task SPEC to measure on.")] = "builtin:heldout",
    backend: Backend = None,
    turns: Turns = None,
    samples: Annotated[int, typer.Option(min=1, help="Trajectories of each task.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: correct, fast_p and speedup, per turn, best@k and avg@k."""
    chosen = _recipe(None, None, {"model": model, "backend": backend, "seed": seed}, settings or [])

    from kernelwright.tasks import load
    from kernelwright.train import evaluate_policy, open_engine

    found = load(tasks)
    engine = open_engine(chosen.model)
    with chosen.environment() as environment:
        numbers = evaluate_policy(
            engine,
            found,
            environment=environment,
            context=chosen.context,
            turns=turns or chosen.max_turns,
            samples=samples,
            sampling=replace(chosen.sampling, seed=chosen.sampling.seed + seed),
        )
    if as_json:
        print(json.dumps({"model": chosen.model, "spec": tasks, **numbers}, indent=2))
        return
    from kernelwright.cli.live import print_numbers

    print_numbers(numbers, title=f"{chosen.model} on {tasks}")


def refine(
    task: Annotated[str, typer.Argument(help="The task, such as builtin/NAME or file:PATH.py")],
    *,
    model: Model = None,
    backend: Backend = None,
    turns: Turns = None,
    samples: Annotated[int, typer.Option(min=1, help="Trajectories, each a refinement of its own.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    settings: Settings = None,
) -> None:
    """Serial refinement without training: print the best kernel and its history. Exit 1: no correct kernel."""
    chosen = _recipe(None, None, {"model": model, "backend": backend, "seed": seed}, settings or [])
    found = one_task(task)

    from kernelwright.rollout import refuse_nothing, rollout
    from kernelwright.train import open_engine

    engine = open_engine(chosen.model)
    with chosen.environment() as environment:
        groups = rollout(
            [found],
            engine,
            environment=environment,
            context=chosen.context,
            max_turns=turns or chosen.max_turns,
            group_size=samples,
            sampling=replace(chosen.sampling, seed=chosen.sampling.seed + seed),
        )
    refuse_nothing(groups)
    best = max(groups[0].trajectories, key=_reward)
    _print_history(best)
    turn = best.best
    evaluation = turn.outcome.evaluation if turn and turn.outcome else None
    if turn is None or evaluation is None or not evaluation.trusted:
        print("no correct kernel was found; try more --samples or --turns", file=sys.stderr)
        raise typer.Exit(1)
    print(turn.source)


def report(
    run: Annotated[Path, typer.Argument(help="A run directory that `train` made.")],
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: report.html in the run.")] = None,
) -> None:
    """Write a self-contained HTML file about a run, finished or not."""
    from kernelwright.report import write

    print(write(run, output))


def _recipe(name: str | None, run: Path | None, options: dict[str, Any], settings: list[str]) -> Recipe:
    """The recipe by name, or of the run to go on with; changed by the options; changed by --set."""
    from kernelwright import store
    from kernelwright.kernels import BACKENDS
    from kernelwright.recipes import on_starter
    from kernelwright.recipes import recipe as named
    from kernelwright.recipes.override import override

    if run is not None and (run / "config.json").exists():
        base = store.recipe(run)
        if name is not None and name != base.name:
            raise UserError(f"'{run}' is a run of recipe '{base.name}', got '{name}'; leave the recipe out to go on")
    elif run is not None:
        raise BadRun(f"'{run}' holds no run to go on with; check --out, or leave --resume out to start one there")
    else:
        base = named(name or "quickstart")
        if base.model != "starter" and options["model"] in (None, "starter"):
            print(f"{base.name} names the model {base.model}; this run is on the built-in starter", file=sys.stderr)
            base = on_starter(base)
    changes = {key: options.get(key) for key in ("model", "steps", "seed") if options.get(key) is not None}
    backend, tasks = options.get("backend"), options.get("tasks")
    if backend is not None:
        if backend not in BACKENDS:
            raise UnknownName("backend", backend, BACKENDS)
        base = override(base, [f"environment.backend={backend}"])
    if tasks is not None:
        changes["tasks"] = tasks
        # somebody's own tasks are measured on themselves: the builtin ones say little about them
        if not tasks.startswith("builtin"):
            changes |= {"validation": tasks, "heldout": None}
    return override(replace(base, **changes), settings)


def _reward(trajectory: Trajectory) -> float:
    return max((reward for reward in trajectory.rewards if reward is not None), default=float("-inf"))


def _print_history(trajectory: Trajectory) -> None:
    for number, turn in enumerate(trajectory.turns, start=1):
        if turn.outcome is not None:
            mark = " <- best" if turn is trajectory.best else ""
            lines = turn.outcome.feedback.splitlines() or [""]
            print(f"turn {number}: reward {turn.outcome.reward:.3g}{mark}", *lines, sep="\n    ", file=sys.stderr)
