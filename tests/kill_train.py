"""Run by test_train.py in a process of its own: kill training at its n-th file operation, for many n, and go on.

Prints how many runs were killed and which of them ended in other files than an unbroken run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from runs import guess_recipe, guess_task, learner, run_files

from kernelwright.train import train

TASKS = [guess_task(number) for number in range(5)]
OPERATIONS = (
    "open",
    "os.rename",
    "os.truncate",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "shutil.copyfile",
)
# a run has more than a hundred operations; a prime stride meets all kinds of them
STRIDE = 5


def work(out: Path, *, resume: bool = False) -> None:
    train(
        guess_recipe(steps=3),
        engine=learner(),
        out=out,
        resume=resume,
        tasks=TASKS,
        validation=TASKS[:2],
        heldout=TASKS[2:],
        workers=1,
    )


def killed(out: Path, count: int) -> bool:
    """Whether a child process that is killed at operation `count` got that far."""
    child = os.fork()
    if child == 0:
        left = count

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in OPERATIONS and str(out) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work(out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(folder: Path) -> None:
    work(folder / "whole")
    whole = run_files(folder / "whole")
    number, different = 0, []
    while killed(folder / "run", 1 + number * STRIDE):
        # killed before config.json is there: then it is a fresh directory
        work(folder / "run", resume=True)
        if run_files(folder / "run") != whole:
            different.append(1 + number * STRIDE)
        shutil.rmtree(folder / "run")
        number += 1
    print(json.dumps({"killed": number, "different": different}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
