"""`check`: one kernel through the evaluator."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from kernelwright.cli.catalogue import Json, Shrink, one_task
from kernelwright.errors import UnknownName, UserError
from kernelwright.types import Evaluation


def check(
    task: Annotated[str, typer.Argument(help="The task, such as builtin/NAME or file:PATH.py")],
    file: Annotated[str, typer.Argument(help="The kernel's source; - reads it from the standard input")],
    *,
    backend: Annotated[str, typer.Option(help="What the kernel is written in.")] = "c",
    shrink: Shrink = False,
    as_json: Json = False,
) -> None:
    """Put one kernel through the evaluator. Exit 0: correct and trusted; 1: not; 2: the command is at fault."""
    from kernelwright.kernels import BACKENDS, evaluate

    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    source = _read(file)
    evaluation = evaluate(one_task(task, shrink=shrink), source, backend=backend)
    print(json.dumps(record(evaluation), indent=2) if as_json else describe(evaluation))
    raise typer.Exit(0 if evaluation.trusted else 1)


def record(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as `check --json` prints it."""
    fields = asdict(evaluation)
    # strict JSON has no nan: an element that is no number stands there as text
    for name in ("expected", "got", "max_error"):
        value = fields[name]
        fields[name] = str(value) if value is not None and not float("-inf") < value < float("inf") else value
    return {
        "task": fields.pop("task"),
        "backend": fields.pop("backend"),
        "status": str(fields.pop("status")),
        "compiled": evaluation.compiled,
        "correct": evaluation.correct,
        "trusted": evaluation.trusted,
        "speedup": evaluation.speedup,
        **fields,
        "environment": {"device": _device(evaluation), "versions": versions()},
    }


def versions() -> dict[str, str]:
    """Versions of this package and of what a verdict depends on; a package that is absent is left out."""
    found = {"python": platform.python_version()}
    for package in ("kernelwright", "torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe(evaluation: Evaluation) -> str:
    """The verdict for a person: the feedback that the policy would see, times, and evidence of cheating."""
    from kernelwright.feedback import feedback

    lines = [f"{evaluation.task} ({evaluation.backend}): {evaluation.status}", feedback(evaluation)]
    if evaluation.speedup is not None:
        kernel, reference = median(evaluation.kernel_ms), median(evaluation.reference_ms)
        lines.append(f"speedup {evaluation.speedup:.2f}: {kernel:.4g} ms, PyTorch {reference:.4g} ms (medians)")
    lines += [f"{key}: {value}" for key, value in evaluation.profile.items()]
    lines += [f"not trusted, {hack.rule}: {hack.evidence}" for hack in evaluation.hacks]
    return "\n".join(lines)


def _device(evaluation: Evaluation) -> str:
    if evaluation.verified == "gpu":
        import torch

        return torch.cuda.get_device_name()
    return cpu_name()


def cpu_name() -> str:
    """The processor's model name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read(file: str) -> str:
    path = Path(file)
    if file != "-" and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"got the file '{file}', which {what}; expected the source of a kernel")
    try:
        source = sys.stdin.read() if file == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"got the file '{file}', which is not UTF-8 text; expected the source of a kernel") from None
    if not source.strip():
        raise UserError(f"got the file '{file}', which is empty; expected the source of a kernel")
    return source
