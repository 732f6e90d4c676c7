"""Tasks from tables: JSON lines, parquet files and datasets of the hub. The columns say what kind of table it is.

| kind | columns | program |
|---|---|---|
| KernelBench | `code`, `name`, `level`, `problem_id` | `code` |
| KernelBook | `python_code`, `entry_point`, `uuid` | `python_code`, whose class is called as `entry_point` says |
| CUDA-Agent-Ops | `code`, `ops`, `data_source` | `code` |
| drkernel, cudaLLM | `reward_model` with `ground_truth`, `extra_info` | `ground_truth`, class as `entry_point` says |
| our own | the fields of `kernelwright.Task` | `reference` |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kernelwright.errors import BadTask, MissingTool, UserError
from kernelwright.tasks import files
from kernelwright.types import Task

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Program:
    """What a row says about a task."""

    source: str
    identifier: str
    entry_point: str = "Model"
    statement: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """A kind of table: the columns that it is known by, and how a row is read."""

    name: str
    columns: frozenset[str]
    read: Callable[[Row, int], _Program] = field(repr=False)


def load(path: str, *, small: bool = False) -> list[Task]:
    """The tasks of a table on disk.

    Args:
        path: `.jsonl` or `.parquet`.
        small: see `files.program`.

    Raises:
        UserError: another ending, no such file, or columns of no known kind.
        BadTask: a line that is no JSON object, or a row that is no task.
        MissingTool: a parquet file without pyarrow.
    """
    file = Path(path)
    if file.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"got the table '{path}', expected a name that ends in .jsonl or .parquet")
    if not file.is_file():
        raise UserError(f"got the table '{path}', which does not exist")
    rows = _json_lines(file) if file.suffix == ".jsonl" else _parquet(file)
    return tasks(rows, where=path, small=small)


def hub(identifier: str, *, small: bool = False) -> list[Task]:
    """The tasks of a dataset on the hub, all its splits one after another.

    Raises:
        MissingTool: the package `datasets` is missing.
        UserError: the dataset cannot be had, or has columns of no known kind.
    """
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise MissingTool("tasks from the hub need a package; pip install datasets") from None
    try:
        splits: Any = datasets.load_dataset(identifier)
    except Exception as error:
        raise UserError(f"got 'hub:{identifier}', which cannot be had: {str(error).strip()[:200]}") from error
    return tasks((row for split in splits.values() for row in split), where=f"hub:{identifier}", small=small)


def tasks(rows: Iterable[Row], *, where: str, small: bool = False) -> list[Task]:
    """One task a row.

    Raises:
        UserError: columns of no known kind, or no row at all.
        BadTask: a row that is no task.
    """
    found: list[Task] = []
    for number, row in enumerate(rows):
        try:
            found.append(_task(row, number, where=where, small=small))
        except BadTask as error:
            raise BadTask(f"row {number + 1} of {where}: {error}") from None
    if not found:
        raise UserError(f"got the table '{where}', which is empty; expected at least one row")
    return found


def _task(row: Row, number: int, *, where: str, small: bool) -> Task:
    if {"id", "statement", "reference"} <= set(row):
        try:
            return msgspec.convert(dict(row), Task)
        except (msgspec.ValidationError, ValueError) as error:
            raise BadTask(str(error)) from error
    for kind in _KINDS:
        if kind.columns <= set(row):
            said = kind.read(row, number)
            source = said.source
            if said.entry_point != "Model":
                source = f"{source.rstrip()}\n\n\nModel = {said.entry_point}\n"
            return files.program(
                source,
                identifier=said.identifier,
                where=said.identifier,
                tags=said.tags,
                statement=said.statement,
                small=small,
            )
    known = "; ".join(f"{kind.name}: {', '.join(sorted(kind.columns))}" for kind in _KINDS)
    raise UserError(f"got the table '{where}' with columns {', '.join(sorted(row))}, expected those of {known}")


def _kernelbench(row: Row, number: int) -> _Program:
    del number
    level = f"level{row['level']}"
    name = str(row["name"])
    return _Program(
        source=row["code"],
        identifier=f"kernelbench/{level}/{name}",
        statement=name.partition("_")[2].strip("_").replace("_", " "),
        tags=("kernelbench", level),
    )


def _kernelbook(row: Row, number: int) -> _Program:
    name = f"{row.get('uuid', number)}-{row['entry_point']}"
    return _Program(
        source=row["python_code"],
        identifier=f"kernelbook/{name}",
        entry_point=row["entry_point"],
        statement=str(row["entry_point"]),
        tags=("kernelbook",),
    )


def _cuda_agent(row: Row, number: int) -> _Program:
    operators = row["ops"] if isinstance(row["ops"], list) else json.loads(row["ops"])
    return _Program(
        source=row["code"],
        identifier=f"cuda-agent-ops/{number}",
        statement=", ".join(map(str, operators)),
        tags=("cuda-agent-ops",),
    )


def _verl(row: Row, number: int) -> _Program:
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"] or {}
    if truth.lstrip().startswith("{"):  # a JSON object that holds the source
        truth = json.loads(truth)["reference_code"]
    name = extra.get("uuid") if extra.get("uuid") is not None else number
    return _Program(
        source=truth,
        identifier=f"{files.word(str(row.get('data_source', 'verl')))}/{files.word(str(name))}",
        entry_point=extra.get("entry_point") or "Model",
        tags=("verl",),
    )


_KINDS = (
    _Kind(name="KernelBench", columns=frozenset({"code", "level", "name"}), read=_kernelbench),
    _Kind(name="KernelBook", columns=frozenset({"python_code", "entry_point"}), read=_kernelbook),
    _Kind(name="CUDA-Agent-Ops", columns=frozenset({"code", "ops"}), read=_cuda_agent),
    _Kind(name="verl", columns=frozenset({"reward_model", "extra_info"}), read=_verl),
)


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadTask(f"line {number} of {file} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise BadTask(f"line {number} of {file} is no JSON object")
            yield row


def _parquet(file: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]
    except ImportError:
        raise MissingTool(f"'{file}' is a parquet file, which needs a package; pip install pyarrow") from None
    try:
        yield from (row for batch in parquet.ParquetFile(file).iter_batches(64) for row in batch.to_pylist())
    except (OSError, ValueError) as error:
        raise BadTask(f"'{file}' is no parquet file: {error}") from None
