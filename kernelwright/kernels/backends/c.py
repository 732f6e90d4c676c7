"""C candidates: compiled with the machine's C compiler, run by `runner.c`, really timed."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kernelwright.errors import BadTask, InfrastructureError, MissingTool
from kernelwright.kernels.backends.base import Backend, Built, Call, CallStatus, Rejected, Workspace, store
from kernelwright.kernels.reference import Array, Case, Interface, load
from kernelwright.kernels.vectorised import limit
from kernelwright.types import Location, Task

_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "bool": "unsigned char",
}
# nobody reads errno, and without it a kernel may ask for vectorised mathematics
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp"]
_FLAGS += ["-shared", "-fPIC", "-std=gnu17", "-Werror=implicit-function-declaration"]
# libc, libm and libgomp are in the runner already: to link the candidate against them as well would cost a sixth of the
# compile time. The report names the loops that were vectorised.
_GCC_FLAGS = ("-nostdlib", "-fopt-info-loop-vec-optimized")
_RUNNER_FLAGS = ("-O2", "-fopenmp", "-Wl,--no-as-needed", "-lm", "-ldl")
_COMPILE_SECONDS = 10
_COMPILE_MEMORY, _COMPILE_FILE = 2 << 30, 64 << 20
_MAX_BUFFERS_AND_SIZES = 40
# characters of a compiler's message, and of a line of the source, that a verdict repeats
_SHOWN = 400
_DIAGNOSTIC = re.compile(r"^kernel\.c:(\d+):(\d+): (?:fatal )?error: (.*)$", re.MULTILINE)
_STATUSES: dict[int, CallStatus] = {1: "ok", 2: "crash", 3: "timeout", 4: "exit", 5: "guard", 6: "input", 7: "load"}
_CRASHES: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault: an access outside the arrays",
    signal.SIGBUS: "bus error: an access outside the arrays",
    signal.SIGFPE: "integer division by zero",
    signal.SIGABRT: "aborted: the heap was overwritten or abort() was called",
    signal.SIGILL: "illegal instruction: a trap or a path that cannot be reached",
}
_building = threading.Lock()


def signature(interface: Interface) -> str:
    """The C prototype that a candidate must define."""
    parts = [f"const {_c_type(array)} *{array.name}" for array in interface.inputs]
    parts += [f"{_c_type(interface.output)} *{interface.output.name}", *(f"int {size}" for size in interface.sizes)]
    return f"void kernel({', '.join(parts)})"


def instructions(task: Task) -> str:
    """The backend's rules for a task, as the policy reads them."""
    interface = load(task).interface
    shapes = ", ".join(f"{a.name} [{', '.join(a.shape) or '1'}]" for a in (*interface.inputs, interface.output))
    return "\n".join(
        [
            "Define exactly this function in one C translation unit:",
            f"{signature(interface)};",
            f"Arrays are dense, row-major: {shapes}.",
            "Write every element of out; any sizes >= 1 must work.",
            "Only the C library and libm; built with cc -O3 -march=native -fno-math-errno -fopenmp.",
        ]
    )


def available() -> str | None:
    """None, or what to install."""
    if not Path("/proc/self").exists():
        return "C kernels are run on Linux only"
    try:
        _runner()
    except (MissingTool, InfrastructureError) as error:
        return str(error)
    return None


