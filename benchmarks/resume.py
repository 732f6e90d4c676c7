"""Does a run that is killed again and again end with the same bits? Two whole runs against one killed with SIGKILL.

    python benchmarks/resume.py [--kills 5] [--out runs/resume] [-- OPTIONS OF kernelwright train]

Correctness-only reward, so that no clock decides anything. All three train with the same seed; the last is killed at
random moments and resumed each time. On a CPU: a GPU's sums depend on the order in which threads finish. Exits 1 when
`metrics.jsonl` or `evaluations.jsonl` of the three differ in a byte.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

_FILES = ("metrics.jsonl", "evaluations.jsonl")
_SETTINGS = ["--set", "environment.reward=correctness", "--set", "environment.timing=false"]


def start(folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """A run in a process group of its own; it goes on where the folder's run was, if there is one."""
    resume = ["--resume"] if (folder / "config.json").exists() else []
    command = [sys.executable, "-m", "kernelwright.cli", "train", "--out", str(folder), *_SETTINGS, *options, *resume]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def whole(folder: Path, options: list[str]) -> float:
    """Train to the end: seconds."""
    began = time.monotonic()
    if code := start(folder, options).wait():
        raise SystemExit(f"the run in {folder} ended with exit code {code}")
    return time.monotonic() - began


def steps(folder: Path) -> int:
    """Steps that are on record."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def killed(folder: Path, options: list[str], *, seconds: float, total: int, kills: int) -> None:
    """The same, but killed `kills` times: at random steps, and there at a random moment of about two steps."""
    for target in sorted(random.sample(range(total), min(kills, total))):
        run = start(folder, options)
        while run.poll() is None and steps(folder) < target:
            time.sleep(0.05)
        time.sleep(random.uniform(0, 2 * seconds / (total + 1)))
        ended = run.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        print(f"killed after step {steps(folder)}" if not ended else "not killed: the run had ended", flush=True)
    whole(folder, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/resume"))
    parser.add_argument("options", nargs="*", help="passed on to `kernelwright train`, after --")
    arguments = parser.parse_args()
    folders = [arguments.out / name for name in ("first", "second", "killed")]
    seconds = [whole(folder, arguments.options) for folder in folders[:2]]
    killed(folders[2], arguments.options, seconds=seconds[0], total=steps(folders[0]), kills=arguments.kills)
    differ = False
    for name in _FILES:
        first, *others = [(folder / name).read_bytes() for folder in folders]
        words = ["equal" if other == first else "DIFFERENT" for other in others]
        differ = differ or "DIFFERENT" in words
        print(f"{name}: {len(first)} bytes; second run {words[0]}, killed run {words[1]}")
    raise SystemExit(int(differ))


if __name__ == "__main__":
    main()
