"""The run directory: what a run leaves on disk, written so that a kill at any byte loses no finished step.

    config.json           recipe as names and arguments, seed, versions
    metrics.jsonl         one line a step; no wall-clock value, so equal runs have equal files
    timings.jsonl         one line a step: seconds by stage, cache hits
    groups.jsonl          one line a group: step, whole group, keep, advantages
    evaluations.jsonl     one line a measurement of the policy
    checkpoints/step-N/   the engine after N steps, and state.json; the last two are kept
    checkpoints/best/     a copy of the one that did best on the validation tasks

Lines are appended with one write and fsync. A checkpoint is written aside and then renamed, after the lines of its
step. Resuming starts from the newest checkpoint and cuts off what the files hold beyond it (whole lines of later steps,
or a torn last line), so the files of a resumed run equal those of an unbroken one.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec

from kernelwright.errors import BadRun
from kernelwright.store.described import describe, restore
from kernelwright.types import Group, Recipe

METRICS, TIMINGS, GROUPS, EVALUATIONS = "metrics.jsonl", "timings.jsonl", "groups.jsonl", "evaluations.jsonl"
_KEPT_CHECKPOINTS = 2
_NOTHING_FREE = 2**20


class _Step(msgspec.Struct):
    step: int


class GroupLine(msgspec.Struct, kw_only=True, frozen=True):
    """One line of groups.jsonl: made by `group_line`; `advantages_of` gives the advantages token by token."""

    step: int
    group: Group
    keep: list[list[bool]]  # [G][K]
    # of each turn its T values, or their common value
    advantages: list[list[float | list[float]]]  # [G][K]


class Run:
    """A run directory that this process writes; one process at a time. Made by `start`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def append(self, name: str, records: Sequence[Any]) -> None:
        """Add one line a record to the file `name`, with one write, on disk when this returns.

        Raises:
            BadRun: the disk is full or the directory cannot be written.
        """
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        with _writing(self.path), (self.path / name).open("ab", buffering=0) as file:
            # a raw write may be partial (a nearly full disk): what is left either fails or completes the line
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def checkpoint(self, step: int, save: Callable[[str], None]) -> None:
        """Make `checkpoints/step-N` by calling `save(folder)`, and drop all but the last two.

        Raises:
            BadRun: as `append`.
        """
        folder = self.path / "checkpoints" / f"step-{step}"
        with _writing(self.path), _aside(folder) as aside:
            save(str(aside))
            _write(aside / "state.json", {"step": step})
        self._prune()

    def keep_best(self, step: int) -> None:
        """Let `checkpoints/best` be a copy of `checkpoints/step-N`, which has to exist unless it is that already."""
        best = self.path / "checkpoints" / "best"
        if _state(best) == step:
            return
        source = self.path / "checkpoints" / f"step-{step}"
        if not source.exists():
            raise BadRun(f"'{best}' should hold step {step}, but was removed; put it back, or take another directory")
        with _writing(self.path), _aside(best) as aside:
            shutil.copytree(source, aside, dirs_exist_ok=True)

    def cut(self, step: int) -> None:
        """Drop every line of a later step than `step`, a torn last line, and what a kill left among the checkpoints."""
        with _writing(self.path):
            for left_over in (self.path / "checkpoints").glob(".*"):
                shutil.rmtree(left_over)
            for later in checkpoints(self.path):
                if later > step:
                    self._drop(later)
            self._prune()
            for name in (METRICS, TIMINGS, GROUPS, EVALUATIONS):
                file = self.path / name
                if file.exists():
                    os.truncate(file, _length(file, step))

    def _prune(self) -> None:
        for old in checkpoints(self.path)[:-_KEPT_CHECKPOINTS]:
            self._drop(old)

    def _drop(self, step: int) -> None:
        folder = self.path / "checkpoints" / f"step-{step}"
        # half a checkpoint must not look like one
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old")))


def start(path: str | os.PathLike[str], recipe: Recipe, *, resume: bool = False) -> Run:
    """Begin a run directory, or take up the one that is there.

    Args:
        resume: the directory may hold a run, which then has to be of the same recipe; without it, none.

    Raises:
        BadRun: unwritable, in use by another process, already a run (without `resume`), or of another recipe.
    """
    folder = Path(path)
    described = describe(recipe)
    with _writing(folder):
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / "config.json").exists():
            _check_same(folder, described, resume=resume)
        else:
            with _writing(folder):
                _write(folder / "config.json", {"recipe": described, "seed": recipe.seed, "versions": versions()})
    except BlockingIOError as error:
        os.close(lock)
        raise BadRun(
            f"'{folder}' is being written by another process; wait for it or take another directory"
        ) from error
    except BadRun:
        os.close(lock)
        raise
    return Run(folder, lock)


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide results."""
    found = {"python": platform.python_version()}
    for package in ("kernelwright", "torch", "transformers", "tokenizers", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def group_line(
    step: int, group: Group, keep: Sequence[Sequence[bool]], advantages: Sequence[Sequence[Sequence[float]]]
) -> GroupLine:
    """A line of groups.jsonl. `advantages` [G][K][T] of a turn that are all equal are written once."""
    compact = [
        [values[0] if len(set(values)) == 1 else list(values) for values in trajectory] for trajectory in advantages
    ]
    return GroupLine(step=step, group=group, keep=[list(flags) for flags in keep], advantages=compact)


def _check_same(folder: Path, described: Mapping[str, Any], *, resume: bool) -> None:
    if not resume:
        raise BadRun(f"'{folder}' already holds a run; continue it with --resume or take another directory")
    before, now = _flat(config(folder)["recipe"]), _flat(described)
    if differing := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        key = differing[0]
        more = f" (also {', '.join(differing[1:6])})" if differing[1:] else ""
        raise BadRun(
            f"'{folder}' is a run of another recipe: {key} is {before.get(key)!r} there, {now.get(key)!r} here{more}; "
            "resume with the same options or take another directory"
        )


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, Mapping):
        return {prefix: data}
    parts: dict[str, Any] = {}
    for key, value in data.items():
        # as `--set` spells it: environment.reward.cap, not environment.arguments.reward.arguments.cap
        name = prefix if key == "arguments" else f"{prefix}.{key}" if prefix else key
        parts.update(_flat(value, name))
    return parts


def _length(file: Path, step: int) -> int:
    """Bytes up to the first line that is torn or of a later step."""
    length, decoder = 0, msgspec.json.Decoder(_Step)
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or _decoded(decoder, line, f"a line of '{file}'").step > step:
                break
            length += len(line)
    return length


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that replaces it when the block ends well."""
    aside, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for left_over in (aside, old):
        shutil.rmtree(left_over, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except BaseException as error:
        full = isinstance(error, Exception) and shutil.disk_usage(aside).free < _NOTHING_FREE
        shutil.rmtree(aside, ignore_errors=True)
        if full:  # which torch and safetensors say by exceptions of their own
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    for file in (*aside.rglob("*"), aside):
        _sync(file)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: Path, data: Any) -> None:
    """The whole file or none of it."""
    aside = file.with_name(f".{file.name}.new")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
    _sync(aside)
    aside.replace(file)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what the operating system says about a directory into one line for the user."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, then continue with --resume" if full else "name one that can be written with --out"
        raise BadRun(f"cannot write the run directory '{folder}': {error.strerror or error}; {advice}") from error