def build(interface: Interface, source: str, workspace: Workspace) -> Built | Rejected:
    """Compiles a candidate.

    The prototype stands in front of the source, so that a wrong signature is a compile error and no crash.

    Raises:
        MissingTool: there is no C compiler.
        InfrastructureError: the compiler could not be started or the disk is full.
    """
    runner = _runner()
    text = f'{signature(interface)};\n#line 1 "kernel.c"\n{source}\n'
    (workspace.own / "kernel.c").write_text(text, encoding="utf-8", errors="replace")
    command = [str(runner), "limit", str(_COMPILE_SECONDS), str(_COMPILE_MEMORY), str(_COMPILE_FILE), _compiler() or ""]
    command += [*_FLAGS, "-x", "c", "kernel.c", "-o", "kernel.so"]
    command += _GCC_FLAGS if _is_gcc() else ["-lm"]
    code, output = _spawn(command, workspace.own, _COMPILE_SECONDS + 2)
    if code == 0:
        return Built(path=workspace.own / "kernel.so", profile=limit(source, output) if _is_gcc() else {})
    if "No space left on device" in output or code == 3:
        raise InfrastructureError(f"the C compiler could not work: {output.strip()[-200:]}")
    if found := _DIAGNOSTIC.search(output):
        return Rejected(message=_plain(found[3]), location=_location(source, int(found[1]), int(found[2])))
    if code is None or "CPU time limit" in output or "Killed" in output:
        return Rejected(message=f"the compiler was stopped after {_COMPILE_SECONDS} seconds")
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()[-1:]
    return Rejected(message=_plain(lines[0]) if lines else "the compiler failed without a message")


