"""Recipes are what their papers say, and every knob can be read and set."""

from __future__ import annotations

from functools import partial

import pytest

from kernelwright import context, credit, reward, store
from kernelwright.errors import UnknownName, UserError
from kernelwright.recipes import RECIPES, on_starter, recipe
from kernelwright.recipes.override import arguments, bound, knobs, override
from kernelwright.recipes.rehearsal import rehearse

EVERY = pytest.mark.parametrize("name", RECIPES)


@EVERY
def test_a_recipe_is_called_what_it_is_filed_under(name: str) -> None:
    assert RECIPES[name]().name == name
    assert "arXiv" in RECIPES[name]().paper


@EVERY
def test_a_recipe_survives_its_run_directory(name: str) -> None:
    made = RECIPES[name]()
    again = store.restore(store.describe(made))
    assert knobs(again) == knobs(made)
    assert store.describe(again) == store.describe(made)


@EVERY
def test_a_recipe_passes_its_rehearsal_at_both_sizes(name: str) -> None:
    rehearse(RECIPES[name]())
    rehearse(on_starter(RECIPES[name]()))


def test_kevin_has_the_published_numbers() -> None:
    kevin = knobs(recipe("kevin"))
    published = {
        "tasks_per_step": 8,
        "group_size": 16,
        "max_turns": 4,
        "sampling.temperature": 0.9,
        "sampling.max_tokens": 16_384,
        "environment.reward.correct": 0.3,
        "environment.reward.cap": None,
        "loss.low": 0.2,
        "loss.high": 0.28,
        "loss.kl": "none",
        "aggregate.mode": "constant",
        "aggregate.constant": 16_384.0,
        "aggregate.unit": "row",
        "optimiser.clip": 0.05,
        "optimiser.minibatches": 2,
        "steps": 40,
        "context": "digest",
    }
    assert {key: kevin[key] for key in published} == published


@pytest.mark.parametrize("name", ["kevin", "grpo", "rloo", "dr_grpo"])
def test_credit_is_the_named_estimator(name: str) -> None:
    assert arguments(recipe(name).credit) == arguments(credit.PRESETS[name])


def test_single_turn_recipes_ask_for_as_many_kernels_as_the_quickstart() -> None:
    kernels = {name: RECIPES[name]() for name in ("quickstart", "grpo", "rloo", "dr_grpo")}
    counts = {name: one.tasks_per_step * one.group_size * one.max_turns for name, one in kernels.items()}
    assert set(counts.values()) == {288}


def test_on_starter_changes_the_size_alone() -> None:
    full, small = knobs(recipe("kevin")), knobs(on_starter(recipe("kevin")))
    changed = {key for key in full if full[key] != small[key]}
    size = {"model", "sampling.max_tokens", "sampling.budget", "optimiser.lr", "optimiser.schedule", "evaluate_samples"}
    assert changed == size


# ---------------------------------------------------------------- --set


def test_every_kind_of_key_can_be_set() -> None:
    made = override(
        recipe("quickstart"),
        [
            "steps=3",
            "optimiser.lr=1e-3",
            "credit.gamma=0.9",
            "environment.reward.cap=None",
            "optimiser.betas=(0.8, 0.9)",
        ],
    )
    shown = knobs(made)
    assert (shown["steps"], shown["optimiser.lr"], shown["credit.gamma"]) == (3, 1e-3, 0.9)
    assert (shown["environment.reward.cap"], shown["optimiser.betas"]) == (None, (0.8, 0.9))


def test_every_shown_knob_can_be_set_to_itself() -> None:
    quickstart = recipe("quickstart")
    settings = [f"{key}={value}" for key, value in knobs(quickstart).items()]
    assert knobs(override(quickstart, settings)) == knobs(quickstart)


def test_a_slot_takes_another_function_and_keeps_shared_arguments() -> None:
    made = override(recipe("kevin"), ["context.instruction=Again.", "context=window", "context.k=2"])
    function, keywords = bound(made.context)
    assert function is context.window
    assert keywords == {"keep_best": False, "instruction": "Again.", "k": 2}


def test_a_reward_is_exchanged_without_arguments_it_lacks() -> None:
    made = override(recipe("quickstart"), ["environment.reward=correctness"])
    assert bound(arguments(made.environment)["reward"]) == (reward.correctness, {})


def test_override_leaves_the_recipe_alone() -> None:
    before = recipe("quickstart")
    shown = knobs(before)
    override(before, ["credit.gamma=0.9", "sampling.temperature=0.5"])
    assert knobs(before) == shown
    assert isinstance(before.credit, partial)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("credit.gama=1", "unknown --set key 'credit.gama'; did you mean 'credit.gamma'"),
        ("stepz=1", "did you mean 'steps'"),
        ("optimiser.lr.x=1", "goes too deep"),
        ("steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("steps=many", "got 'many', expected int"),
        ("steps=1.5", "got 1.5, expected int"),
        ("credit.scale=sdt", "expected one of 'none', 'std'"),
        ("steps=-1", "steps at least 0"),
        ("sampling.budget=10", "max_tokens < budget"),
        ("context=windw", "unknown function for 'context' 'windw'; did you mean 'window'"),
        ("context=history", "unknown function for 'context' 'history'"),
        ("loss.reference=1", "loss.reference"),
    ],
)
def test_a_bad_setting_is_one_line_that_helps(setting: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        override(recipe("quickstart"), [setting])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("credit.gamma=7", "discount"),
        ("aggregate.mode=constant", "constant"),
        ("loss.low=-1", "low"),
        ("environment.reward.cap=-1", "cap"),
        ("group_size=1", "group_size >= 2"),
        ("credit.part=sped", "did you mean 'speed'"),
        ("sampling.temperature=0", "expected more than 0"),
    ],
)
def test_a_knob_out_of_range_fails_in_the_rehearsal(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rehearse(override(recipe("quickstart"), [setting]))


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'quickstart'"):
        recipe("quikstart")


@pytest.mark.parametrize(("text", "value"), [("false", False), ("False", False), ("true", True)])
def test_truth_may_be_written_in_small_letters(text: str, value: bool) -> None:
    assert knobs(override(recipe("quickstart"), [f"environment.timing={text}"]))["environment.timing"] is value


def test_nothing_may_be_written_as_null() -> None:
    assert override(recipe("quickstart"), ["heldout=null"]).heldout is None
