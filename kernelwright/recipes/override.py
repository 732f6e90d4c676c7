"""Reading and changing a recipe by dotted keys: what `recipes NAME` prints and what `--set` takes.

A key is a path through fields and through the keyword arguments of the functions in the slots:

    optimiser.lr=1e-4                a field of a record
    credit.gamma=0.9                 a keyword of the function in the slot `credit`
    environment.reward.cap=3         a keyword of a function that is itself an argument
    context=window                   another function of the same module that takes the same arguments
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import msgspec

from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Recipe

# how other languages write constants of Python ("none" is a choice of several knobs)
_WORDS = {"true": "True", "false": "False", "null": "None"}


def knobs(recipe: Recipe) -> dict[str, Any]:
    """Every dotted key of a recipe with its value, in the order of the record; a function's value is its name."""
    found: dict[str, Any] = {}
    for field in fields(recipe):
        _collect(field.name, getattr(recipe, field.name), found)
    return found


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with `key=value` settings applied, left to right.

    Raises:
        UserError: no `=`, a value of the wrong type, or one that the record refuses.
        UnknownName: a key that does not exist; the message names the nearest.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set: got '{setting}', expected key=value, such as optimiser.lr=1e-4")
        recipe = _assign(recipe, key.strip().split("."), text.strip(), key.strip())
    return recipe


def bound(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A slot's function without `partial`, and the keyword arguments that are bound to it."""
    if isinstance(function, partial):
        return function.func, dict(function.keywords)
    return function, {}


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """All keyword-only arguments of a slot's function with the values they have: bound ones and defaults."""
    plain, keywords = bound(function)
    return {
        name: keywords.get(name, parameter.default)
        for name, parameter in inspect.signature(plain).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _collect(key: str, value: Any, found: dict[str, Any]) -> None:
    if is_dataclass(value):
        for field in fields(value):
            _collect(f"{key}.{field.name}", getattr(value, field.name), found)
    elif callable(value):
        found[key] = bound(value)[0].__name__
        hints = typing.get_type_hints(bound(value)[0])
        for name, argument in arguments(value).items():
            # an argument such as a tensor is the engine's to give, not a knob
            if callable(argument) or _is_plain(hints[name]):
                _collect(f"{key}.{name}", argument, found)
    else:
        found[key] = value


def _assign(target: Any, path: list[str], text: str, key: str) -> Any:
    """`target` with the value at `path` replaced."""
    if is_dataclass(target):
        children = {field.name: getattr(target, field.name) for field in fields(target)}
        hints = typing.get_type_hints(type(target))
    elif callable(target):
        children, hints = arguments(target), typing.get_type_hints(bound(target)[0])
    else:
        raise UserError(f"--set: '{key}' goes too deep; {type(target).__name__} values have no parts")
    name, *rest = path
    if name not in children:
        raise UnknownName("--set key", key, _siblings(key, path, children))
    value = _assign(children[name], rest, text, key) if rest else _value(text, hints[name], children[name], key)
    if callable(target):
        plain, keywords = bound(target)
        return partial(plain, **{**keywords, name: value})
    try:
        return replace(target, **{name: value})
    except ValueError as error:
        raise UserError(f"--set {key}={text}: {error}") from None


def _siblings(key: str, path: list[str], children: dict[str, Any]) -> list[str]:
    prefix = key[: len(key) - len(".".join(path))]
    return [prefix + name for name in children]


def _value(text: str, hint: Any, present: Any, key: str) -> Any:
    """`text` as a Python literal, or as it is where it is none, checked against the annotation."""
    if callable(present):
        return _function(text, present, key)
    try:
        value = ast.literal_eval(_WORDS.get(text, text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise UserError(f"--set {key}: got {value!r}, expected {_type_name(hint)}") from None
    except TypeError:
        raise UserError(f"--set {key}: a {_type_name(hint)} cannot be given on the command line") from None


def _function(name: str, present: Callable[..., Any], key: str) -> Callable[..., Any]:
    """The function called `name` beside `present`, with those of its arguments that both have."""
    plain, keywords = bound(present)
    known = _alternatives(plain)
    if name not in known:
        raise UnknownName(f"function for '{key}'", name, known)
    shared = arguments(known[name])
    return partial(known[name], **{key: value for key, value in keywords.items() if key in shared})


def _alternatives(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The public functions of the same module that are called in the same way."""
    module = sys.modules[function.__module__]
    return {
        name: other
        for name, other in vars(module).items()
        if inspect.isfunction(other)
        and not name.startswith("_")
        and other.__module__ == module.__name__
        and _positional(other) == _positional(function)
    }


def _positional(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def _is_plain(hint: Any) -> bool:
    """Whether values of this type can be written on a command line."""
    kind = msgspec.inspect.type_info(hint)
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return not any(isinstance(one, msgspec.inspect.CustomType) for one in kinds)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