def run(built: Built, interface: Interface, cases: Sequence[Case], seconds: float, workspace: Workspace) -> list[Call]:
    """Calls the candidate on each case in turn, in one process, until something goes wrong."""
    plan, inputs = _prepare(interface, cases, workspace.shared)
    records = 32 * len(cases)
    starts = np.cumsum([records, *((case.output_bytes + 63) // 64 * 64 for case in cases)])
    results = workspace.own / "results"
    with results.open("wb") as file:
        file.truncate(int(starts[-1]) + 256)
    command = [str(_runner()), "call", str(built.path), str(plan), str(inputs), str(results)]
    command += [str(int(seconds * 1000)), str(int(seconds * 1000) + 2000)]
    code, output = _spawn(command, workspace.own, len(cases) * (seconds + 2) + 30)
    if code != 0:
        raise InfrastructureError(f"the runner of C kernels failed ({code}): {output.strip()[-200:]}")
    with results.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    table = np.frombuffer(data, dtype=np.int64, count=records // 8).reshape(-1, 4)
    calls = []
    for case, start, row in zip(cases, starts.tolist(), table.tolist(), strict=False):
        if row[0] == 0:
            break
        calls.append(_call(interface, case, row, data[start:]))
    return calls


def _call(interface: Interface, case: Case, row: list[int], data: memoryview) -> Call:
    status, detail = _STATUSES[row[0]], row[1]
    if status == "load":
        return Call(status=status, message=_undefined(bytes(data[:240]).split(b"\0")[0].decode(errors="replace")))
    if status == "crash":
        return Call(status=status, message=_CRASHES.get(detail) or f"killed by {signal.Signals(detail).name}")
    if status == "exit":
        return Call(status=status, message="the kernel ended the process")
    if status == "timeout":
        return Call(status=status, message="the kernel did not return in time; look for an endless loop")
    names = [array.name for array in (*interface.inputs, interface.output)]
    message = ""
    if status == "guard":
        what = "output buffer" if detail == len(names) - 1 else f"buffer of {names[detail]}"
        message = f"the kernel wrote outside the {what}"
    if status == "input":
        message = f"the kernel changed its input {names[detail]}"
    output = np.frombuffer(data, dtype=case.output_dtype, count=case.expected.size).reshape(case.expected.shape)
    return Call(status=status, message=message, output=output, ms=row[2] / 1e6, outside_ms=row[3] / 1e6)


def _prepare(interface: Interface, cases: Sequence[Case], shared: Path) -> tuple[Path, Path]:
    """Plan and inputs of some cases as files; written once, since every candidate of a task gets the same."""
    if len(interface.inputs) + 1 + len(interface.sizes) > _MAX_BUFFERS_AND_SIZES:
        raise BadTask(f"a C kernel takes at most {_MAX_BUFFERS_AND_SIZES} arguments; use a smaller model")
    name = hashlib.sha256("\n".join(case.key for case in cases).encode()).hexdigest()[:24]
    paths = shared / f"{name}.plan", shared / f"{name}.inputs"
    if paths[0].exists():
        return paths
    plan, parts, offset = [len(cases)], [], 0
    placed: dict[int, int] = {}
    for case in cases:
        plan.append(len(case.inputs))
        for array in case.inputs:
            if id(array) not in placed:
                placed[id(array)] = offset
                parts.append(array.tobytes() + bytes(-array.nbytes % 64))
                offset += len(parts[-1])
            plan += [placed[id(array)], array.nbytes]
        plan += [case.output_bytes, case.poison, len(interface.sizes), *(case.sizes[name] for name in interface.sizes)]
    store(paths[1], b"".join(parts))
    store(paths[0], np.array(plan, dtype=np.int64).tobytes())
    return paths


def _spawn(command: list[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Exit code (None: stopped after `seconds`) and what was printed."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": str(folder)}
    log = folder / "log"
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureError(f"{command[0]} could not be started: {error.strerror}") from error
        code = process.wait() if _ended(process.pid, seconds) else None
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("rb") as file:
        return code, file.read(1 << 20).decode(errors="replace")


def _ended(pid: int, seconds: float) -> bool:
    """Whether a child ended in time. `Popen.wait` with a limit would look only every 50 ms."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@functools.cache
def _compiler() -> str | None:
    if chosen := os.environ.get("CC"):
        # another compiler than the one that was asked for would be a surprise
        return shutil.which(chosen)
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def _is_gcc() -> bool:
    version = subprocess.run([_compiler() or "cc", "--version"], capture_output=True, text=True, check=False)
    return "Free Software Foundation" in version.stdout


def _runner() -> Path:
    """Path of the compiled `runner.c`; built once a user and version, in the user's cache folder."""
    compiler = _compiler()
    if compiler is None:
        if chosen := os.environ.get("CC"):
            raise MissingTool(
                f"CC is '{chosen}', expected one program that is there; set CC to a C compiler or unset it"
            )
        raise MissingTool("no C compiler was found; install gcc (apt install gcc) or set CC")
    with _building:
        return _build_runner(compiler)


@functools.cache
def _build_runner(compiler: str) -> Path:
    source = Path(__file__).parent.parent / "runner.c"
    version = source.read_bytes() + repr((compiler, _RUNNER_FLAGS, "mvec")).encode()
    name = f"runner-{hashlib.sha256(version).hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernelwright"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (cache / name).exists():
            return cache / name
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            target = Path(folder) / name
            command = [compiler, "-o", str(target), str(source), *_RUNNER_FLAGS]
            # glibc keeps the vectorised mathematics that -ffast-math calls in a library of its own, others do not
            done = subprocess.run([*command, "-lmvec"], capture_output=True, text=True, check=False)
            if done.returncode:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}"
                raise MissingTool(f"{compiler} does not compile C ({said}); install gcc (apt install gcc) or set CC")
            os.replace(target, cache / name)
    except OSError as error:
        raise InfrastructureError(
            f"cannot build the runner of kernels in {cache}: {error.strerror}; free some space, or set XDG_CACHE_HOME"
        ) from error
    return cache / name


def _c_type(array: Array) -> str:
    if array.dtype not in _C_TYPES:
        raise BadTask(f"'{array.name}' is {array.dtype}; C kernels take {', '.join(_C_TYPES)}")
    return _C_TYPES[array.dtype]


def _location(source: str, line: int, column: int) -> Location:
    lines = source.splitlines()
    return Location(line=line, column=column, text=lines[line - 1][:_SHOWN] if 0 < line <= len(lines) else "")


def _plain(message: str) -> str:
    return re.sub(r"\s*\[-W[^\]]*\]$", "", message.strip())[:_SHOWN]


def _undefined(message: str) -> str:
    found = re.search(r"undefined symbol: (\w+)", message)
    if found and found[1] == "kernel":
        return "no function named 'kernel' is defined"
    return f"undefined symbol '{found[1]}'" if found else "the library does not load"


BACKEND = Backend(
    name="c",
    language="C",
    fence="c",
    verified="cpu",
    timed=True,
    instructions=instructions,
    available=available,
    build=build,
    run=run,
)
