"""The process in which Triton candidates run, without a GPU: `python -m kernelwright.kernels.backends.interpreter`.

It imports torch and Triton once and then, for every line of JSON on stdin, forks a child that runs one candidate. It
never sees a reference or an expected output. The answer to a line is how the child ended; what the candidate returned
is in files.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import pickle
import platform
import resource
import select
import signal
import struct
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MEMORY = 8 << 30
_FILE = 1 << 30
# what `forward` may do with torch: allocate, view, copy
_ALLOWED = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"),
    *("ones", "ones_like", "full", "full_like", "new_full", "fill_", "zero_", "view", "_unsafe_view", "reshape"),
    *("_reshape_alias", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "as_strided"),
    *(
        "alias",
        "detach",
        "lift_fresh",
        "clone",
        "copy_",
        "_to_copy",
        "contiguous",
        "split",
        "split_with_sizes",
        "chunk",
    ),
    *("unbind", "narrow", "flatten", "resize_", "set_", "_local_scalar_dense", "arange"),
}
_SECCOMP, _NO_NEW_PRIVILEGES, _SUBREAPER = 22, 38, 36
# clone, clone3 and what is refused outright: fork, vfork, execve, execveat, socket, ptrace
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 59, 322, 41, 101)),
    "aarch64": (0xC00000B7, 220, 435, (221, 281, 198, 117)),
}


def forbid_processes() -> None:
    """After this, the process can start threads but no processes, and can open no socket."""
    if platform.machine() not in _SYSTEM_CALLS:
        return
    arch, clone, clone3, refused = _SYSTEM_CALLS[platform.machine()]
    load, jump_equal, jump_set, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, arch), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    for number in refused:
        program += [(jump_equal, 0, 1, number), (answer, 0, 0, refuse)]
    # glibc falls back from clone3 to clone, whose flags can be looked at, when clone3 is unknown
    program += [(jump_equal, 0, 1, clone3), (answer, 0, 0, unknown)]
    program += [(jump_equal, 0, 3, clone), (load, 0, 0, 16), (jump_set, 1, 0, 0x00010000), (answer, 0, 0, refuse)]
    program += [(answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    system = ctypes.CDLL(None)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.prctl(_SECCOMP, 2, header, 0, 0)


class _Devices(TorchFunctionMode):
    """Lets wrappers written for a GPU run: every device is the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        args = tuple("cpu" if _is_gpu(value) else value for value in args)
        kwargs = {key: "cpu" if _is_gpu(value) else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_gpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    )


class _Trace(TorchDispatchMode):
    """Notes what torch computes outside of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0
        self.launches = 0
        self.borrowed: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func.overloadpacket.__name__
        if not self.inside and name not in _ALLOWED:
            self.borrowed[name] = None
        return func(*args, **(kwargs or {}))


def _imitate_gpu() -> None:
    """Stands in for the calls that wrappers make around kernels."""

    def same(tensor: Any, *_args: Any, **_keywords: Any) -> Any:
        return tensor

    patched: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "cuda", same),
        (torch.nn.Module, "cuda", same),
        (torch.Tensor, "is_cuda", property(lambda _: True)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "synchronize", lambda _device=None: None),
        (torch.cuda, "set_device", lambda _device: None),
    ]
    for owner, name, value in patched:
        setattr(owner, name, value)


def _count_launches(trace: _Trace) -> None:
    """Counts kernels as they start, and lets autotuned ones run with their first configuration."""
    from triton.runtime import autotuner, interpreter

    original = interpreter.GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        trace.launches += 1
        trace.inside += 1
        try:
            return original(executor, *args, **kwargs)
        finally:
            trace.inside -= 1

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **{**kwargs, **tuner.configs[0].all_kwargs()})

    patched: list[tuple[Any, str, Any]] = [
        (interpreter.GridExecutor, "__call__", call),
        (autotuner.Autotuner, "run", run),
    ]
    for owner, name, function in patched:
        setattr(owner, name, function)


def _import(path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    return module


def _failure(error: BaseException, path: str) -> dict[str, Any]:
    """What was raised, and the last line of the candidate that it went through."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [
        frame.lineno
        for link in (error, root)
        for frame in traceback.extract_tb(link.__traceback__)
        if frame.filename == path
    ]
    first = (str(root).strip().splitlines() or [""])[0]
    return {"error": f"{type(root).__name__}: {first}"[:300], "line": lines[-1] if lines else None}


def _candidate(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the candidate on every case; one report a case, the last one says why it is the last."""
    trace = _Trace()
    _imitate_gpu()
    _count_launches(trace)
    plan = pickle.loads(Path(request["plan"]).read_bytes())
    reports: list[dict[str, Any]] = []
    phase = "load"
    try:
        with _Devices():
            module = _import(request["source"])
            if not hasattr(module, "ModelNew"):
                return [{"phase": phase, "error": "no class ModelNew is defined", "line": None}]
            model = module.ModelNew(*plan["initial"], **plan["keywords"])
            phase = "call"
            for index, arrays in enumerate(plan["cases"]):
                reports.append(_case(model, plan, arrays, trace, f"{request['results']}/{index}.npy"))
    # the boundary to generated code: whatever it raises is the answer
    except BaseException as error:  # noqa: BLE001
        reports.append({"phase": phase, **_failure(error, request["source"])})
    return reports


def _case(model: Any, plan: dict[str, Any], arrays: list[np.ndarray], trace: _Trace, path: str) -> dict[str, Any]:
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    count = len(tensors) - len(plan["parameters"])
    state = dict(zip(plan["parameters"], tensors[count:], strict=True))
    if isinstance(model, torch.nn.Module):
        known = model.state_dict()
        fits = {name: t for name, t in state.items() if name in known and known[name].shape == t.shape}
        model.load_state_dict(fits, strict=False)
    queue = iter(tensors[:count])
    arguments = [next(queue) if value is None else value for value in plan["arguments"]]
    trace.launches = 0
    with torch.no_grad(), trace:
        result = model(*arguments)
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    # a subclass could compute when it is compared
    if not isinstance(result, torch.Tensor) or type(result) not in (torch.Tensor, torch.nn.Parameter):
        return {"phase": "result", "error": f"forward returns {type(result).__name__}, expected one tensor"}
    changed = [i for i, (t, a) in enumerate(zip(tensors, arrays, strict=True)) if t.numpy().tobytes() != a.tobytes()]
    np.save(path, result.detach().contiguous().numpy())
    return {"phase": "ok", "changed": changed[:1], "launches": trace.launches, "library": list(trace.borrowed)}


def _child(request: dict[str, Any]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, 256)
    seconds = int(request["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forbid_processes()
    reports = _candidate(request)
    Path(f"{request['results']}/report.json").write_text(json.dumps(reports))


def _end(pid: int, seconds: float) -> int:
    """Waits for the child and everything it left behind; its wait status, or -1 when it had to be stopped."""
    descriptor = os.pidfd_open(pid)
    stopped = not select.select([descriptor], [], [], seconds)[0]
    os.close(descriptor)
    for target in (os.killpg, os.kill):
        try:
            target(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    _, status = os.waitpid(pid, 0)
    return -1 if stopped else status


def main() -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # what every candidate needs is imported once, here: a first operation under a mode alone imports 800 modules
    importlib.import_module("triton.language")
    with _Devices(), _Trace():
        torch.empty(1, device="cuda").contiguous()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _child(request)
            finally:
                os._exit(0)
        status = _end(pid, request["seconds"] + 5)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
