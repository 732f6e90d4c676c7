"""The run directory: recipes as JSON, kills at any byte, and errors that a user can act on."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from runs import GuessEpisode, guess_recipe, guess_task, reply

from kernelwright import store
from kernelwright.context import full, window
from kernelwright.engines.scripted import ScriptedEngine
from kernelwright.errors import BadRun, UserError
from kernelwright.recipes import RECIPES
from kernelwright.reward import kevin
from kernelwright.rollout import rollout
from kernelwright.types import Group, Message, Sampling, Task


def make_group() -> Group:
    def environment(task: Task) -> tuple[tuple[Message, ...], GuessEpisode]:
        return (Message(role="user", content="Guess."),), GuessEpisode(task, scale=1.0)

    return rollout(
        [guess_task(1)],
        ScriptedEngine([reply(1), "é\u2028\n none", reply(0.5)]),
        environment=environment,
        context=full,
        max_turns=2,
        group_size=2,
        sampling=Sampling(max_tokens=80, budget=600),
    )[0]


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_survives_json(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]()
    store.start(tmp_path / "run", recipe).__exit__()
    again = store.recipe(tmp_path / "run")
    assert store.describe(again) == store.describe(recipe)
    assert again.optimiser == recipe.optimiser and again.sampling == recipe.sampling
    assert again.credit.func is recipe.credit.func and again.credit.keywords == recipe.credit.keywords  # type: ignore[attr-defined]


def test_functions_become_names_and_arguments() -> None:
    assert store.describe(partial(window, k=2)) == {"function": "kernelwright.context.window", "arguments": {"k": 2}}
    assert store.describe(full) == {"function": "kernelwright.context.full", "arguments": {}}
    nested = partial(guess_recipe, reward=partial(kevin, cap=2.0))
    assert store.describe(nested)["arguments"] == {
        "reward": {"function": "kernelwright.reward.kevin", "arguments": {"cap": 2.0}}
    }


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(UserError, match="<lambda>"):
        store.describe(guess_recipe(context=lambda opening, turns, fits: None))
    with pytest.raises(UserError, match="by keyword"):
        store.describe(partial(kevin, 1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="<object object"):
        store.describe({"a": object()})


def test_a_function_that_is_gone_is_named() -> None:
    data = store.describe(guess_recipe())
    data["context"]["function"] = "kernelwright.context.vanished"
    with pytest.raises(UserError, match=r"kernelwright\.context\.vanished"):
        store.restore(data)
    with pytest.raises(UserError, match="no recipe of this version"):
        store.restore({**store.describe(guess_recipe()), "colour": 1})


# ---------------------------------------------------------------- lines


def test_groups_are_read_as_they_were_written(tmp_path: Path) -> None:
    group = make_group()
    keep = [[True, False], [True, True]]
    lengths = [[len(turn.completion.tokens) for turn in one.turns] for one in group.trajectories]
    advantages = [[[0.1 + 0.2] * length for length in row] for row in lengths]
    advantages[1][0] = [0.25 * place for place in range(lengths[1][0])]
    with store.start(tmp_path, guess_recipe()) as run:
        run.append(store.GROUPS, [store.group_line(3, group, keep, advantages)])
    [line] = store.groups(tmp_path)
    assert (line.step, line.group, line.keep) == (3, group, keep)
    assert store.advantages_of(line) == advantages
    # a turn whose tokens share a value costs one number
    assert line.advantages[0] == [0.1 + 0.2] * 2


def test_a_kill_at_any_byte_loses_no_whole_line(tmp_path: Path) -> None:
    lines = [{"step": step, "text": 'é\\"{}' * step, "value": 0.1 * step} for step in range(1, 4)]
    with store.start(tmp_path, guess_recipe()) as run:
        run.append(store.METRICS, lines)
        data = (tmp_path / store.METRICS).read_bytes()
        ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
        for size in range(len(data) + 1):
            (tmp_path / store.METRICS).write_bytes(data[:size])
            whole = sum(end <= size for end in ends)
            assert store.metrics(tmp_path) == lines[:whole]
            run.cut(3)
            assert store.metrics(tmp_path) == lines[:whole]
            run.append(store.METRICS, lines[whole:])
            assert (tmp_path / store.METRICS).read_bytes() == data


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()) as run:
        for name in (store.METRICS, store.TIMINGS, store.EVALUATIONS):
            run.append(name, [{"step": step} for step in (0, 1, 1, 2, 3)])
        run.cut(1)
    assert store.metrics(tmp_path) == store.timings(tmp_path) == store.evaluations(tmp_path)
    assert store.metrics(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 1}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()) as run:
        (tmp_path / store.METRICS).write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
        with pytest.raises(BadRun, match=r"line 2 of .*metrics\.jsonl"):
            store.metrics(tmp_path)
        with pytest.raises(BadRun, match=r"metrics\.jsonl"):
            run.cut(3)


def test_nothing_there_is_no_line(tmp_path: Path) -> None:
    assert store.metrics(tmp_path) == store.evaluations(tmp_path) == list(store.groups(tmp_path)) == []


# ---------------------------------------------------------------- checkpoints


def save_text(text: str) -> partial[None]:
    return partial(_save_text, text)


def _save_text(text: str, folder: str) -> None:
    (Path(folder) / "weights").mkdir(exist_ok=True)
    (Path(folder) / "weights" / "file").write_text(text)


def test_the_last_two_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()) as run:
        for step in range(12):
            run.checkpoint(step, save_text(f"weights {step}"))
            if step == 3:
                run.keep_best(3)
        assert store.checkpoints(tmp_path) == [10, 11]
        best = tmp_path / "checkpoints" / "best" / "weights" / "file"
        assert best.read_text() == "weights 3"
        # it is the best already: nothing to copy, though step 3 is gone
        run.keep_best(3)
        run.keep_best(11)
        assert best.read_text() == "weights 11"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["best", "step-10", "step-11"]


def test_a_save_that_fails_leaves_the_old_checkpoints(tmp_path: Path) -> None:
    def fail(folder: str) -> None:
        _save_text("half", folder)
        raise OSError(28, "No space left on device")

    with store.start(tmp_path, guess_recipe()) as run:
        run.checkpoint(1, save_text("one"))
        with pytest.raises(BadRun, match="No space left on device; free some space"):
            run.checkpoint(2, fail)
        # a kill leaves the folder that was being written; it counts for nothing and does not stand in the way
        _save_text_aside = tmp_path / "checkpoints" / ".step-2.new"
        _save_text_aside.mkdir()
        assert store.checkpoints(tmp_path) == [1]
        run.checkpoint(2, save_text("two"))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-1", "step-2"]


def test_a_checkpoint_is_replaced_by_one_of_the_same_step(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()) as run:
        run.checkpoint(1, save_text("old"))
        run.checkpoint(1, save_text("new"))
    assert (tmp_path / "checkpoints" / "step-1" / "weights" / "file").read_text() == "new"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-1"]


# ---------------------------------------------------------------- users' mistakes


def one_line(error: pytest.ExceptionInfo[BadRun]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    store.start(tmp_path, guess_recipe()).__exit__()
    with pytest.raises(BadRun) as error:
        store.start(tmp_path, guess_recipe())
    assert "--resume" in one_line(error)
    store.start(tmp_path, guess_recipe(), resume=True).__exit__()


def test_another_recipe_is_named_by_what_differs(tmp_path: Path) -> None:
    recipe = guess_recipe()
    store.start(tmp_path, recipe).__exit__()
    other = replace(recipe, context=partial(window, k=2), optimiser=replace(recipe.optimiser, lr=0.5), seed=9)
    with pytest.raises(BadRun) as error:
        store.start(tmp_path, other, resume=True)
    message = one_line(error)
    for part in ("context.function", "context.k", "optimiser.lr", "seed"):
        assert part in message
    assert "group_size" not in message


def test_only_one_process_writes(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()):
        with pytest.raises(BadRun) as error:
            store.start(tmp_path, guess_recipe(), resume=True)
        assert "another process" in one_line(error)
    store.start(tmp_path, guess_recipe(), resume=True).__exit__()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadRun) as error:
            store.start(path, guess_recipe())
        assert "--out" in one_line(error) and str(path) in one_line(error)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with store.start(tmp_path, guess_recipe()) as run:
        (tmp_path / store.METRICS).symlink_to("/dev/full")
        with pytest.raises(BadRun) as error:
            run.append(store.METRICS, [{"step": 1}])
        assert "No space left on device; free some space, then continue with --resume" in one_line(error)


def test_a_full_disk_is_told_from_a_library_that_does_not_say_so(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")

    def save(folder: str) -> None:
        try:
            (Path(folder) / "weights").write_bytes(bytes(2**21))
        except OSError as error:
            raise RuntimeError("unexpected pos 131648 vs 131600") from error

    try:
        with store.start(tmp_path, guess_recipe()) as run, pytest.raises(BadRun) as error:
            run.checkpoint(1, save)
        assert "No space left on device" in one_line(error)
        assert store.checkpoints(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_failure_with_room_on_the_disk_is_itself(tmp_path: Path) -> None:
    def save(folder: str) -> None:
        raise RuntimeError(f"a bug, {Path(folder).name}")

    with store.start(tmp_path, guess_recipe()) as run, pytest.raises(RuntimeError, match="a bug"):
        run.checkpoint(1, save)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match=r"no config\.json"):
        store.config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadRun, match="cannot be read"):
        store.config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadRun, match="names no recipe"):
        store.config(tmp_path)
