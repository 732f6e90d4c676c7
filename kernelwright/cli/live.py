"""What `train` shows while it works: one line a step, a bar below them on a terminal, and a table at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType

    from kernelwright.train import Event


class Live:
    """Shows the events of one run; use as a context manager around it and pass it as `progress`."""

    def __init__(self, console: Console | None = None) -> None:
        self.path: Path | None = None
        self._console = console or Console(highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting", total=None, left="")
        self._began = time.monotonic()
        self._first = 0

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event.kind:
            case "start":
                self.path, self._first = Path(event.data["path"]), event.step
                again = f", going on after step {event.step}" if event.data["resumed"] else ""
                self._print(f"run {self.path}: {event.data['tasks']} tasks, {event.steps} steps{again}")
                self._began = time.monotonic()
            case "evaluating":
                self._bar.update(self._task, description=f"measuring {event.data['set']} {event.data['phase']}")
            case "evaluated":
                self._print(evaluation_line(event.data))
                if event.step == self._first:
                    # what is measured before the first step says nothing about steps
                    self._began = time.monotonic()
                # the time that is left is that of steps; a measurement must not look like a slow step
                self._show(event, "training")
            case "step":
                self._print(step_line(event.data, event.steps, self._left(event)))
                self._show(event, "training")
            case "finish":
                chosen = event.data["best"]
                self._print(
                    "done" if chosen is None else f"done; the checkpoint of step {chosen} did best on validation"
                )

    def summary(self, path: Path) -> None:
        """The before-and-after table of a finished run."""
        from kernelwright import store
        from kernelwright.measure import mean_score

        lines = store.evaluations(path)
        titles = {"train": "Training tasks", "heldout": "Held-out tasks", "validation": "Validation tasks"}
        for name, title in titles.items():
            before = [line for line in lines if line["set"] == name and line["phase"] == "before"]
            later = [line for line in lines if line["set"] == name and line["phase"] != "before"]
            if before and later:
                after = max(later, key=mean_score)
                self._console.print(comparison(before[0], after, title=title))

    def _show(self, event: Event, description: str) -> None:
        self._bar.update(
            self._task, description=description, completed=event.step, total=event.steps, left=self._left(event)
        )

    def _left(self, event: Event) -> str:
        """The time left, from the mean time of the steps so far, measurements in between included."""
        done = event.step - self._first
        if not done or event.step >= event.steps:
            return ""
        seconds = (time.monotonic() - self._began) / done * (event.steps - event.step)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"

    def _print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, soft_wrap=True)


def step_line(line: dict[str, Any] | Any, steps: int, left: str) -> str:
    """One line of a step: reward, correct per turn, speedup, seconds by stage, time left."""
    seconds = "  ".join(f"{stage} {spent:.1f}" for stage, spent in line["seconds"].items())
    fields = [
        f"step {line['step']:>{len(str(steps))}}/{steps}",
        f"reward {line['reward']:.3f}",
        f"correct {_per_turn(line['correct'], _percent)}",
        f"speedup {_per_turn(line['speedup_geomean'], _times)}",
        f"{seconds} s",
        left,
    ]
    return "  ".join(field for field in fields if field)


def evaluation_line(line: dict[str, Any] | Any) -> str:
    """One line of a measurement."""
    turns = line["turns"]
    return (
        f"{line['set']} {line['phase']} (step {line['step']}): "
        f"correct {_per_turn([turn['correct'] for turn in turns], _percent)}  "
        f"speedup {_per_turn([turn['speedup_geomean'] for turn in turns], _times)}  "
        f"any turn {_percent(line['avg']['correct'])}  score {line['avg']['score']:.3f}"
    )


def comparison(before: dict[str, Any], after: dict[str, Any], *, title: str) -> Table:
    """Before and after, a row for each turn and for the best turns."""
    table = Table(title=f"{title} ({before['tasks']} x {before['samples']})", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("correct", "faster than PyTorch", "speedup of correct"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, old, new in zip(_row_names(before), _rows(before), _rows(after), strict=True):
        table.add_row(
            name,
            f"{_percent(old['correct'])} -> {_percent(new['correct'])}",
            f"{_percent(old['fast_p'].get('1'))} -> {_percent(new['fast_p'].get('1'))}",
            f"{_times(old['speedup_geomean'])} -> {_times(new['speedup_geomean'])}",
        )
    return table


def print_numbers(numbers: dict[str, Any], *, title: str, console: Console | None = None) -> None:
    """The result of one measurement: a row for each turn, for the best of a trajectory and the best of a task.

    "speedup" counts a wrong kernel as 0, "geomean" is that of the correct ones.
    """
    heading = f"{title} ({numbers['tasks']} x {numbers['samples']})"
    table = Table(title=heading, box=SIMPLE_HEAD, title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for column in ("correct", "fast_0.5", "fast_1", "fast_2", "speedup", "geomean", "score"):
        table.add_column(column, justify="right")
    for name, one in zip(_row_names(numbers), _rows(numbers), strict=True):
        fast = [_percent(one["fast_p"].get(p)) for p in ("0.5", "1", "2")]
        speeds = [_times(one["speedup"]), _times(one["speedup_geomean"])]
        table.add_row(name, _percent(one["correct"]), *fast, *speeds, f"{one['score']:.3f}")
    (console or Console(highlight=False)).print(table)


def _row_names(numbers: dict[str, Any]) -> list[str]:
    samples = numbers["samples"]
    turns = [f"turn {number}" for number, _ in enumerate(numbers["turns"], start=1)]
    return [*turns, f"any turn, avg@{samples}", f"any turn, best@{samples}"]


def _rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    return [*numbers["turns"], numbers["avg"], numbers["best"]]


def _per_turn(values: list[float | None], format_: Any) -> str:
    return "/".join(format_(value) for value in values)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
