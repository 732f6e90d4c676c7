"""Recipes as JSON and back: functions become their names and the arguments that are bound to them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import msgspec

from kernelwright.errors import UserError
from kernelwright.types import Optimiser, Recipe, Sampling


def describe(value: Any) -> Any:
    """A recipe, or any part of one, as JSON data: functions and partials become `{"function": ..., "arguments": ...}`.

    Raises:
        UserError: a function that cannot be found again by its name, or a value that JSON has no form for.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, partial):
        if value.args:
            raise UserError(f"a recipe binds arguments by keyword, got partial({value.func.__name__}, *{value.args})")
        return {"function": _name(value.func), "arguments": describe(value.keywords)}
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(entry) for entry in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return {"function": _name(value), "arguments": {}}
    raise UserError(f"a recipe holds functions, numbers and text, got {value!r}")


def restore(data: Mapping[str, Any]) -> Recipe:
    """The recipe that `describe` turned into `data`.

    Raises:
        UserError: a function that does not exist any more, or fields that are not a recipe's.
    """
    values = {key: _restored(value) for key, value in data.items()}
    try:
        values["sampling"] = msgspec.convert(values["sampling"], Sampling)
        values["optimiser"] = msgspec.convert(values["optimiser"], Optimiser)
        return Recipe(**values)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise UserError(f"this is no recipe of this version: {error}") from error


def _name(function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<lambda>")
    if "<" in name or "." in name or module == "__main__":
        raise UserError(f"a recipe holds functions of a module, got {module}.{name}; move it to one, bind with partial")
    return f"{module}.{name}"


def _restored(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) != {"function", "arguments"}:
            return {key: _restored(entry) for key, entry in value.items()}
        module, _, name = value["function"].rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"the recipe's function '{value['function']}' does not exist here: {error}") from error
        return partial(function, **_restored(value["arguments"]))
    return [_restored(entry) for entry in value] if isinstance(value, list) else value
