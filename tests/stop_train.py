"""Run by test_stops.py in a process of its own: real training commands that are stopped, crowded out or out of space.

Torch is imported once; every command runs in a fork of this process. A profiling hook in the fork sends the signal when
the stage begins that is asked for. Prints what came of every command as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from runs import run_files
from tiny_model import tiny_llama, tiny_tokenizer

import kernelwright.engines.local
import kernelwright.report  # noqa: F401  (once for all forks)
from kernelwright.cli import main

# the function whose call begins a stage, and one that the main thread is in at the time
STAGES = {
    "loading": ("read_model", "train"),
    "measuring": ("generate", "_measure"),
    "sampling": ("generate", "_step"),
    "judging": ("step", "_step"),
    "update": ("update", "_step"),
    "saving": ("save", "checkpoint"),
}
SETTINGS = [
    "tasks_per_step=2", "group_size=2", "max_turns=2", "sampling.max_tokens=16", "sampling.budget=1500",
    "evaluate_every=1", "evaluate_samples=1", "evaluate_tasks=0", "heldout=None", "validation=builtin/relu",
    "environment.timing=False",
]  # fmt: skip


def stop_at(stage: str, number: int) -> None:
    """Send this process group, as Ctrl-C in a terminal does, a signal when the stage begins."""
    wanted, within = STAGES[stage]

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name != wanted or "kernelwright" not in frame.f_code.co_filename:
            return
        outer: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        while outer is not None and outer.f_code.co_name != within:
            outer = outer.f_back
        if outer is not None:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)
            os.killpg(0, number)

    threading.setprofile(hook)
    sys.setprofile(hook)


def begin(arguments: list[str], log: Path, stop: tuple[str, int] | None = None) -> int:
    """Start a command in a fork; its process id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    # ignored in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if stop is not None:
        stop_at(*stop)
    try:
        main(arguments)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    except BaseException:  # noqa: BLE001  (a traceback is what must not happen)
        traceback.print_exc()
    os._exit(99)


class Work:
    """Commands on one tiny model, and what came of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, dict[str, Any]] = {}
        tokenizer = tiny_tokenizer()
        tiny_llama(len(tokenizer)).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    def arguments(self, out: Path) -> list[str]:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        common = ["--model", str(self.folder / "model"), "--tasks", "builtin/relu", "--steps", "2"]
        resume = ["--resume"] if (out / "config.json").exists() else []
        return ["train", *common, *settings, "--out", str(out), *resume]

    def end(self, name: str, child: int) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.results[name] = {"code": code, "err": (self.folder / f"{name}.err").read_text()}
        return code

    def run(self, name: str, out: Path, stop: tuple[str, int] | None = None) -> int:
        return self.end(name, begin(self.arguments(out), self.folder / name, stop))

    def compare(self, name: str, out: Path) -> None:
        self.results[name]["equal"] = run_files(out) == run_files(self.folder / "whole")


def stops(work: Work, number: int) -> None:
    """One run that is stopped in every stage, going on each time."""
    name = signal.Signals(number).name
    for stage in STAGES:
        work.run(f"{name} {stage}", work.folder / name, (stage, number))
    work.run(f"{name} resumed", work.folder / name)
    work.compare(f"{name} resumed", work.folder / name)


def crowd(work: Work) -> None:
    """A second command on a directory that the first, which stands still, is writing."""
    out = work.folder / "crowded"
    first = begin(work.arguments(out), work.folder / "first", ("sampling", signal.SIGSTOP))
    os.waitpid(first, os.WUNTRACED)
    work.run("second", out)
    os.killpg(first, signal.SIGCONT)
    work.end("first", first)
    work.compare("first", out)


def fill(work: Work) -> None:
    """Disks of several sizes that are full at some point; more space, and on it goes."""
    disk = work.folder / "disk"
    disk.mkdir()
    for size in ("16k", "300k", "700k"):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            return
        try:
            work.run(f"disk {size}", disk / "run")
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            work.run(f"disk {size} resumed", disk / "run")
            work.compare(f"disk {size} resumed", disk / "run")
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def losses(work: Work) -> None:
    """A finished run of which a file of the newest checkpoint is gone or cut in half; then without that checkpoint."""
    lost = work.folder / "lost"
    newest = sorted((work.folder / "whole" / "checkpoints").glob("step-*"))[-1]
    for file, kind in (
        ("model.safetensors", "gone"),
        ("engine.pt", "half"),
        ("state.json", "half"),
        ("state.json", "gone"),
    ):
        shutil.rmtree(lost, ignore_errors=True)
        shutil.copytree(work.folder / "whole", lost)
        target = lost / "checkpoints" / newest.name / file
        data = target.read_bytes()
        target.unlink()
        if kind == "half":
            target.write_bytes(data[: len(data) // 2])
        work.run(f"{kind} {file}", lost)
    # state.json was the last: its checkpoint does not count without it, so this is the one before
    work.compare("gone state.json", lost)
    shutil.rmtree(lost / "checkpoints" / newest.name)
    work.run("without it", lost)
    work.compare("without it", lost)


def everything(folder: Path) -> None:
    torch.set_num_threads(1)
    work = Work(folder)
    work.run("whole", folder / "whole")
    stops(work, signal.SIGINT)
    stops(work, signal.SIGKILL)
    crowd(work)
    fill(work)
    losses(work)
    print(json.dumps(work.results))


if __name__ == "__main__":
    everything(Path(sys.argv[1]))
