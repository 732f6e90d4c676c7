"""KernelBench folders: which problems a spec names, and what is told of one that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.errors import BadTask, UserError
from kernelwright.tasks import load

PROBLEM = '''
import torch


class Model(torch.nn.Module):
    """Adds {number}.

    More about it.
    """

    def forward(self, x):
        return x + {number}


def get_inputs():
    return [torch.rand(4096, 4096)]


def get_init_inputs():
    return []
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for level, numbers in (("level1", (1, 2, 10)), ("level2", (1,))):
        folder = tmp_path / "KernelBench" / level
        folder.mkdir(parents=True)
        for number in numbers:
            (folder / f"{number}_Add_a_number_.py").write_text(PROBLEM.format(number=number))
        (folder / "README.md").write_text("no problem")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", ["level1/1", "level1/2", "level1/10", "level2/1"]),
        ("#level1", ["level1/1", "level1/2", "level1/10"]),
        ("#level1,2-10", ["level1/2", "level1/10"]),
        ("#1", ["level1/1", "level2/1"]),
        ("#level2,1,shrink", ["level2/1"]),
    ],
)
def test_a_spec_names_problems_in_order(checkout: Path, options: str, expected: list[str]) -> None:
    for folder in (checkout, checkout / "KernelBench"):
        found = load(f"kernelbench:{folder}{options}")
        assert [task.id for task in found] == [f"kernelbench/{name}_Add_a_number_" for name in expected]
        assert found[0].statement == "Add a number"
        assert ("4096" in found[0].reference) == ("shrink" not in options)


def test_one_level_is_a_folder_too(checkout: Path) -> None:
    found = load(f"kernelbench:{checkout}/KernelBench/level2", small=True)
    assert [task.id for task in found] == ["kernelbench/level2/1_Add_a_number_"]
    assert "4096" not in found[0].reference


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kernelbench:{}/none", "which does not exist"),
        ("kernelbench:{}#level7", "where no problem is left"),
        ("kernelbench:{}#level1,first", "got the option 'first'"),
        ("kernelbench:{}/KernelBench/level1/1_Add_a_number_.py", "which does not exist"),
    ],
)
def test_a_spec_that_names_nothing(checkout: Path, spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(spec.format(checkout))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"x = 1\n", "has no Model and no get_inputs and no get_init_inputs"),
        (b"import nothing_of_that_name\n", "does not import: ModuleNotFoundError"),
        (b"x = 1\n" * 200_000, "of 1200000 bytes"),
    ],
)
def test_a_file_that_is_no_problem_is_named(checkout: Path, content: bytes, message: str) -> None:
    (checkout / "KernelBench" / "level1" / "3_broken.py").write_bytes(content)
    with pytest.raises(BadTask, match=message) as caught:
        load(f"kernelbench:{checkout}")
    assert "3_broken.py" in str(caught.value)
