"""The main job over several seeds: shares before and after, minutes, and the peak memory of all its processes together.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--out runs/quickstart] [-- OPTIONS OF kernelwright train]

Memory is the proportional set size (shared pages counted once) of the run and all its descendants, read once a second
from /proc, so this runs on Linux only. Runs go one after another; leave the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from kernelwright import store


def descendants(root: int) -> list[int]:
    """`root` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just gone
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found.extend(children.get(process, []))
    return found


def memory(root: int) -> float:
    """Proportional set size of a process and its descendants, in GiB."""
    total = 0
    for process in descendants(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 2**20


def trained(folder: Path, seed: int, options: list[str]) -> tuple[float, float]:
    """Train one seed into `folder`: (minutes, peak memory in GiB)."""
    command = [sys.executable, "-m", "kernelwright.cli", "train", "--seed", str(seed), "--out", str(folder), *options]
    began, peak = time.monotonic(), 0.0
    with subprocess.Popen(command) as run:
        while run.poll() is None:
            peak = max(peak, memory(run.pid))
            time.sleep(1)
    if run.returncode:
        raise SystemExit(run.returncode)
    return (time.monotonic() - began) / 60, peak


def row(folder: Path) -> str:
    """Correct attempts and speedup of correct kernels, before -> after, turn by turn."""
    found = {(line["phase"], line["set"]): line for line in store.evaluations(folder) if line["phase"] != "during"}
    parts: list[str] = []
    for name in ("train", "heldout"):
        before, after = (found[phase, name]["turns"] for phase in ("before", "after"))
        correct = ["/".join(f"{turn['correct']:.0%}" for turn in side) for side in (before, after)]
        speed = [side[-1]["speedup_geomean"] for side in (before, after)]
        parts.append(f"{name} {correct[0]} -> {correct[1]}, last turn {speed[0]:.2f}x -> {speed[1]:.2f}x")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("options", nargs="*", help="passed on to `kernelwright train`, after --")
    arguments = parser.parse_args()
    rows: list[str] = []
    for seed in arguments.seeds:
        folder = arguments.out / f"seed-{seed}"
        minutes, peak = trained(folder, seed, arguments.options)
        rows.append(f"seed {seed}: {minutes:.1f} min, peak {peak:.2f} GiB; {row(folder)}")
        print(rows[-1], flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
