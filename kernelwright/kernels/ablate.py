"""The reference with one step left out: what a candidate computes that forgot the step.

Works on the syntax tree of `Model.forward`; runs in the trusted parent, only after a candidate was wrong.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import numpy as np
import torch

from kernelwright.errors import BadTask
from kernelwright.kernels.check import compare
from kernelwright.kernels.reference import Case, Reference

# names that stand for libraries, so that `torch.exp(x)` is a step on `x` and `x.exp()` is one too
_LIBRARIES = {"torch", "F", "nn", "math", "self", "np"}


def explain(reference: Reference, case: Case, got: np.ndarray) -> str:
    """`"the result equals the reference without line ..."`, or an empty text when no left-out step explains `got`."""
    task = reference.task
    for text, output in _outputs(reference, case):
        if output.shape == got.shape:
            comparison = compare(got, output, rtol=task.rtol, atol=task.atol, magnitude=case.magnitude)
            if comparison.ok:
                return f"the result equals the reference {text}"
    return ""


def variants(source: str) -> Iterator[tuple[str, str]]:
    """Every changed source with the words for its change: each operation skipped, then each early end of `forward`."""
    tree = ast.parse(source)
    forward = _forward(tree)
    if forward is None:
        return
    for position, statement in enumerate(forward.body):
        for path, node in _operations(statement):
            changed = copy.deepcopy(tree)
            target = _forward(changed)
            assert target is not None
            _replace(target.body[position], path)
            whole = isinstance(statement, ast.Assign) and statement.value is node
            words = f"line `{ast.unparse(statement)}`" if whole else f"`{ast.unparse(node)}`"
            yield f"without {words}", ast.unparse(changed)
    for position, statement in enumerate(forward.body[:-1]):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            changed = copy.deepcopy(tree)
            target = _forward(changed)
            assert target is not None
            target.body[position + 1 :] = [ast.Return(value=ast.Name(id=statement.targets[0].id, ctx=ast.Load()))]
            ast.fix_missing_locations(changed)
            yield f"stopped after line `{ast.unparse(statement)}`", ast.unparse(changed)


def _outputs(reference: Reference, case: Case) -> list[tuple[str, np.ndarray]]:
    """Outputs of all variants that run and that differ from the expected output."""

    def make() -> list[tuple[str, np.ndarray]]:
        found = []
        task = reference.task
        values = reference.values(case.sizes, case.distribution, case.draw)
        for text, source in variants(task.reference):
            try:
                model = reference.changed_model(source)
                output = reference.forward(values, dtype=torch.float64, model=model).contiguous().numpy()
            except BadTask:  # a step that cannot be left out, because shapes no longer fit
                continue
            same = output.shape == case.expected.shape and (
                compare(output, case.expected, rtol=task.rtol, atol=task.atol, magnitude=case.magnitude).ok
            )
            if not same:
                found.append((text, output))
        return found

    return reference.cached(f"ablations {case.draw} {case.sizes}", make)


def _forward(tree: ast.Module) -> ast.FunctionDef | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Model":
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "forward":
                    return member
    return None


_Path = tuple[tuple[str, int | None], ...]


def _operations(node: ast.AST, path: _Path = ()) -> Iterator[tuple[_Path, ast.expr]]:
    """Operations below a node, outermost first, each with the fields that lead to it."""
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or name in ("targets", "keywords"):
                continue
            step = (*path, (name, index))
            if isinstance(child, ast.expr) and _operand(child) is not None:
                yield step, child
            yield from _operations(child, step)


def _operand(node: ast.expr) -> ast.expr | None:
    """What is left when the operation is skipped; None if the node is no operation."""
    if isinstance(node, ast.BinOp):
        return node.right if isinstance(node.left, ast.Constant) else node.left
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        return node.operand
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        root = owner
        while isinstance(root, ast.Attribute):
            root = root.value
        if owner is not None and not (isinstance(root, ast.Name) and root.id in _LIBRARIES):
            return owner
        return node.args[0] if node.args else None
    return None


def _replace(statement: ast.stmt, path: _Path) -> None:
    """Put the operand in the place of the operation at the end of the path."""
    parent: ast.AST = statement
    for name, index in path[:-1]:
        value = getattr(parent, name)
        parent = value if index is None else value[index]
    name, index = path[-1]
    value = getattr(parent, name)
    if index is None:
        setattr(parent, name, _operand(value))
    else:
        value[index] = _operand(value[index])
