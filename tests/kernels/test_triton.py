"""Triton candidates in the interpreter: right or wrong, by their own kernels or not, never timed."""

import dataclasses
import time

import pytest
from kernel_tasks import task

from kernelwright.errors import BadTask
from kernelwright.kernels import BACKENDS, Evaluator
from kernelwright.kernels.backends import triton
from kernelwright.types import Input, Status

pytest.importorskip("triton", reason="Triton is not installed")

MULTIPLY = task("multiply", "return x * y", arguments=("x", "y"), time_shapes=())
SOURCE = """\
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["count"])
@triton.jit
def multiply(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) * tl.load(y + at, mask=inside), mask=inside)


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        assert x.is_cuda
        x = x.cuda().contiguous()
        out = torch.empty(x.shape, device="cuda")
        multiply[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
        return out
"""


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator(backend="triton") as pool:
        yield pool


def test_a_correct_kernel_is_verified_but_not_timed(evaluator):
    found = evaluator.evaluate(MULTIPLY, SOURCE)
    assert (found.status, found.message, found.hacks) == (Status.CORRECT, "", ())
    assert found.verified == "interpreter" and found.kernel_ms == () and found.speedup is None and found.trusted


@pytest.mark.parametrize(
    ("old", "new", "status", "message", "line"),
    [
        ("def multiply(", "def multiply", Status.COMPILE_ERROR, "unmatched ')'", 8),
        ("import torch\n", "import torchh\n", Status.COMPILE_ERROR, "ModuleNotFoundError", 1),
        ("ModelNew", "Model", Status.COMPILE_ERROR, "no class ModelNew is defined", None),
        ("tl.load(x", "tl.laod(x", Status.CRASH, "AttributeError", 11),
        ("return out", "return nothing", Status.CRASH, "NameError: name 'nothing' is not defined", 20),
        ("return out", "import os; os._exit(0)", Status.CRASH, "the candidate ended the process", None),
        ("out + at, tl", "out + at + 10**12, tl", Status.CRASH, "segmentation fault", None),
        ("return out", "import os; os.fork(); return out", Status.CRASH, "PermissionError", 20),
        ("return out", "return out, x", Status.WRONG, "forward returns tuple, expected one tensor", None),
        ("return out", "return out[0]", Status.WRONG, "the result has another shape", None),
        ("return out", "return out.half()", Status.WRONG, "the result is float16, expected float32", None),
        ("return out", "x.add_(1); return out", Status.WRONG, "the kernel changed its input x", None),
        (") * tl.load(y", ") + tl.load(y", Status.WRONG, "all elements differ", None),
        (" * tl.load(y + at, mask=inside)", "", Status.WRONG, "the result equals the reference without `x * y`", None),
        (
            "tl.load(x",
            "0 * tl.bfloat16 + tl.load(x",
            Status.COMPILE_ERROR,
            "Triton's interpreter computes bfloat16",
            11,
        ),
    ],
)
def test_faults(evaluator, old, new, status, message, line):
    found = evaluator.evaluate(MULTIPLY, SOURCE.replace(old, new))
    assert (found.status, found.message[: len(message)]) == (status, message)
    assert (found.location.line if found.location else None) == line


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("return out", "return x * y", ["library call"]),
        ("return out", "return torch.ops.aten.mul(x, y)", ["library call"]),
        ("return out", "return getattr(torch, 'm' + 'ul')(x, y)", ["library call"]),
        ("        multiply[", "        return x * y\n        multiply[", ["no kernel", "library call"]),
    ],
)
def test_a_borrowed_result_is_correct_but_not_trusted(evaluator, old, new, rules):
    found = evaluator.evaluate(MULTIPLY, SOURCE.replace(old, new))
    assert found.correct and not found.trusted and [hack.rule for hack in found.hacks] == rules


def test_the_policy_of_a_task_allows_library_calls(evaluator):
    lenient = dataclasses.replace(MULTIPLY, id="test/lenient", policy=("add",))
    source = SOURCE.replace("return out", "return out + 0")
    assert evaluator.evaluate(lenient, source).trusted
    assert not evaluator.evaluate(MULTIPLY, source).trusted


def test_a_hang_ends(evaluator, monkeypatch):
    monkeypatch.setattr(triton, "_SECONDS", 1)
    start = time.perf_counter()
    found = evaluator.evaluate(MULTIPLY, SOURCE.replace("return out", "while True: pass"))
    assert found.status is Status.TIMEOUT and time.perf_counter() - start < 15
    assert evaluator.evaluate(MULTIPLY, SOURCE + "\n").correct


def test_a_bfloat16_task_is_refused():
    inputs = (Input(name="x", shape=("n", "m"), dtype="bfloat16"),)
    bad = dataclasses.replace(task("half", "return x * 2"), inputs=inputs)
    with Evaluator(backend="triton") as pool, pytest.raises(BadTask, match="bfloat16"):
        pool.evaluate(bad, SOURCE)


def test_the_prompt_names_entry_point_and_limits():
    text = BACKENDS["triton"].instructions(MULTIPLY)
    assert "class ModelNew" in text and "x float32 [n, m], y float32 [n, m] and returns out float32 [n, m]" in text
    assert "no bfloat16" in text
