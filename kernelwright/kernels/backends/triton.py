"""Triton candidates in Triton's interpreter: whether they are right, never how fast they are.

The interpreter runs programs one after another on the processor, so that a race goes unnoticed: a verdict reached here
says `verified="interpreter"`, which is less than a GPU's.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelwright.errors import BadTask, InfrastructureError
from kernelwright.kernels.backends.base import Backend, Built, Call, Rejected, Workspace, store
from kernelwright.kernels.reference import Array, Case, Interface, load
from kernelwright.types import Location, Task

# the interpreter takes half a second for a million additions
_SECONDS = 20
_idle: list[subprocess.Popen[str]] = []
_lock = threading.Lock()


def instructions(task: Task) -> str:
    """The backend's rules for a task, as the policy reads them."""
    interface = load(task).interface
    inputs = interface.inputs[: len(interface.inputs) - len(interface.parameters)]
    return "\n".join(
        [
            "Define class ModelNew(torch.nn.Module) in one Python module: constructor and forward as in Model.",
            f"forward takes {', '.join(map(_described, inputs))} and returns {_described(interface.output)}.",
            "Its computations are your own @triton.jit kernels; of torch only allocations and views are allowed.",
            "Any sizes >= 1 must work.",
            "Kernels run in Triton's interpreter: no bfloat16, block pointers, libdevice or inline assembly.",
        ]
    )


def available() -> str | None:
    """None, or what to install."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    return None


def build(interface: Interface, source: str, workspace: Workspace) -> Built | Rejected:
    """Parses the module and refuses what the interpreter computes wrongly; the rest shows when it runs.

    Raises:
        BadTask: the task works on bfloat16, which the interpreter gets wrong.
    """
    for array in (*interface.inputs, interface.output):
        if array.dtype == "bfloat16":
            raise BadTask(f"'{array.name}' is bfloat16, which Triton's interpreter computes wrongly; use float32")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        where = error if isinstance(error, SyntaxError) else None
        location = _location(source, where.lineno, where.offset) if where else None
        return Rejected(message=where.msg if where else str(error), location=location)
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name == "bfloat16" and isinstance(node, (ast.Attribute, ast.Name)):
            message = "Triton's interpreter computes bfloat16 wrongly; use float32 or float16"
            return Rejected(message=message, location=_location(source, node.lineno, node.col_offset + 1))
    path = workspace.own / "candidate.py"
    path.write_text(source, encoding="utf-8", errors="replace")
    return Built(path=path)


def run(built: Built, interface: Interface, cases: Sequence[Case], seconds: float, workspace: Workspace) -> list[Call]:
    """Calls the candidate on each case in turn, in one process forked for it, until something goes wrong."""
    plan = _prepare(interface, cases, workspace.shared)
    results = workspace.own / "results"
    results.mkdir(exist_ok=True)
    limit = max(_SECONDS, int(seconds))
    request = {"source": str(built.path), "plan": str(plan), "results": str(results), "seconds": limit}
    status = _ask(request)
    report = results / "report.json"
    if status == -1 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return [Call(status="timeout", message="the kernel did not return in time; look for an endless loop")]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        what = "segmentation fault: an access outside the tensors" if name == "SIGSEGV" else f"killed by {name}"
        return [Call(status="crash", message=what)]
    if not report.exists():
        return [Call(status="exit", message="the candidate ended the process")]
    source = built.path.read_text(encoding="utf-8")
    reports = _reports(report)
    return [
        _call(interface, case, said, source, results / f"{index}.npy")
        for index, (case, said) in enumerate(zip(cases, reports, strict=False))
    ]


def _reports(path: Path) -> list[dict[str, Any]]:
    """The child's reports. The candidate ran in that child, so a malformed report is the candidate's doing."""
    try:
        reports = json.loads(path.read_text())
    except ValueError:
        reports = None
    if isinstance(reports, list) and reports and all(isinstance(said, dict) and "phase" in said for said in reports):
        return reports
    return [{"phase": "call", "error": "the candidate wrote over its report"}]


def _call(interface: Interface, case: Case, said: dict[str, Any], source: str, path: Path) -> Call:
    if said["phase"] in ("load", "call"):
        location = _location(source, said["line"], None) if said.get("line") else None
        status = "load" if said["phase"] == "load" else "crash"
        return Call(status=status, message=str(said.get("error", "")), location=location)
    if said["phase"] == "result":
        return Call(status="shape", message=str(said.get("error", "")))
    try:
        output = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        return Call(status="shape", message="forward returned nothing that can be read")
    if output.shape != case.expected.shape:
        return Call(status="shape", message=f"the result has another shape than {_described(interface.output)}")
    if output.dtype != case.output_dtype:
        return Call(status="shape", message=f"the result is {output.dtype}, expected {case.output_dtype}")
    library, launches = tuple(map(str, said.get("library", ()))), said.get("launches")
    if said.get("changed"):
        name = interface.inputs[said["changed"][0]].name
        return Call(status="input", message=f"the kernel changed its input {name}", output=output)
    return Call(status="ok", output=output, borrowed=library, launches=launches)


def _prepare(interface: Interface, cases: Sequence[Case], shared: Path) -> Path:
    name = hashlib.sha256("\n".join(case.key for case in cases).encode()).hexdigest()[:24]
    path = shared / f"{name}.pickle"
    if not path.exists():
        plan = {
            "initial": interface.initial,
            "keywords": dict(interface.keywords),
            "arguments": interface.arguments,
            "parameters": interface.parameters,
            "cases": [list(case.inputs) for case in cases],
        }
        store(path, pickle.dumps(plan))
    return path


def _ask(request: dict[str, Any]) -> int:
    """The wait status of the child that ran the candidate. Interpreter processes are kept for the next question."""
    with _lock:
        process = _idle.pop() if _idle else None
    process = process or _start()
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError as error:
        _stop(process)
        raise InfrastructureError(f"the interpreter process is gone: {error.strerror}") from error
    if not answer:
        _stop(process)
        raise InfrastructureError("the interpreter process ended by itself")
    with _lock:
        _idle.append(process)
    return int(json.loads(answer)["status"])


def _start() -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "kernelwright.kernels.backends.interpreter"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        raise InfrastructureError(f"the interpreter process did not start: {error.strerror}") from error


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@atexit.register
def _stop_all() -> None:
    while _idle:
        _stop(_idle.pop())


def _described(array: Array) -> str:
    return f"{array.name} {array.dtype} [{', '.join(array.shape)}]"


def _location(source: str, line: int | None, column: int | None) -> Location | None:
    lines = source.splitlines()
    if not line or line > len(lines):
        return None
    return Location(line=line, column=column, text=re.sub(r"\s+$", "", lines[line - 1]))


BACKEND = Backend(
    name="triton",
    language="Triton",
    fence="python",
    verified="interpreter",
    timed=False,
    instructions=instructions,
    available=available,
    build=build,
    run=run,
)
