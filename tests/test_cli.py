"""The command line: what it prints, its exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import tiny_llama, tiny_tokenizer

from kernelwright.cli import main

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on the PATH")

RELU = (
    "void kernel(const float *x, float *out, int n, int m)\n{ for (long i = 0; i < (long)n * m; i++) out[i] = %s; }\n"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "relu.c"
    file.write_text(RELU % "x[i] > 0 ? x[i] : 0")
    return file


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "Did you mean 'train'"),
        ("train --stepz 3", "unknown option '--stepz'; did you mean '--steps'"),
        ("train --steps many", "--steps"),
        ("train --steps -1", "--steps"),
        ("train kevim", "unknown recipe 'kevim'; did you mean 'kevin'"),
        ("train --set credit.gama=1", "did you mean 'credit.gamma'"),
        ("train --set credit.gamma=7", "discount"),
        ("train --backend tritn", "unknown backend 'tritn'"),
        ("train --tasks builtin:trian", "did you mean 'train'"),
        ("train --tasks builtin:held --out x", "did you mean 'heldout'"),
        ("train --tasks file:none.py", "none.py"),
        ("train --model no/such/folder --tasks builtin/relu --out {tmp}/run", "no/such/folder"),
        ("train --out {tmp}/file/run", "cannot write"),
        ("evaluate --turns 0", "--turns"),
        ("evaluate --model {tmp}", "{tmp}"),
        ("refine rely", "unknown builtin task 'rely'; did you mean 'relu'"),
        ("refine builtin:heldout", "expected one"),
        ("check relu", "file"),
        ("check relu {tmp}/none.c", "does not exist"),
        ("check relu {tmp}/binary", "not UTF-8"),
        ("check relu {tmp}", "is a folder"),
        ("check rely {tmp}/file", "did you mean 'relu'"),
        ("check relu {tmp}/file --backend tritn", "unknown backend 'tritn'"),
        ("tasks shwo", "Did you mean 'show'"),
        ("tasks list table:", "expected one of"),
        ("tasks show relu --backend d", "unknown backend 'd'"),
        ("tasks show builtin", "expected one"),
        ("recipes kevim", "did you mean 'kevin'"),
        ("report {tmp}", "no run directory"),
        ("report", "run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("int x;")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    code, out, err = run(capsys, *(word.format(tmp=tmp_path) for word in arguments.split()))
    assert (code, out) == (2, "")
    assert err.startswith("kernelwright: ")
    assert err.count("\n") == 1
    assert message.format(tmp=tmp_path) in err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="kevim"):
        main(["recipes", "kevim", "--debug"])


# ---------------------------------------------------------------- looking things up


def test_help_is_quick_and_names_every_command() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kernelwright.cli", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("train", "evaluate", "check", "refine", "tasks", "recipes", "report", "doctor"):
        assert f" {name} " in shown.stdout
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert loaded & {"torch", "transformers", "numpy", "matplotlib"} == set()


def test_no_argument_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "Usage" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (0, "kernelwright")


def test_recipes_lists_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "recipes", "kevin", "--json")
    knobs = json.loads(out)
    assert code == 0
    assert (knobs["credit.gamma"], knobs["group_size"], knobs["environment.reward.cap"]) == (0.4, 16, None)
    assert "kevin" in run(capsys, "recipes")[1]


def test_tasks_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run(capsys, "tasks", "list", "builtin:heldout", "--json")[1])
    assert all(set(row) == {"id", "statement", "tags"} for row in listed)
    _, out, _ = run(capsys, "tasks", "show", listed[0]["id"])
    assert "class Model" in out
    assert "void kernel(" in out
    assert out == run(capsys, "tasks", "show", listed[0]["id"].removeprefix("builtin/"))[1]


@needs_cc
def test_doctor_says_that_c_works(capsys: pytest.CaptureFixture[str]) -> None:
    findings = {one["name"]: one for one in json.loads(run(capsys, "doctor", "--json")[1])["findings"]}
    assert findings["backend c"]["works"] is True
    for one in findings.values():
        assert one["works"] or one["detail"]


# ---------------------------------------------------------------- check


@needs_cc
def test_check_accepts_a_right_kernel(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "relu", str(kernel), "--json")
    record = json.loads(out)
    assert code == 0
    assert (record["status"], record["compiled"], record["correct"], record["trusted"]) == ("CORRECT", True, True, True)
    assert record["speedup"] > 0
    assert record["environment"]["versions"]["python"]
    keys = "task backend status compiled correct trusted speedup message location max_error error_index expected got"
    keys += " kernel_ms reference_ms profile hacks verified seconds environment"
    assert set(record) == set(keys.split())


@needs_cc
@pytest.mark.parametrize(
    ("value", "status"), [("x[i]", "WRONG"), ("y[i]", "COMPILE_ERROR"), ("1 / 0 + x[i + (1L << 40)]", "CRASH")]
)
def test_check_refuses_others_with_exit_1(
    value: str, status: str, kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(RELU % value)
    code, out, _ = run(capsys, "check", "relu", str(kernel), "--json")
    record = json.loads(out)
    assert (code, record["status"], record["speedup"]) == (1, status, None)
    code, out, _ = run(capsys, "check", "relu", str(kernel))
    assert code == 1
    assert status in out
    if status == "COMPILE_ERROR":
        assert record["location"]["line"] == 2


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SMALL = ["tasks_per_step=2", "group_size=2", "max_turns=2", "sampling.max_tokens=16", "sampling.budget=1500"]
SMALL += ["evaluate_every=0", "evaluate_samples=1", "heldout=builtin/relu", "environment.timing=False"]


def _train(model: Path, out: Path, *more: str) -> list[str]:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return ["train", "--model", str(model), "--tasks", "builtin/relu", "--out", str(out), *settings, *more]


@needs_cc
def test_train_from_start_to_report(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, shown, _ = run(capsys, *_train(model, out, "--steps", "1"))
    assert code == 0
    assert "step 1/1" in shown
    assert "Held-out tasks (1 x 1)" in shown
    assert (out / "report.html").stat().st_size > 10_000
    code, _, err = run(capsys, *_train(model, out, "--steps", "1"))
    assert code == 2
    assert "--resume" in err
    code, _, err = run(capsys, "train", "grpo", "--out", str(out), "--resume")
    assert (code, "recipe 'quickstart'" in err) == (2, True)
    code, _, err = run(capsys, "train", "--out", str(out), "--resume", "--seed", "3")
    assert (code, "seed" in err) == (2, True)


@needs_cc
def test_interrupt_and_resume(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "kernelwright.cli", *_train(model, out, "--steps", "4")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        for line in job.stdout:
            if line.startswith("step 1/4"):
                time.sleep(0.05)
                job.send_signal(signal.SIGINT)
                break
        rest, err = job.communicate(timeout=60)
    if job.returncode == 0:
        pytest.skip(f"the run was over before the signal came: {rest[-100:]}")
    assert job.returncode == 130
    assert err.strip() == f"kernelwright: stopped; continue with: kernelwright train --out {out} --resume"
    code, shown, _ = run(capsys, "train", "--out", str(out), "--resume")
    assert code == 0
    assert "going on after step" in shown
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


@needs_cc
def test_evaluate_and_refine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for setting in SMALL[3:5] for word in ("--set", setting)]
    common = ["--model", str(model), "--turns", "2", *settings]
    code, out, _ = run(capsys, "evaluate", "--tasks", "builtin/relu", "--samples", "2", "--json", *common)
    numbers = json.loads(out)
    assert code == 0
    assert (numbers["tasks"], numbers["samples"], len(numbers["turns"])) == (1, 2, 2)
    assert numbers["best"]["fast_p"]["0"] == numbers["best"]["correct"] == 0.0
    code, out, err = run(capsys, "refine", "relu", "--samples", "1", *common)
    assert (code, out) == (1, "")
    assert err.startswith("turn 1: reward 0")
    assert "no correct kernel was found" in err
