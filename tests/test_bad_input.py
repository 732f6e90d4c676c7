"""Files, folders and settings that are wrong: one line that says what to do, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import tiny_llama, tiny_tokenizer
from transformers import BertConfig, BertModel

from kernelwright.cli import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which a command refuses."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    assert (end.value.code, shown.out) == (2, ""), shown.err
    assert shown.err.startswith("kernelwright: ")
    assert shown.err.count("\n") == 1
    return shown.err


# ---------------------------------------------------------------- task files

PROBLEM = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return 2 * x
def get_inputs():
    return [torch.randn(4, 8)]
def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("forward(self, x):", "forward(self, x:", "does not import: SyntaxError"),
        ("import torch\n", "import torch, no_such_package\n", "does not import: ModuleNotFoundError"),
        ("import torch\n", "import torch\nraise SystemExit(0)\n", "does not import: SystemExit"),
        ("class Model(", "class Other(", "has no Model; expected class Model"),
        ("def get_inputs", "def other", "has no get_inputs"),
        ("def get_init_inputs", "def other", "has no get_init_inputs"),
        ("2 * x", "x @ x", "does not run: RuntimeError"),
        ("2 * x", "exit(3)", "does not run: SystemExit"),
        ("[torch.randn(4, 8)]", "[]", "does not run: TypeError"),
        ("2 * x", "x + torch.randn_like(x)", "is random"),
        ("2 * x", "torch.nn.functional.dropout(x)", "is random"),
        ("2 * x", "torch.nn.Dropout(0.5)(x)", "is random"),
        ("torch.randn(4, 8)", "3.5", "returns float, expected one tensor"),
        ("2 * x", "(x, x)", "returns tuple, expected one tensor"),
        ("2 * x", "None", "returns NoneType, expected one tensor"),
        ("randn(4, 8)", "randn(0, 8)", "empty tensor"),
    ],
)
def test_a_file_that_is_no_task(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in PROBLEM
    file = tmp_path / "problem.py"
    file.write_text(PROBLEM.replace(old, new))
    line = refused(capsys, "tasks", "show", f"file:{file}")
    assert message in line
    assert str(file) in line
    # the same for whoever else is given it, before any model is loaded or folder made
    assert refused(capsys, "train", "--tasks", f"file:{file}", "--out", str(tmp_path / "run")) == line
    assert not (tmp_path / "run").exists()


def test_a_task_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(capsys, "tasks", "show", "file:binary.py")
    (tmp_path / "folder.py").mkdir()
    assert "does not exist" in refused(capsys, "refine", "file:folder.py")
    assert "does not exist" in refused(capsys, "evaluate", "--tasks", "file:")


@pytest.mark.parametrize("name", ["int", "out", "n", "d7"])
def test_an_input_whose_name_a_kernel_cannot_use(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "named.py").write_text(PROBLEM.replace("self, x", f"self, {name}").replace("2 * x", f"2 * {name}"))
    with pytest.raises(SystemExit) as end:
        main(["tasks", "show", "file:named.py"])
    assert end.value.code == 0
    assert f"void kernel(const float *{name}_, float *out, int n, int m);" in capsys.readouterr().out


def test_whole_numbers_stay_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole.py").write_text(PROBLEM.replace("torch.randn(4, 8)", "torch.randint(0, 5, (4, 8))"))
    with pytest.raises(SystemExit):
        main(["tasks", "show", "file:whole.py"])
    assert "void kernel(const long long *x, long long *out, int n, int m);" in capsys.readouterr().out


def test_inputs_that_forward_does_not_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = PROBLEM.replace("self, x", "self, *xs").replace("2 * x", "xs[0] + xs[1]")
    (tmp_path / "several.py").write_text(several.replace("randn(4, 8)", "randn(4, 8), torch.randn(4, 8)"))
    with pytest.raises(SystemExit) as end:
        main(["tasks", "show", "file:several.py"])
    assert end.value.code == 0
    assert "void kernel(const float *x0, const float *x1, float *out, int n, int m);" in capsys.readouterr().out


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _half(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _wider(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "hidden_size": 64}))


def _odd(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "hidden_size": "many"}))


def _bert(folder: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertModel(BertConfig(vocab_size=320, **sizes)).save_pretrained(folder)


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no config.json there"),
        (_empty, "no config.json there"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: _half(folder / "model.safetensors"), "corrupt weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "corrupt weights"),
        (lambda folder: _half(folder / "config.json"), "not a valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "not a valid JSON"),
        (lambda folder: (folder / "config.json").write_text("null"), "no causal language model that loads"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "none"}'), "none"),
        (_odd, "hidden_size"),
        (_wider, "(320, 32), config.json says (320, 64)"),
        (_no_tokenizer, "no tokenizer that loads"),
        (lambda folder: _half(folder / "tokenizer.json"), "no tokenizer that loads"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for"), "chat template"),
        (lambda folder: tiny_llama(50).save_pretrained(folder), "embeds 50 tokens, its tokenizer has 320"),
        (_bert, "expected a causal language model"),
    ],
)
def test_a_folder_that_is_no_model(
    damage: Callable[[Path], object], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    capsys.readouterr()
    line = refused(capsys, "train", "--model", str(folder), "--tasks", "builtin/relu", "--out", str(tmp_path / "run"))
    assert message in line
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "setting",
    [
        "optimiser.lr=-1", "optimiser.lr=1e999", "optimiser.lr=nan", "optimiser.betas=(2,3)", "optimiser.betas=3",
        "optimiser.clip=0", "optimiser.minibatches=0", "optimiser.epochs=0", "optimiser.warmup=-1",
        "evaluate_every=-1", "evaluate_samples=0", "evaluate_tasks=-1", "checkpoint_every=0", "name=a/b", "name=",
        "credit.gamma={[]:1}", "credit.gamma=((((", "credit.gamma=", "steps=-1", "group_size=0", "tasks_per_step=1e3",
        "sampling.temperature=0", "sampling.max_tokens=0", "sampling.budget=10", "context=nosuch", "model=",
        "tasks=", "heldout=nosuch", "validation=nosuch", "environment.backend=tritn",
    ],
)  # fmt: skip
def test_a_value_that_cannot_be(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "train", "--set", setting)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("setting", ["environment.workers=0", "environment.workers=-1", "environment.seed=-1"])
def test_an_environment_that_cannot_be(
    setting: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected workers >= 1" in refused(
        capsys, "train", "--model", str(model), "--tasks", "builtin/relu", "--set", setting
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "refine relu --turns 0",
        "refine relu --samples 0",
        "refine relu --seed abc",
        "evaluate --samples 0",
        "evaluate --tasks nosuch",
        "evaluate --tasks hub:nosuch",
        "train --seed abc",
        "train --set =",
        "train --set credit",
        "train --out nowhere --resume",
        "tasks",
    ],
)
def test_an_option_that_cannot_be(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *arguments.split())


# ---------------------------------------------------------------- kernels and compilers


def test_a_kernel_that_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.c").write_text("\n")
    assert "'empty.c', which is empty" in refused(capsys, "check", "relu", "empty.c")
    assert "which is a folder" in refused(capsys, "check", "relu", str(tmp_path))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PATH": "{tmp}"}, "no C compiler was found; install gcc"),
        ({"CC": "/no/such/cc"}, "CC is '/no/such/cc', expected one program"),
        ({"CC": "/bin/false"}, "/bin/false does not compile C"),
    ],
)
def test_no_compiler(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text("int x;")
    changed = {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    environment = {**os.environ, **changed, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "kernelwright.cli", "check", "relu", "kernel.c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


# ---------------------------------------------------------------- run directories


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"recipe": 3}', '{"recipe": {"name": "x"}}', None])
def test_a_config_that_is_none(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run" / "config.json"
    config.parent.mkdir()
    if content is None:
        config.mkdir()
    else:
        config.write_text(content)
    for command in ("report run", "train --out run --resume"):
        assert "run/config.json" in refused(capsys, *command.split())
    assert os.listdir(tmp_path / "run") == ["config.json"]