def config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        BadRun: there is none, or it is not readable.
    """
    file = Path(path) / "config.json"
    try:
        data = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise BadRun(f"'{path}' is no run directory: it has no config.json; name one that `train` made") from error
    except (OSError, msgspec.DecodeError) as error:
        raise BadRun(f"'{file}' cannot be read: {error}; put it back, or take another directory") from error
    needed = [field.name for field in fields(Recipe) if field.default is MISSING]
    if not isinstance(data.get("recipe"), dict) or not data["recipe"].keys() >= set(needed):
        raise BadRun(f"'{file}' names no recipe of this version; name a directory that `train` made")
    return data


def recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a run, as `start` was given it."""
    return restore(config(path)["recipe"])


def metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The finished lines of metrics.jsonl; [] before there are any."""
    return list(_lines(Path(path) / METRICS, dict[str, Any]))


def timings(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The finished lines of timings.jsonl."""
    return list(_lines(Path(path) / TIMINGS, dict[str, Any]))


def evaluations(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The finished lines of evaluations.jsonl."""
    return list(_lines(Path(path) / EVALUATIONS, dict[str, Any]))


def groups(path: str | os.PathLike[str]) -> Iterator[GroupLine]:
    """The finished lines of groups.jsonl, one at a time: the file is long."""
    return _lines(Path(path) / GROUPS, GroupLine)


def advantages_of(line: GroupLine) -> list[list[list[float]]]:
    """The advantage of every sampled token of a group  [G][K][T]."""
    return [
        [
            values if isinstance(values, list) else [values] * len(turn.completion.tokens)
            for values, turn in zip(row, trajectory.turns, strict=True)
        ]
        for row, trajectory in zip(line.advantages, line.group.trajectories, strict=True)
    ]


def newest_whole(path: str | os.PathLike[str], *, groups: int, evaluations: Callable[[int], int]) -> int | None:
    """Step of the newest checkpoint that no file falls short of; None where there is neither checkpoint nor step.

    Args:
        groups: lines of groups.jsonl that a step has.
        evaluations: the lines of evaluations.jsonl that were there before the measurements of a step.

    Raises:
        BadRun: lines that a checkpoint is built on are gone, or the checkpoints are.
    """
    folder = Path(path)
    there, lines = checkpoints(folder), {name: _whole_lines(folder / name) for name in (METRICS, TIMINGS, EVALUATIONS)}
    steps = min(lines[METRICS], lines[TIMINGS], _whole_lines(folder / GROUPS) // groups)
    whole = [step for step in there if step <= steps and evaluations(step) <= lines[EVALUATIONS]]
    if whole:
        return whole[-1]
    if there:
        raise BadRun(
            f"'{path}' lost lines that its checkpoints {there} are built on: its .jsonl files are whole up to step "
            f"{steps}; put them back, or take another directory"
        )
    if lines[METRICS]:
        raise BadRun(f"'{path}' has {lines[METRICS]} steps but no checkpoint; put one back, or take another directory")
    return None


def _whole_lines(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(line.endswith(b"\n") for line in lines)


def checkpoints(path: str | os.PathLike[str]) -> list[int]:
    """Steps of the complete checkpoints of a run, oldest first."""
    found = (_state(folder) for folder in (Path(path) / "checkpoints").glob("step-*"))
    return sorted(step for step in found if step is not None)


def _state(folder: Path) -> int | None:
    file = folder / "state.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Step).step if file.exists() else None
    except msgspec.DecodeError as error:
        raise BadRun(f"'{file}' is damaged ({error}); remove '{folder}', then --resume") from error


def _lines(file: Path, kind: Any) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(kind)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                # the writer may be in the middle of the last line
                if line.endswith(b"\n"):
                    yield _decoded(decoder, line, f"line {number} of '{file}'")
    except FileNotFoundError:
        return
    except OSError as error:
        raise BadRun(f"'{file}' cannot be read: {error.strerror or error}") from error


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes, where: str) -> Any:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise BadRun(f"{where} is damaged ({error}); restore it, or cut the file there and --resume") from error
