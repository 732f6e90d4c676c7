"""Run directory -> one self-contained HTML file: before and after, curves, and what the model read, wrote and was told.

The page is a template (page.html, style.css, charts.js, reader.js) and one block of JSON:

    run           {title, paper, facts {name: text}, footer}
    evaluations   [{name, tasks, before, after}], each of the two {correct [K], correct_error [K], speedup [K], best}
    curves        {steps [S], reward {mean [S], error [S]}, correct {mean [K][S], error [K][S]}, speedup {mean [K][S]},
                   entropy [S], statuses {name: counts [S]}, validation {steps, score}}
    chosen        a sentence: which trajectories are on the page
    trajectories  see `kernelwright.report.trajectories`
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from kernelwright import store
from kernelwright.report.trajectories import chosen_trajectories
from kernelwright.types import Status

_NAMES = {"heldout": "Held-out tasks", "validation": "Validation tasks", "train": "Training tasks"}


def write(run: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run directory, finished or not.

    Args:
        output: the file to write, by default `report.html` in the run directory.

    Raises:
        BadRun: `run` is no run directory, or is damaged.
        OSError: `output` cannot be written.
    """
    folder = Path(run)
    target = Path(output) if output is not None else folder / "report.html"
    files = {name: _asset(name) for name in ("page.html", "style.css", "charts.js", "reader.js")}
    data = collect(folder)
    page = Template(files["page.html"]).substitute(
        title=f"{_escaped(data['run']['title'])} · kernelwright",
        style=files["style.css"],
        charts=files["charts.js"],
        reader=files["reader.js"],
        # "</script>" inside a string would end the block; in JSON the slash may be escaped
        data=msgspec.json.encode(_finite(data)).decode().replace("</", "<\\/").replace("<!--", "<\\u0021--"),
    )
    aside = target.with_name(f".{target.name}.new")
    aside.write_text(page, encoding="utf-8")
    aside.replace(target)
    return target


def collect(folder: Path) -> dict[str, Any]:
    """The page's data block."""
    config = store.config(folder)
    metrics = store.metrics(folder)
    measured = store.evaluations(folder)
    steps = [line["step"] for line in metrics]
    sentence, trajectories = chosen_trajectories(folder, steps)
    return {
        "run": _run(config, metrics, store.timings(folder)),
        "evaluations": _before_and_after(measured),
        "curves": _curves(config["recipe"], metrics, measured),
        "chosen": sentence,
        "trajectories": trajectories,
    }


def _run(
    config: dict[str, Any], metrics: Sequence[dict[str, Any]], timings: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    recipe = config["recipe"]
    seconds = math.fsum(value for line in timings for value in line.get("seconds", {}).values())
    kernels = sum(sum(line["statuses"].values()) for line in metrics)
    facts = {
        "model": recipe["model"],
        "tasks": recipe["tasks"],
        "steps": f"{len(metrics)} of {recipe['steps']}",
        "a step": f"{recipe['tasks_per_step']} tasks × {recipe['group_size']} trajectories × {recipe['max_turns']} turns",
        "kernels": f"{kernels:,}",
        "time in steps": f"{seconds / 60:.1f} min",
        "seed": recipe["seed"],
    }
    versions = ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items())
    return {"title": recipe["name"], "paper": recipe["paper"], "facts": facts, "footer": f"Made with {versions}."}


def _before_and_after(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a task set, held-out tasks first; validation passes during the run are in the curves."""
    sets = sorted({line["set"] for line in measured}, key=lambda name: (list(_NAMES).index(name), name))
    found = []
    for name in sets:
        at = {line["when"]: line for line in measured if line["set"] == name}
        pair = {when: _per_turn(at[when]) if when in at else None for when in ("before", "after")}
        if any(pair.values()):
            tasks = next(line["tasks"] for line in at.values())
            found.append({"name": _NAMES[name], "tasks": tasks, **pair})
    return found


def _per_turn(line: dict[str, Any]) -> dict[str, Any]:
    trajectories = line["tasks"] * line["samples"]
    correct = [turn["correct"] for turn in line["turns"]]
    return {
        "correct": correct,
        "correct_error": [_binomial(share, trajectories) for share in correct],
        "speedup": [turn["speedup_geometric_mean"] for turn in line["turns"]],
        "best": line["best"]["correct"],
    }


def _curves(
    recipe: dict[str, Any], metrics: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    turns = range(recipe["max_turns"])
    trajectories = recipe["tasks_per_step"] * recipe["group_size"]
    correct = [[_at(line["correct"], turn) for line in metrics] for turn in turns]
    during = [line for line in measured if line["set"] == "validation" and line["when"] != "after"]
    return {
        "steps": [line["step"] for line in metrics],
        "reward": {
            "mean": [line["reward_mean"] for line in metrics],
            "error": [line["reward_std"] / math.sqrt(trajectories) for line in metrics],
        },
        "correct": {
            "mean": correct,
            "error": [[_binomial(share, trajectories) for share in row] for row in correct],
        },
        "speedup": {"mean": [[_at(line["speedup"], turn) for line in metrics] for turn in turns]},
        "entropy": [line.get("entropy") for line in metrics],
        "statuses": {
            status: [line["statuses"].get(status, 0) for line in metrics]
            for status in reversed(Status)
            if any(line["statuses"].get(status) for line in metrics)
        },
        "validation": {"steps": [line["step"] for line in during], "score": [line["score"] for line in during]},
    }


def _at(values: Sequence[float | None], turn: int) -> float | None:
    return values[turn] if turn < len(values) else None


def _binomial(share: float | None, count: int) -> float | None:
    return None if share is None else math.sqrt(share * (1 - share) / count)


def _finite(value: Any) -> Any:
    """The data without nan and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _asset(name: str) -> str:
    return resources.files("kernelwright.report").joinpath(name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
