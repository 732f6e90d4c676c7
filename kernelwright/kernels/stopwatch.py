"""Times the PyTorch reference in a clean process with one thread, where no candidate and no busy parent disturbs it.

`python -m kernelwright.kernels.stopwatch` is that process: it answers each line of JSON on stdin with one on stdout.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from kernelwright.errors import InfrastructureError
from kernelwright.kernels.reference import TIME_SETS, Reference, time_draw
from kernelwright.types import Task

_WARM = 6


class Stopwatch:
    """The reference times of tasks, each measured once; the process starts with the first question."""

    def __init__(self, *, seed: int, calls: int) -> None:
        self._seed = seed
        self._calls = calls
        self._known: dict[str, list[float]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def times(self, task: Task, position: int, clock: threading.Lock) -> list[float]:
        """Milliseconds of each call of the reference at time shape `position`  [calls].

        Args:
            clock: held while something is timed, so that timings do not disturb each other.

        Raises:
            InfrastructureError: the process died.
        """
        key = f"{position} {task!r}"
        with self._lock:
            if key not in self._known:
                question = {"task": task, "position": position, "seed": self._seed, "calls": self._calls}
                self._ask({"ready": True})
                with clock:
                    self._known[key] = self._ask(question)
            return self._known[key]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _ask(self, question: dict[str, Any]) -> list[float]:
        if self._process is None:
            self._process = _start()
        stdin, stdout = self._process.stdin, self._process.stdout
        try:
            assert stdin and stdout
            stdin.write(msgspec.json.encode(question) + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except OSError as error:
            self._end()
            raise InfrastructureError(f"the process that times references is gone: {error.strerror}") from error
        if not answer:
            self._end()
            raise InfrastructureError("the process that times references ended by itself")
        return msgspec.json.decode(answer, type=list[float])


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # outputs are allocated from memory that is there already: page faults are not what a kernel is compared with
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "kernelwright.kernels.stopwatch"]
    try:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise InfrastructureError(f"the process that times references did not start: {error.strerror}") from error


def measure(task: Task, position: int, *, seed: int, calls: int) -> list[float]:
    """Eager float32 processor times in ms on the inputs that candidates get, the sets taking turns  [calls]."""
    reference = Reference(task, seed=seed)
    sizes = reference.time_shapes[position]
    sets = [reference.values(sizes, "signed", time_draw(position, j)) for j in range(TIME_SETS)]
    times = []
    with torch.no_grad():
        for i in range(_WARM + calls):
            start = time.process_time_ns()
            reference.model(*sets[i % TIME_SETS])
            times.append(1e-6 * (time.process_time_ns() - start))
    return times[_WARM:]


def _serve() -> None:
    torch.set_num_threads(1)
    # what a reference prints must not end up between the answers
    answers = os.fdopen(os.dup(1), "wb")
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin.buffer:
            question = msgspec.json.decode(line)
            times: list[float] = []
            if "task" in question:
                task = msgspec.convert(question["task"], Task)
                times = measure(task, question["position"], seed=question["seed"], calls=question["calls"])
            answers.write(msgspec.json.encode(times) + b"\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
