"""Training that is stopped in every stage, crowded out, out of space or robbed of files: one line, and on it goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STAGES = ("loading", "measuring", "sampling", "judging", "update", "saving")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of every command: its exit code, its line on stderr, and whether its files are those of an unbroken run."""
    folder = tmp_path_factory.mktemp("stops")
    script = Path(__file__).parent / "stop_train.py"
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    for one in found.values():
        one["err"] = one["err"].replace(str(folder), "FOLDER")
        assert "Traceback" not in one["err"]
        assert one["err"].count("\n") <= 1
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted(results: dict[str, dict[str, Any]], stage: str) -> None:
    again = (
        "nothing was written"
        if stage == "loading"
        else "continue with: kernelwright train --out FOLDER/SIGINT --resume"
    )
    assert results[f"SIGINT {stage}"] == {"code": 130, "err": f"kernelwright: stopped; {again}\n"}


@pytest.mark.parametrize("stage", STAGES)
def test_killed(results: dict[str, dict[str, Any]], stage: str) -> None:
    assert results[f"SIGKILL {stage}"] == {"code": -9, "err": ""}


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_going_on_after_a_stop_in_every_stage(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[f"{name} resumed"] == {"code": 0, "err": "", "equal": True}


def test_two_commands_on_one_directory(results: dict[str, dict[str, Any]]) -> None:
    assert results["second"]["code"] == 2
    assert "'FOLDER/crowded' is being written by another process" in results["second"]["err"]
    assert results["first"] == {"code": 0, "err": "", "equal": True}


@pytest.mark.parametrize("size", ["16k", "300k", "700k"])
def test_a_full_disk(results: dict[str, dict[str, Any]], size: str) -> None:
    if f"disk {size}" not in results:
        pytest.skip("needs the right to mount a small file system")
    assert results[f"disk {size}"]["code"] == 2
    assert "No space left on device; free some space, then continue with --resume" in results[f"disk {size}"]["err"]
    assert results[f"disk {size} resumed"] == {"code": 0, "err": "", "equal": True}


def test_a_checkpoint_that_lost_a_file(results: dict[str, dict[str, Any]]) -> None:
    for name in ("gone model.safetensors", "half engine.pt", "half state.json"):
        assert results[name]["code"] == 2
        assert "lost/checkpoints/step-2" in results[name]["err"]
        assert "damaged" in results[name]["err"] and "--resume" in results[name]["err"]
    # without its mark it is no checkpoint: the one before is taken
    assert results["gone state.json"] == {"code": 0, "err": "", "equal": True}
    assert results["without it"] == {"code": 0, "err": "", "equal": True}
