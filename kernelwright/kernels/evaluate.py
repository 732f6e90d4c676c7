"""One candidate through compiler, checks and clock: (task, source) -> Evaluation.

The parent is trusted and owns inputs, expected outputs, tolerance and verdict. A candidate runs in a process of its own
that sees the buffers of one call at a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kernelwright.errors import InfrastructureError, MissingTool, UnknownName, UserError
from kernelwright.kernels.backends import BACKENDS
from kernelwright.kernels.backends.base import Built, Call, Rejected, Workspace
from kernelwright.kernels.check import compare
from kernelwright.kernels.diagnose import diagnose
from kernelwright.kernels.reference import TIME_SETS, Case, Reference, load, time_cases
from kernelwright.kernels.stopwatch import Stopwatch
from kernelwright.types import Evaluation, Hack, Status, Task

# A timing is cut into processes, none of which is measured on inputs that it has seen before: there is no result to
# remember. Each calls on the first set of inputs unmeasured, then on every other set measured.
_PROCESSES, _WARM = 2, 2
MEASURED = _PROCESSES * (TIME_SETS - 1)
# a candidate that takes this many times as long as the reference is measured in one process: long times are steady, and
# nobody tampers to look slow
_SLOW = 2.0
_CALL_SECONDS = 0.5
# no single core of today moves more bytes a second, whatever cache they are in
_BYTES_A_SECOND = 2e12
# what the two clocks of a call differ by when nobody tampers: a switch of processes, and caches that are not as warm as
# in the call without a kernel
_SWITCH_MS, _REFILLED_A_SECOND = 0.003, 4e11
_STATUS = {"crash": Status.CRASH, "exit": Status.CRASH, "timeout": Status.TIMEOUT, "load": Status.COMPILE_ERROR}


def evaluate(task: Task, source: str | None, *, backend: str = "c", timing: bool = True, seed: int = 0) -> Evaluation:
    """Evaluate one candidate; see `Evaluator` for many."""
    with Evaluator(backend=backend, workers=1, timing=timing, seed=seed) as evaluator:
        return evaluator.evaluate(task, source)


class Evaluator:
    """Evaluates candidates: a bounded number at a time, each distinct one once. Safe to call from many threads.

    Args:
        backend: a key of `BACKENDS`.
        workers: candidates evaluated at a time, when None as many as there are processors for this process.
        timing: whether correct candidates are timed. Without it equal calls give equal records, `seconds` apart.
        seed: of the inputs. A run that trains keeps it secret from the policy simply by never printing it.
        cache: whether a source that was seen before gets the verdict it got then.

    Raises:
        UnknownName: no such backend.
        UserError: no worker, or a negative seed.
        MissingTool: this machine cannot use the backend; the message says what to install.
    """

    def __init__(
        self, *, backend: str = "c", workers: int | None = None, timing: bool = True, seed: int = 0, cache: bool = True
    ) -> None:
        if backend not in BACKENDS:
            raise UnknownName("backend", backend, BACKENDS)
        self.backend = BACKENDS[backend]
        if (workers is not None and workers < 1) or seed < 0:
            raise UserError(f"got workers={workers} and seed={seed}, expected workers >= 1 or None and a seed >= 0")
        if reason := self.backend.available():
            raise MissingTool(f"backend '{backend}': {reason}")
        self.timing = timing and self.backend.timed
        self.seed = seed
        self.hits = 0
        self.misses = 0
        self._slots = threading.BoundedSemaphore(workers or len(os.sched_getaffinity(0)))
        self._clock = threading.Lock()
        self._cache: dict[str, Future[Evaluation]] | None = {} if cache else None
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="kernelwright-"))
        self._clean = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._stopwatch = Stopwatch(seed=seed, calls=MEASURED) if self.timing else None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove what the evaluator has on disk and end its helper process. Evaluating afterwards is an error."""
        if self._stopwatch:
            self._stopwatch.close()
        self._clean()

    def evaluate(self, task: Task, source: str | None) -> Evaluation:
        """The verdict on a candidate; blocks until it is there.

        Args:
            source: text of the candidate, None when the reply held none.

        Raises:
            BadTask: the task's own reference is at fault.
            InfrastructureError: this side failed twice (compiler killed, disk full, no process).
        """
        if source is None or not source.strip():
            return self._record(task, Status.NO_CODE)
        if self._cache is None:
            self.misses += 1
            return self._twice(task, source)
        key = hashlib.sha256(f"{task!r}\0{source}".encode(errors="replace")).hexdigest()
        with self._lock:
            future = self._cache.get(key)
            first = future is None
            if future is None:
                future = self._cache[key] = Future()
            self.hits += not first
            self.misses += first
        if first:
            self._resolve(key, future, task, source)
        return future.result()

    def _resolve(self, key: str, future: Future[Evaluation], task: Task, source: str) -> None:
        """Fill a cache entry; a failure of ours is handed to all who wait and then forgotten."""
        try:
            future.set_result(self._twice(task, source))
        except BaseException as error:
            if self._cache is not None:
                self._cache.pop(key, None)
            future.set_exception(error)
            raise

    def _twice(self, task: Task, source: str) -> Evaluation:
        with self._slots:
            start = time.perf_counter()
            try:
                result = self._once(task, source)
            except (InfrastructureError, OSError):
                try:
                    result = self._once(task, source)
                except OSError as error:
                    raise InfrastructureError(f"evaluating failed twice: {error.strerror or error}") from error
        return dataclasses.replace(result, seconds=time.perf_counter() - start)

    def _once(self, task: Task, source: str) -> Evaluation:
        reference = load(task, seed=self.seed)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as own:
            space = Workspace(own=Path(own), shared=self._folder)
            built = self.backend.build(reference.interface, source, space)
            if isinstance(built, Rejected):
                return self._record(task, Status.COMPILE_ERROR, message=built.message, location=built.location)
            cases = reference.check_cases()
            calls = self.backend.run(built, reference.interface, cases, _allowed_seconds(cases), space)
            verdict = self._judge(reference, cases, calls)
            if not verdict.correct:
                return verdict
            verdict = dataclasses.replace(verdict, profile=built.profile)
            return self._time(reference, built, space, verdict) if self.timing else verdict

    def _judge(self, reference: Reference, cases: Sequence[Case], calls: Sequence[Call]) -> Evaluation:
        """The verdict on some calls: the first failure, or CORRECT."""
        largest = 0.0
        hacks: tuple[Hack, ...] = ()
        seen: dict[int, bytes] = {}
        for case, call in zip(cases, calls, strict=False):
            data = call.output.tobytes() if call.output is not None else b""
            # a timing warms up on the same inputs; equal bytes need no second look
            if call.status == "ok" and seen.get(case.draw) == data:
                continue
            verdict = self._judge_call(reference, case, call)
            if not verdict.correct:
                return verdict
            largest = max(largest, verdict.max_error or 0.0)
            hacks = hacks or borrowed(call, reference.task.policy)
            seen[case.draw] = data
        if len(calls) < len(cases):
            raise InfrastructureError("the runner stopped early without saying why")
        return self._record(reference.task, Status.CORRECT, max_error=largest, hacks=hacks)

    def _judge_call(self, reference: Reference, case: Case, call: Call) -> Evaluation:
        task = reference.task
        if call.status in _STATUS:
            return self._record(task, _STATUS[call.status], message=call.message, location=call.location)
        if call.output is None:
            return self._record(task, Status.WRONG, message=call.message)
        if call.status == "ok" and case.accepts(call.output):
            return self._record(task, Status.CORRECT)
        comparison = compare(call.output, case.expected, rtol=task.rtol, atol=task.atol, magnitude=case.magnitude)
        if comparison.ok:
            status = Status.CORRECT if call.status == "ok" else Status.WRONG
            return self._record(task, status, message=call.message, max_error=comparison.max_error)
        first = comparison.first
        return self._record(
            task,
            Status.WRONG,
            message=call.message or diagnose(reference, case, call.output, comparison),
            max_error=comparison.max_error,
            error_index=first,
            expected=float(case.expected[first]),
            got=float(call.output[first]),
        )

    def _time(self, reference: Reference, built: Built, space: Workspace, verdict: Evaluation) -> Evaluation:
        """Adds times to a correct verdict, or takes it back: the outputs of timed calls are checked as well."""
        kernel: list[float] = []
        against: list[float] = []
        hacks: list[Hack] = []
        bandwidth: dict[str, float] = {}
        processes = _PROCESSES
        assert self._stopwatch is not None
        for position, sets in enumerate(time_cases(reference)):
            due = self._stopwatch.times(reference.task, position, self._clock)
            moved = sum(array.nbytes for array in sets[0].inputs) + sets[0].output_bytes
            cases = [*[sets[0]] * _WARM, *sets[1:]]
            measured: list[Call] = []
            times: list[float] = []
            while len(measured) < processes * (TIME_SETS - 1):
                with self._clock:
                    calls = self.backend.run(built, reference.interface, cases, _allowed_seconds(cases), space)
                timed = self._judge(reference, cases, calls)
                if not timed.correct:
                    return timed
                measured += calls[_WARM:]
                times = [trusted_ms(call, moved) for call in measured]
                # at all shapes alike, so that each weighs the same
                if position == 0 and np.median(times) > _SLOW * np.median(due):
                    processes = 1
            kernel += times
            against += due
            hacks += suspicions(measured, moved)
            bandwidth = {"bandwidth_gbs": round(moved / float(np.median(times)) / 1e6, 3)}
        return dataclasses.replace(
            verdict,
            kernel_ms=tuple(kernel),
            reference_ms=tuple(against),
            hacks=(*verdict.hacks, *hacks),
            profile={**verdict.profile, **bandwidth},
        )

    def _record(self, task: Task, status: Status, **values: Any) -> Evaluation:
        return Evaluation(
            task=task.id, backend=self.backend.name, status=status, verified=self.backend.verified, **values
        )


def _allowed_seconds(cases: Sequence[Case]) -> float:
    """Limit of one call. It is constant for references that take no time worth mentioning, so that a verdict does not
    hang on how busy the machine was when the reference ran."""
    slowest = max(case.reference_seconds for case in cases)
    return _CALL_SECONDS if slowest < 0.1 else _CALL_SECONDS + 20 * slowest


def trusted_ms(call: Call, moved: float) -> float:
    """Processor time of a call.

    The clock beside the candidate is finer, but a candidate can tamper with it. It is believed as far as the clock out
    of its reach confirms it; what the two may differ by is small beside the time that `moved` bytes take, and at most
    half, so that tampering gains next to nothing.
    """
    doubt = _SWITCH_MS + 1e3 * moved / _REFILLED_A_SECOND
    return max(call.ms, 1e-6, call.outside_ms - min(doubt, 0.5 * call.outside_ms))


def suspicions(calls: Sequence[Call], moved: float) -> list[Hack]:
    """What a set of timed calls says against a candidate.

    Args:
        calls: the measured calls at one shape.
        moved: bytes of all inputs and of the output.
    """
    inside = float(np.median([call.ms for call in calls]))
    outside = float(np.median([call.outside_ms for call in calls]))
    taken = float(np.median([trusted_ms(call, moved) for call in calls]))
    found = []
    if outside > 3 * inside + 10:
        found.append(Hack(rule="clock", evidence=f"reported {inside:.3g} ms a call, but it took {outside:.3g} ms"))
    if taken < 1e3 * moved / _BYTES_A_SECOND:
        found.append(Hack(rule="faster than memory", evidence=f"{moved / 1e6:.3g} MB in {taken:.3g} ms"))
    return found


def borrowed(call: Call, policy: Sequence[str]) -> tuple[Hack, ...]:
    """A result that came from a library's own kernels, beyond those that the task's policy allows."""
    if call.launches is None:
        return ()
    found = []
    if call.launches == 0:
        found.append(Hack(rule="no kernel", evidence="forward launches no kernel of its own"))
    if other := [name for name in call.borrowed if name not in policy]:
        found.append(Hack(rule="library call", evidence=f"forward computes with torch: {', '.join(other[:4])}"))
    return tuple(found)
