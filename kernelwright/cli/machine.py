"""`doctor`: what this machine can do, and what to install for the rest."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from kernelwright.cli.candidates import cpu_name
from kernelwright.cli.catalogue import Json


class Finding(NamedTuple):
    """One line of the diagnosis."""

    name: str
    works: bool
    # what was found, or what is lacking
    detail: str
    # what it is for and how to get it; empty when it works
    remedy: str = ""


def doctor(*, as_json: Json = False) -> None:
    """What this machine can do: compilers, GPU, Triton, vLLM, Ray, sandbox features."""
    findings = diagnose()
    if as_json:
        print(json.dumps({"machine": _machine(), "findings": [finding._asdict() for finding in findings]}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in _machine().items()))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'yes' if finding.works else 'no ':<3}  {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"     {'':<{width}}  -> {finding.remedy}")


def diagnose() -> list[Finding]:
    """All findings, what the main job needs first."""
    return [
        *_backends(),
        _gpu(),
        _program("nvcc", "CUDA compiler", "for CUDA kernels: install the CUDA toolkit"),
        _package("triton", "for Triton kernels: pip install 'kernelwright[gpu]'"),
        _package("vllm", "for faster sampling on a GPU: pip install 'kernelwright[vllm]'"),
        _package("ray", "for evaluation on several machines: pip install 'kernelwright[ray]'"),
        _package("tinker", "for training on a remote service: pip install 'kernelwright[tinker]'"),
        _package("verl", "for exporting to verl: pip install 'kernelwright[verl]'"),
        _sandbox(),
    ]


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _backends() -> list[Finding]:
    from kernelwright.kernels import BACKENDS

    found = []
    for name, backend in BACKENDS.items():
        reason = backend.available()
        found.append(Finding(f"backend {name}", reason is None, reason or f"{backend.language} kernels work"))
    return found


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("gpu", works=True, detail=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
    built = f"torch {torch.__version__}" + ("" if torch.version.cuda else " is built without CUDA")
    return Finding(
        "gpu", works=False, detail=built, remedy="not needed for the quickstart; for larger models use a GPU"
    )


def _program(name: str, title: str, remedy: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(title, works=False, detail=f"{name} is not on the PATH", remedy=remedy)
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in shown.stdout.splitlines() if "release" in line] or shown.stdout.splitlines() or [path]
    return Finding(title, works=shown.returncode == 0, detail=lines[0].strip())


def _package(name: str, remedy: str) -> Finding:
    try:
        return Finding(name, works=True, detail=version(name))
    except PackageNotFoundError:
        return Finding(name, works=False, detail="not installed", remedy=remedy)


def _sandbox() -> Finding:
    """User namespaces would let candidates run without a network and with a private file system."""
    if shutil.which("unshare") is None:
        return Finding("namespaces", works=False, detail="unshare is not on the PATH", remedy="install util-linux")
    run = subprocess.run(
        ["unshare", "--user", "--net", "true"], capture_output=True, text=True, timeout=20, check=False
    )
    detail = "user and network namespaces" if run.returncode == 0 else "the system does not allow user namespaces"
    remedy = "" if run.returncode == 0 else "candidates are then held by process limits only; use a container or a VM"
    return Finding("namespaces", works=run.returncode == 0, detail=detail, remedy=remedy)
