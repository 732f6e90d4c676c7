"""The main job: one step is rollout, select, credit, rows, update, record; in between, the policy is measured.

Everything a run does is a function of its recipe and of the step number, so there is no state but the engine's: a run
that is killed anywhere goes on from its last checkpoint to the same bits (as far as its rewards are the same: measured
times are not). Nothing here knows what the tasks are about; the recipe's environment does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kernelwright import measure, store
from kernelwright.errors import BadModel, BadRun, UserError
from kernelwright.rollout import refuse_nothing, rollout
from kernelwright.samples import minibatches, rows
from kernelwright.tasks import load
from kernelwright.types import (
    Context,
    Engine,
    Environment,
    Optimiser,
    Recipe,
    Sample,
    Sampling,
    Task,
)

# measuring draws from its own random numbers, the same ones each time, so that two policies meet the same luck
_EVALUATION_SEED = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What `train` tells while it works, for someone to show.

    kind        data
    start       path, tasks, resumed
    evaluating  phase, set, tasks
    evaluated   the line of evaluations.jsonl
    step        the line of metrics.jsonl, and "seconds" by stage
    finish      path, best (step of the best checkpoint or None)
    """

    kind: Literal["start", "evaluating", "evaluated", "step", "finish"]
    # steps done, and steps of the run
    step: int
    steps: int
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What stays the same during a run."""

    recipe: Recipe
    sampling: Sampling
    engine: Engine
    environment: Environment
    run: store.Run
    tasks: Sequence[Task]
    validation: Sequence[Task]
    heldout: Sequence[Task]
    workers: int | None
    progress: Callable[[Event], None]

    def tell(self, kind: Any, step: int, data: Mapping[str, Any]) -> None:
        """Report progress."""
        self.progress(Event(kind=kind, step=step, steps=self.recipe.steps, data=data))


def train(
    recipe: Recipe,
    *,
    engine: Engine | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Event], None] | None = None,
    tasks: Sequence[Task] | None = None,
    validation: Sequence[Task] | None = None,
    heldout: Sequence[Task] | None = None,
    workers: int | None = None,
) -> Path:
    """Train, and measure before and after; returns the run directory (`kernelwright.store` says what is in it).

    Args:
        recipe: what to do. `recipe.environment()` is entered as a context manager once and gives the function
            (task) -> (opening messages, episode); if that has `counters()`, its counts go into timings.jsonl.
        engine: holds the policy, by default `recipe.model` on this machine. Left with the best weights.
        out: run directory, by default the next free `runs/NAME-N`.
        resume: go on with the run in `out` (by default the last `runs/NAME-N`) instead of starting one.
        progress: is told what happens.
        tasks: used instead of `recipe.tasks`; so are `validation` and `heldout`, where () means none.
        workers: replies judged at the same time, by default one a CPU.

    Raises:
        BadRun: the run directory cannot be used.
        UserError: tasks or a model that cannot be.
        InfrastructureError: no reply of a step could be judged.
        KeyboardInterrupt: passed on. The directory is sound at any moment; `resume` goes on.
    """
    path = _path(recipe, out, resume=resume)
    chosen = _tasks(recipe.tasks, tasks)
    if not chosen:
        raise UserError(f"got no tasks from '{recipe.tasks}', expected at least one; see `kernelwright tasks list`")
    measured_on = {"validation": _tasks(recipe.validation, validation), "heldout": _tasks(recipe.heldout, heldout)}
    # tasks or a model that do not load, or a compiler that is not there, leave no run directory behind
    policy = engine if engine is not None else open_engine(recipe.model)
    with recipe.environment() as environment, store.start(path, recipe, resume=resume) as run:
        job = _Job(
            recipe=recipe,
            sampling=replace(recipe.sampling, seed=recipe.sampling.seed + recipe.seed),
            engine=policy,
            environment=environment,
            run=run,
            tasks=chosen,
            **measured_on,
            workers=workers,
            progress=progress if progress is not None else _ignore,
        )
        _steps(job)
    return path


def open_engine(model: str) -> Engine:
    """The local engine on a Hugging Face id, a folder, or "starter", the policy that comes with the package."""
    # torch is only imported when a model is
    from kernelwright.engines.local import LocalEngine

    weights = Path(__file__).parent / "starter" / "weights"
    return LocalEngine.from_pretrained(str(weights) if model == "starter" else model)


def evaluate_policy(
    engine: Engine,
    tasks: Sequence[Task],
    *,
    environment: Environment,
    context: Context,
    turns: int,
    samples: int,
    sampling: Sampling,
    workers: int | None = None,
    seconds: MutableMapping[str, float] | None = None,
) -> dict[str, Any]:
    """Measure a policy with `samples` trajectories of at most `turns` attempts a task.

    The numbers are those of `kernelwright.measure.evaluation_numbers`. The random draws depend on `sampling.seed`
    alone and differ from those of training.
    """
    groups = rollout(
        tasks,
        engine,
        environment=environment,
        context=context,
        max_turns=turns,
        group_size=samples,
        sampling=replace(sampling, seed=sampling.seed + _EVALUATION_SEED),
        workers=workers,
        seconds=seconds,
    )
    refuse_nothing(groups)
    return measure.evaluation_numbers(groups, turns=turns)


def drawn(count: int, per_step: int, *, seed: int, step: int) -> list[int]:
    """Numbers of the tasks of a step, from 1 on: epochs of all `count` tasks, each in a shuffled order of its own.

    A pure function of its arguments, so a run that goes on needs to remember nothing. No task comes again before all
    others came.
    """
    chosen = []
    for position in range((step - 1) * per_step, step * per_step):
        epoch, place = divmod(position, count)
        order = list(range(count))
        random.Random(f"tasks {seed} {epoch}").shuffle(order)
        chosen.append(order[place])
    return chosen


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` of the tasks at even distances, or all when there are no more."""
    if count >= len(tasks):
        return list(tasks)
    return [tasks[index * len(tasks) // count] for index in range(count)]


def lr_scale(optimiser: Optimiser, *, update: int, updates: int) -> float:
    """Factor on the learning rate of update number `update` (from 0) of `updates`.

    Rises linearly over the first `warmup` updates; "linear" falls from 1 at the first update towards 0 after the last.
    """
    warm = min(1.0, (update + 1) / optimiser.warmup) if optimiser.warmup else 1.0
    return warm * (1.0 - update / updates if optimiser.schedule == "linear" else 1.0)


# ---------------------------------------------------------------- the run


def _steps(job: _Job) -> None:
    """All steps that are left, with the measurements in between.

    Order matters for a kill: lines of a step, its checkpoint, its measurement, the copy of the best checkpoint. Each
    is redone from the one before if it is missing.
    """
    step = _take_up(job)
    while True:
        if step == 0:
            _measure(job, "before", "train", spread(job.tasks, job.recipe.evaluate_tasks), step)
            _measure(job, "before", "heldout", job.heldout, step)
        if _due(job.recipe, step):
            _measure(job, "during" if step else "before", "validation", job.validation, step)
            _keep_best(job)
        if step == job.recipe.steps:
            break
        step += 1
        _step(job, step)
        if step % job.recipe.checkpoint_every == 0 or step == job.recipe.steps or _due(job.recipe, step):
            job.run.checkpoint(step, job.engine.save)
    best = _best_step(job)
    if best is not None and best != step:
        _load(job, "best")
    chosen = step if best is None else best
    _measure(job, "after", "train", spread(job.tasks, job.recipe.evaluate_tasks), chosen)
    _measure(job, "after", "heldout", job.heldout, chosen)
    job.tell("finish", step, {"path": str(job.run.path), "best": best})


def _take_up(job: _Job) -> int:
    """Number of steps that are done already; the engine and the files are put to that point."""
    newest = store.newest_whole(job.run.path, groups=job.recipe.tasks_per_step, evaluations=partial(_measurements, job))
    step = newest or 0
    job.run.cut(step)
    if newest is not None:
        _load(job, f"step-{step}")
        _keep_best(job)
    else:
        job.run.checkpoint(0, job.engine.save)
    job.tell("start", step, {"path": str(job.run.path), "tasks": len(job.tasks), "resumed": newest is not None})
    return step


def _load(job: _Job, checkpoint: str) -> None:
    folder = job.run.path / "checkpoints" / checkpoint
    try:
        job.engine.load(str(folder))
    except BadModel as error:
        raise BadRun(
            f"checkpoint '{folder}' is damaged: {error}; put it back, or remove that folder and --resume"
        ) from error


def _measurements(job: _Job, step: int) -> int:
    """How many lines of evaluations.jsonl are older than `step`."""
    before = bool(spread(job.tasks, job.recipe.evaluate_tasks)) + bool(job.heldout)
    during = sum(_due(job.recipe, earlier) for earlier in range(step)) if job.validation else 0
    return during + (before if step else 0)


def _step(job: _Job, step: int) -> None:
    """One step: rollout, select, credit, rows, update, record."""
    recipe, seconds, counts = job.recipe, {}, _counters(job.environment)
    numbers = drawn(len(job.tasks), recipe.tasks_per_step, seed=recipe.seed, step=step)
    groups = rollout(
        [job.tasks[number] for number in numbers],
        job.engine,
        environment=job.environment,
        context=recipe.context,
        max_turns=recipe.max_turns,
        group_size=recipe.group_size,
        sampling=job.sampling,
        step=step,
        workers=job.workers,
        seconds=seconds,
    )
    refuse_nothing(groups)
    keeps = [recipe.select(group) for group in groups]
    advantages = [recipe.credit(group, keep) for group, keep in zip(groups, keeps, strict=True)]
    batch: list[Sample] = []
    for index, (group, values, keep) in enumerate(zip(groups, advantages, keeps, strict=True)):
        # a task that is drawn twice is two groups: its trajectories go on counting
        earlier = sum(other.task == group.task for other in groups[:index])
        batch += rows(group, values, keep, first=earlier * recipe.group_size)
    with _measured(seconds, "update"):
        updates = _update(job, batch, step)
    seen = measure.step_numbers(groups, advantages, turns=recipe.max_turns)
    line = {"step": step, "policy": job.engine.policy, **updates, "rows": len(batch), **seen}
    job.run.append(
        store.GROUPS, [store.group_line(step, *entry) for entry in zip(groups, keeps, advantages, strict=True)]
    )
    job.run.append(store.METRICS, [line])
    counted = {name: value - counts.get(name, 0) for name, value in _counters(job.environment).items()}
    job.run.append(store.TIMINGS, [{"step": step, "seconds": seconds, "counters": counted}])
    job.tell("step", step, {**line, "seconds": seconds, "counters": counted})


def _update(job: _Job, batch: Sequence[Sample], step: int) -> dict[str, float]:
    """The optimiser steps on a batch; metrics are means over them, but for counts."""
    recipe, optimiser = job.recipe, job.recipe.optimiser
    per_step = optimiser.epochs * optimiser.minibatches
    parts = [
        part
        for epoch in range(optimiser.epochs)
        for part in minibatches(batch, optimiser.minibatches, (recipe.seed, step, epoch))
    ]
    results = [
        job.engine.update(
            recipe.aggregate(part),
            recipe.loss,
            optimiser,
            lr_scale=lr_scale(optimiser, update=(step - 1) * per_step + index, updates=recipe.steps * per_step),
            temperature=recipe.sampling.temperature,
        )
        for index, part in enumerate(parts)
    ]
    names = sorted({name for result in results for name in result})
    means = {name: sum(result.get(name, 0.0) for result in results) / len(results) for name in names}
    return {**means, "updates": len(results)}


def _measure(job: _Job, phase: str, name: str, tasks: Sequence[Task], step: int) -> None:
    """One line of evaluations.jsonl, unless it is there already."""
    recorded = {(line["phase"], line["set"]) for line in store.evaluations(job.run.path) if line["step"] == step}
    if not tasks or (phase, name) in recorded:
        return
    job.tell("evaluating", step, {"phase": phase, "set": name, "tasks": len(tasks)})
    numbers = evaluate_policy(
        job.engine,
        tasks,
        environment=job.environment,
        context=job.recipe.context,
        turns=job.recipe.max_turns,
        samples=job.recipe.evaluate_samples,
        sampling=job.sampling,
        workers=job.workers,
    )
    line = {"step": step, "phase": phase, "set": name, "policy": job.engine.policy, **numbers}
    job.run.append(store.EVALUATIONS, [line])
    job.tell("evaluated", step, line)


def _due(recipe: Recipe, step: int) -> bool:
    """Whether the validation tasks are measured after this step: before the first, after the last, and in between."""
    every = recipe.evaluate_every
    return bool(every) and (step % every == 0 or step == recipe.steps)


def _best_step(job: _Job) -> int | None:
    """The step whose policy did best on the validation tasks, the earliest among equals."""
    lines = [line for line in store.evaluations(job.run.path) if line["set"] == "validation"]
    return max(lines, key=measure.mean_score)["step"] if lines else None


def _keep_best(job: _Job) -> None:
    best = _best_step(job)
    if best is not None:
        job.run.keep_best(best)


def _path(recipe: Recipe, out: str | Path | None, *, resume: bool) -> Path:
    if out is not None:
        return Path(out)
    numbers = [
        int(found) for run in Path("runs").glob(f"{recipe.name}-*") if (found := run.name.rpartition("-")[2]).isdigit()
    ]
    if resume and not numbers:
        raise BadRun(f"there is no run 'runs/{recipe.name}-N' to continue; name its directory with --out")
    return Path("runs") / f"{recipe.name}-{max(numbers, default=0) + (0 if resume else 1)}"


def _tasks(spec: str | None, given: Sequence[Task] | None) -> Sequence[Task]:
    if given is not None:
        return given
    return load(spec) if spec else ()


def _counters(environment: Any) -> dict[str, int]:
    return dict(environment.counters()) if hasattr(environment, "counters") else {}


def _ignore(event: Event) -> None:
    del event


@contextmanager
def _measured(seconds: MutableMapping[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
