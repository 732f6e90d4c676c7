"""The shape of the code, as CONTRIBUTING.md promises it: one direction of imports, small files, small functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kernelwright"

# first part of the module name below `kernelwright` -> layer
LAYERS = {
    "types": 0,
    "errors": 0,
    "prompts": 1,
    "feedback": 1,
    "reward": 1,
    "context": 1,
    "select": 1,
    "credit": 1,
    "samples": 1,
    "loss": 1,
    "chat": 1,
    "measure": 1,
    "store": 1,
    "tasks": 1,
    "kernels": 1,
    "engines": 2,
    "environments": 2,
    "rollout": 3,
    "train": 4,
    "recipes": 5,
    "starter": 5,
    "report": 6,
    "cli": 7,
}
# modules in which no word of the domain may stand: what is trained on reaches them as an argument
BLIND = ("rollout.py", "train.py", "samples.py", "credit.py")
# all records stand in one file, so that it can be read beside any other
LONG = {"types.py": 550}
FILES = sorted(PACKAGE.rglob("*.py"))


def _names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(params=FILES, ids=_names)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def _part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            # `from kernelwright import credit` imports a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_down(file: Path) -> None:
    part = _part(file)
    if part == "__init__":
        return
    for name in _imports(ast.parse(file.read_text())):
        words = name.split(".")
        if words[0] != "kernelwright":
            continue
        other = words[1]
        assert other in LAYERS, f"{name} is in no layer"
        assert other == part or LAYERS[other] < LAYERS[part], f"{part} (layer {LAYERS[part]}) imports {name}"


def test_every_module_has_a_layer() -> None:
    assert {_part(file) for file in FILES} - {"__init__"} <= set(LAYERS)


def test_files_and_functions_are_small(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= LONG.get(file.name, 400)
    for name, lines in _functions(ast.parse(text)):
        assert lines <= 60, f"{name} has {lines} lines"


def test_nine_functions_in_ten_are_short() -> None:
    lengths = [lines for file in FILES for _, lines in _functions(ast.parse(file.read_text()))]
    assert sum(lines < 35 for lines in lengths) >= 0.9 * len(lengths)


def _functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, without its docstring: what it does is short, what it promises may be long."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            told = node.body[0] if ast.get_docstring(node) else None
            docstring = (told.end_lineno or 0) - told.lineno + 1 if told else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def test_no_drawer_for_everything() -> None:
    assert [_names(file) for file in FILES if file.stem in ("utils", "util", "helpers", "misc", "common")] == []


@pytest.mark.parametrize("name", BLIND)
def test_the_trainer_is_blind(name: str) -> None:
    text = (PACKAGE / name).read_text().lower()
    code = ast.unparse(ast.parse(text))
    found = {word for word in ("compile", "cuda", "triton", "gcc") if word in code.replace("re.compile", "")}
    assert found == set()


def test_no_test_patches_a_module() -> None:
    for file in (ROOT / "tests").rglob("*.py"):
        for name in _imports(ast.parse(file.read_text())):
            assert not name.startswith("unittest.mock"), _names(file)


def test_catching_everything_is_rare() -> None:
    bare = [
        _names(file)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []
