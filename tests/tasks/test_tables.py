"""Tables of published sets: each row a task, each bad row named."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kernelwright.errors import BadTask, UserError
from kernelwright.kernels.reference import load as reference
from kernelwright.tasks import load
from kernelwright.types import Task

SOURCE = """
import torch


class {name}(torch.nn.Module):
    def __init__(self, factor, shift=0.0):
        super().__init__()
        self.factor, self.shift = factor, shift

    def forward(self, x):
        return x * self.factor + self.shift


def get_inputs():
    return [torch.rand([4, 4, 4, 4])]


def get_init_inputs():
    return {initial}
"""
MODEL = SOURCE.format(name="Model", initial="[2.0]")
SCALE = SOURCE.format(name="Scale", initial="[[2.0], {'shift': 1.0}]")


def table(folder: Path, *rows: object) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return f"table:{file}"


def test_kernelbench_columns(tmp_path: Path) -> None:
    (task,) = load(table(tmp_path, {"code": MODEL, "level": 1, "name": "19_ReLU", "problem_id": 19}))
    assert (task.id, task.statement, task.reference) == ("kernelbench/level1/19_ReLU", "ReLU", MODEL)


def test_kernelbook_calls_its_class_otherwise_and_gives_keywords(tmp_path: Path) -> None:
    row = {"python_code": SCALE, "entry_point": "Scale", "uuid": 7, "triton_code": "..."}
    (task,) = load(table(tmp_path, row))
    assert task.id == "kernelbook/7-Scale"
    case = reference(task).check_cases()[0]
    assert case.expected == pytest.approx(2.0 * case.inputs[0].astype(float) + 1.0)


def test_a_program_with_keywords_shrinks_too(tmp_path: Path) -> None:
    large = SCALE.replace("[4, 4, 4, 4]", "[4096, 4096]")
    spec = table(tmp_path, {"python_code": large, "entry_point": "Scale", "uuid": 7})
    assert "4096" in load(spec)[0].reference and "4096" not in load(f"{spec}#shrink")[0].reference


def test_cuda_agent_columns(tmp_path: Path) -> None:
    (task,) = load(table(tmp_path, {"ops": '["nn.ReLU", "torch.diag"]', "data_source": "torch#2", "code": MODEL}))
    assert (task.id, task.statement) == ("cuda-agent-ops/0", "nn.ReLU, torch.diag")


@pytest.mark.parametrize("truth", [SCALE, json.dumps({"reference_code": SCALE})])
def test_verl_rows(tmp_path: Path, truth: str) -> None:
    row = {
        "data_source": "drkernel",
        "prompt": [{"role": "user", "content": "..."}],
        "reward_model": {"ground_truth": truth},
        "extra_info": {"entry_point": "Scale", "uuid": "ab"},
    }
    (task,) = load(table(tmp_path, row))
    assert task.id == "drkernel/ab"
    assert reference(task).keywords == {"shift": 1.0}


def test_our_own_tasks_come_back_as_they_were(tmp_path: Path) -> None:
    own = load("builtin")[0]
    file = tmp_path / "own.jsonl"
    file.write_bytes(msgspec.json.encode(own) + b"\n")
    assert load(f"table:{file}") == [own] and isinstance(own, Task)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"code": MODEL, "level": 2, "name": f"{n}_X"} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert [task.id for task in load(f"table:{tmp_path}/t.parquet")] == [f"kernelbench/level2/{n}_X" for n in range(3)]
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadTask, match="no parquet file"):
        load(f"table:{tmp_path}/bad.parquet")


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], UserError, "is empty"),
        ([{"a": 1, "b": 2}], UserError, "columns a, b, expected those of KernelBench"),
        ([[1]], BadTask, "line 1 of .* is no JSON object"),
        ([{"code": MODEL, "level": 1, "name": "1_a"}, {"code": "x =", "level": 1, "name": "2_b"}], BadTask, "row 2 of"),
        ([{"id": "a b", "statement": "", "reference": MODEL}], BadTask, "a task id is one word"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, rows: list[object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(table(tmp_path, *rows) if rows else _empty(tmp_path))


def _empty(folder: Path) -> str:
    (folder / "rows.jsonl").write_text("")
    return f"table:{folder}/rows.jsonl"


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(f"table:{tmp_path}/none.jsonl")
    with pytest.raises(UserError, match=r"ends in .jsonl or .parquet"):
        load(f"table:{tmp_path}/rows.csv")
    (tmp_path / "cut.jsonl").write_text('{"code": ')
    with pytest.raises(BadTask, match=r"line 1 of .* is no JSON"):
        load(f"table:{tmp_path}/cut.jsonl")
