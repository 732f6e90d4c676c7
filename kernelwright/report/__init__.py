"""Run directory -> one self-contained HTML file: before and after, curves, and what the model read, wrote and was told.

The page is a template (page.html, style.css, charts.js, reader.js) and one block of JSON:

    run           {title, paper, facts {name: text}, footer}
    evaluations   [{name, tasks, samples, before, after}], each of the two null or {step, correct [K],
                   correct_error [K], speedup [K], any_correct, any_speedup, faster}
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
from kernelwright.measure import mean_score
from kernelwright.report.trajectories import chosen_trajectories
from kernelwright.types import Status

_NAMES = {"heldout": "Held-out tasks", "train": "Training tasks", "validation": "Validation tasks"}


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
    kernels = sum(sum(line["status"].values()) for line in metrics)
    facts = {
        "model": recipe["model"],
        "tasks": recipe["tasks"],
        "steps": f"{len(metrics)} of {recipe['steps']}",
        "a step": f"{recipe['tasks_per_step']} tasks × {recipe['group_size']} trajectories × {recipe['max_turns']}"
        + (" turns" if recipe["max_turns"] > 1 else " turn"),
        "kernels": f"{kernels:,}",
        "time in steps": f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s",
        "seed": recipe["seed"],
    }
    versions = ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items())
    return {"title": recipe["name"], "paper": recipe["paper"], "facts": facts, "footer": f"Made with {versions}."}


def _before_and_after(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a task set, held-out tasks first. They and the training tasks are measured at the end, with the chosen
    checkpoint; validation tasks at every candidate for it: there, "after" is the one that was chosen.
    """
    found = []
    for name, title in _NAMES.items():
        lines = [line for line in measured if line["set"] == name]
        before = next((line for line in lines if line["phase"] == "before"), None)
        later = [line for line in lines if line["phase"] != "before"]
        after = max(later, key=mean_score, default=None)
        if lines:
            pair = {"before": before and _per_turn(before), "after": after and _per_turn(after)}
            found.append({"name": title, "tasks": lines[0]["tasks"], "samples": lines[0]["samples"], **pair})
    return found


def _per_turn(line: dict[str, Any]) -> dict[str, Any]:
    trajectories = line["tasks"] * line["samples"] - line["broken"]
    correct = [turn["correct"] for turn in line["turns"]]
    return {
        "step": line["step"],
        "correct": correct,
        "correct_error": [_binomial(share, trajectories) for share in correct],
        "speedup": [turn["speedup_geomean"] for turn in line["turns"]],
        "any_correct": line["avg"]["correct"],
        "any_speedup": line["avg"]["speedup_geomean"],
        "faster": line["avg"]["fast_p"].get("1"),
    }


def _curves(
    recipe: dict[str, Any], metrics: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    turns = range(recipe["max_turns"])
    trajectories = recipe["tasks_per_step"] * recipe["group_size"]
    correct = [[_at(line["correct"], turn) for line in metrics] for turn in turns]
    speedup = [[_at(line["speedup_geomean"], turn) for line in metrics] for turn in turns]
    during = [line for line in measured if line["set"] == "validation"]
    return {
        "steps": [line["step"] for line in metrics],
        "reward": {
            "mean": [line["reward"] for line in metrics],
            # over trajectories, not over turns: the turns of a trajectory are not independent
            "error": [line["reward_std"] / math.sqrt(trajectories) for line in metrics],
        },
        "correct": {
            "mean": correct,
            "error": [[_binomial(share, trajectories) for share in row] for row in correct],
        },
        "speedup": {"mean": speedup},
        "entropy": [line.get("entropy") for line in metrics],
        "statuses": {
            status: [line["status"].get(status, 0) for line in metrics]
            for status in reversed(Status)
            if any(line["status"].get(status) for line in metrics)
        },
        "validation": {
            "steps": [line["step"] for line in during],
            "score": [mean_score(line) for line in during],
        },
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
