"""The training loop on a scripted policy: schedules, records, and going on after any end."""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from runs import GuessEpisode, guess_recipe, guess_task, guessing, learner, run_files

from kernelwright import store
from kernelwright.engines.scripted import ScriptedEngine
from kernelwright.errors import BadRun, InfrastructureError, UserError
from kernelwright.samples import rows, weighted
from kernelwright.train import Event, drawn, evaluate_policy, lr_scale, spread, train
from kernelwright.types import Message, Optimiser, Recipe, Sampling, Task

TASKS = [guess_task(number) for number in range(5)]


def run(recipe: Recipe, out: Path, **changes: object) -> Path:
    values = {"engine": learner(), "tasks": TASKS, "validation": TASKS[:2], "heldout": TASKS[2:], **changes}
    return train(recipe, out=out, **values)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what a step is made of


def test_tasks_are_drawn_in_epochs() -> None:
    steps = [drawn(5, 3, seed=1, step=step) for step in range(1, 11)]
    flat = list(itertools.chain(*steps))
    epochs = [flat[start : start + 5] for start in range(0, 30, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1, "every epoch has the same order"
    assert steps == [drawn(5, 3, seed=1, step=step) for step in range(1, 11)]
    assert steps != [drawn(5, 3, seed=2, step=step) for step in range(1, 11)]


def test_more_tasks_a_step_than_there_are() -> None:
    assert collections.Counter(drawn(2, 5, seed=0, step=1)) in ({0: 3, 1: 2}, {0: 2, 1: 3})


def test_learning_rate() -> None:
    linear = Optimiser(schedule="linear")
    assert [lr_scale(linear, update=update, updates=4) for update in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [lr_scale(Optimiser(), update=update, updates=4) for update in range(4)] == [1.0] * 4
    warm = Optimiser(schedule="linear", warmup=2)
    assert [lr_scale(warm, update=update, updates=4) for update in range(4)] == [0.5, 0.75, 0.5, 0.25]


def test_the_rows_of_an_update_are_the_recorded_groups(tmp_path: Path) -> None:
    """What the engine got is what groups.jsonl says, cut into minibatches and weighted there."""
    engine = learner()
    recipe = guess_recipe(steps=2)
    run(recipe, tmp_path, engine=engine)
    lines = list(store.groups(tmp_path))
    assert [line.step for line in lines] == [1, 1, 2, 2]
    for step, updates in ((1, engine.updated[:2]), (2, engine.updated[2:])):
        expected = [
            row for line in lines if line.step == step for row in rows(line.group, store.advantages_of(line), line.keep)
        ]
        got = [row for part in updates for row in part]
        assert sorted(row.origin for row in got) == sorted(row.origin for row in expected)
        for part in updates:
            tokens = sum(sum(row.mask) for row in part)
            assert sum(sum(row.weights) for row in part) == pytest.approx(1.0)
            plain = [row for row in expected if row.origin in {one.origin for one in part}]
            assert sorted(weighted(plain), key=lambda row: row.origin) == sorted(part, key=lambda row: row.origin)
            assert tokens > 0


def test_a_task_drawn_twice_is_two_groups(tmp_path: Path) -> None:
    engine = learner()
    run(guess_recipe(steps=1, tasks_per_step=4, max_turns=1), tmp_path, engine=engine, tasks=TASKS[:2])
    origins = sorted(row.origin for part in engine.updated for row in part)
    assert origins == [(task, member, 0) for task in ("guess/0", "guess/1") for member in range(4)]


def test_the_rows_of_an_update_have_the_weights_of_the_recipe(tmp_path: Path) -> None:
    engine = learner()
    aggregate = partial(weighted, mode="constant", constant=80.0)
    run(guess_recipe(steps=1, aggregate=aggregate, optimiser=Optimiser(minibatches=1)), tmp_path, engine=engine)
    [part] = engine.updated
    assert {weight for row in part for weight, on in zip(row.weights, row.mask, strict=True) if on} == {1 / (4 * 80)}


# ---------------------------------------------------------------- records


def test_every_step_and_measurement_is_recorded(tmp_path: Path) -> None:
    events: list[Event] = []
    run(guess_recipe(), tmp_path, progress=events.append)
    metrics = store.metrics(tmp_path)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["policy"] for line in metrics] == [2, 4, 6, 8]
    measured = [(line["phase"], line["set"], line["step"]) for line in store.evaluations(tmp_path)]
    # the learner is best at step 2 and worse again afterwards
    assert measured == [
        ("before", "heldout", 0),
        ("before", "validation", 0),
        ("during", "validation", 2),
        ("during", "validation", 4),
        ("after", "heldout", 2),
    ]
    assert [(event.kind, event.step) for event in events if event.kind in ("step", "start", "finish")] == [
        ("start", 0),
        *(("step", step) for step in range(1, 5)),
        ("finish", 4),
    ]
    assert events[-1].data["best"] == 2
    assert "seconds" not in metrics[0] and set(store.timings(tmp_path)[0]["seconds"]) == {"sample", "judge", "update"}


def test_the_best_policy_is_left_in_the_engine_and_on_disk(tmp_path: Path) -> None:
    engine = learner()
    run(guess_recipe(), tmp_path, engine=engine)
    assert engine.policy == 4
    assert json.loads((tmp_path / "checkpoints" / "best" / "scripted.json").read_text()) == {"policy": 4}
    before, after = (line for line in store.evaluations(tmp_path) if line["set"] == "heldout")
    assert after["avg"]["score"] > before["avg"]["score"]


def test_without_validation_the_last_policy_is_measured(tmp_path: Path) -> None:
    engine = learner()
    run(guess_recipe(evaluate_every=0), tmp_path, engine=engine)
    assert engine.policy == 8
    assert [(line["phase"], line["step"]) for line in store.evaluations(tmp_path)] == [("before", 0), ("after", 4)]
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_no_step_is_a_measurement(tmp_path: Path) -> None:
    run(guess_recipe(steps=0), tmp_path)
    assert store.metrics(tmp_path) == []
    assert [line["phase"] for line in store.evaluations(tmp_path)] == ["before", "before", "after"]


def test_equal_runs_have_equal_files_and_other_seeds_others(tmp_path: Path) -> None:
    files = [run_files(run(guess_recipe(seed=seed), tmp_path / name)) for seed, name in ((0, "a"), (0, "b"), (1, "c"))]
    assert files[0] == files[1]
    assert files[0][store.GROUPS] != files[2][store.GROUPS]


def test_measuring_meets_the_same_luck_each_time() -> None:
    with guessing() as environment:
        results = [
            evaluate_policy(
                learner(),
                TASKS,
                environment=environment,
                context=guess_recipe().context,
                turns=2,
                samples=3,
                sampling=Sampling(max_tokens=80, budget=1000),
            )
            for _ in range(2)
        ]
    assert results[0] == results[1]
    assert (results[0]["tasks"], results[0]["samples"], len(results[0]["turns"])) == (5, 3, 2)
    assert 0 < results[0]["avg"]["correct"] <= results[0]["best"]["correct"] <= 1


# ---------------------------------------------------------------- ends


class _Stopped(BaseException):
    """As sudden as Ctrl-C."""


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("count", range(11))
def test_a_stopped_run_goes_on_to_the_same_files(tmp_path: Path, count: int, every: int) -> None:
    recipe = guess_recipe(steps=5, checkpoint_every=every)
    whole = run_files(run(recipe, tmp_path / "whole"))
    left = count

    def stop(event: Event) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Stopped

    with pytest.raises(_Stopped):
        run(recipe, tmp_path / "run", progress=stop)
    assert run_files(run(recipe, tmp_path / "run", resume=True)) == whole


def test_a_finished_run_is_not_measured_again(tmp_path: Path) -> None:
    run(guess_recipe(), tmp_path)
    files = run_files(tmp_path)
    engine = learner()
    run(guess_recipe(), tmp_path, resume=True, engine=engine)
    assert run_files(tmp_path) == files
    assert engine.seen == [] and engine.policy == 4


@pytest.mark.parametrize("name", [store.METRICS, store.TIMINGS, store.GROUPS, store.EVALUATIONS])
def test_a_finished_run_whose_file_is_cut_at_any_byte(tmp_path: Path, name: str) -> None:
    """It goes on from a checkpoint that no file falls short of, or says that there is none and touches nothing."""
    whole = run_files(run(guess_recipe(), tmp_path / "whole"))
    size = (tmp_path / "whole" / name).stat().st_size
    refused = 0
    for cut in {*range(0, size, size // 40 + 1), size - 1, size}:
        again = tmp_path / str(cut)
        shutil.copytree(tmp_path / "whole", again)
        os.truncate(again / name, cut)
        before = run_files(again)
        line = ""
        try:
            run(guess_recipe(), again, resume=True)
        except BadRun as error:
            line = str(error)
            refused += 1
        assert not line or ("lost lines" in line and "\n" not in line)
        assert run_files(again) == (before if line else whole)
    assert 10 < refused < 40


def test_a_run_without_checkpoints_keeps_its_lines(tmp_path: Path) -> None:
    run(guess_recipe(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(BadRun, match="has 4 steps but no checkpoint"):
        run(guess_recipe(), tmp_path, resume=True)
    assert len(store.metrics(tmp_path)) == 4


def test_a_best_checkpoint_that_is_gone_is_said(tmp_path: Path) -> None:
    run(guess_recipe(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    with pytest.raises(BadRun, match=r"best' should hold step 2"):
        run(guess_recipe(), tmp_path, resume=True)


def test_tasks_that_are_none_leave_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nosuch"):
        run(guess_recipe(heldout="nosuch"), tmp_path / "run", heldout=None)
    assert not (tmp_path / "run").exists()


def test_a_measurement_in_which_nothing_was_judged_is_no_zero(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="the worker is gone"):
        run(guess_recipe(environment=partial(broken_environment)), tmp_path, validation=())
    assert store.evaluations(tmp_path) == []


def test_sigkill_at_any_file_operation(tmp_path: Path) -> None:
    """A process that is killed in the middle of its work on the disk, many times, at another place each time."""
    script = Path(__file__).parent / "kill_train.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout)
    assert kills["killed"] >= 20
    assert kills["different"] == []


# ---------------------------------------------------------------- mistakes


def test_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got no tasks"):
        run(guess_recipe(), tmp_path, tasks=[])
    assert not list(tmp_path.iterdir())


def test_an_opening_too_long_for_the_budget_is_said(tmp_path: Path) -> None:
    recipe = guess_recipe(sampling=Sampling(max_tokens=80, budget=85))
    with pytest.raises(UserError, match=r"does not fit.*raise sampling\.budget"):
        run(recipe, tmp_path, heldout=(), validation=())


@contextmanager
def broken_environment() -> Iterator[object]:
    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        return (Message(role="user", content="Guess."),), GuessEpisode(task, scale=1.0, broken=True)

    yield environment


def test_a_step_in_which_nothing_was_judged_is_an_error(tmp_path: Path) -> None:
    recipe = guess_recipe(environment=partial(broken_environment))
    with pytest.raises(InfrastructureError, match="the worker is gone"):
        run(recipe, tmp_path, heldout=(), validation=())
    assert store.metrics(tmp_path) == []


def test_directories_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = guess_recipe(steps=0)
    with pytest.raises(BadRun, match="--out"):
        train(recipe, engine=learner(), tasks=TASKS, resume=True)
    paths = [train(recipe, engine=learner(), tasks=TASKS) for _ in range(2)]
    assert paths == [Path("runs/guess-1"), Path("runs/guess-2")]
    assert train(recipe, engine=learner(), tasks=TASKS, resume=True) == Path("runs/guess-2")
    assert isinstance(learner(), ScriptedEngine)


def test_a_spread_of_the_training_tasks_is_measured_before_and_after(tmp_path: Path) -> None:
    run(guess_recipe(steps=1, evaluate_tasks=2), tmp_path, engine=learner(), tasks=TASKS, validation=(), heldout=())
    measured = [(line["phase"], line["set"], line["tasks"]) for line in store.evaluations(tmp_path)]
    assert measured == [("before", "train", 2), ("after", "train", 2)]
    assert spread(TASKS[:5], 2) == [TASKS[0], TASKS[2]]
    assert spread(TASKS[:2], 7) == TASKS[:2]
