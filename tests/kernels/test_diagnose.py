"""Every diagnosis, through the real evaluator."""

import shutil

import pytest
from kernel_tasks import DOUBLE, ROWS, SOFTMAX, SOFTMAX_C, double, task

from kernelwright.kernels import Evaluator
from kernelwright.kernels.ablate import variants
from kernelwright.kernels.vectorised import innermost_loops, limit
from kernelwright.types import Status

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def checked():
    with Evaluator(timing=False) as evaluator:
        yield evaluator


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("v = v > 0 ? v : 0;", ";", "the result equals the reference without line `x = F.relu(x)`"),
        ("a[j] * b[j]", "a[j]", "the result equals the reference without line `x = x * y`"),
        ("o[j] /= sum;", "o[j] /= -sum;", "the sign is flipped"),
        ("o[j] /= sum;", "o[j] /= 2 * sum;", "every element is off by the factor 0.5"),
        ("o[j] /= sum;", "o[j] = o[j] / sum + 1;", "every element is off by the constant 1"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * m;", "every element is off by the factor m"),
        ("o[j] /= sum;", "o[j] = o[j] / sum / n;", "every element is off by the factor 1 / n"),
        ("o[j] /= sum;", ";", "each row is off by a factor of its own"),
        ("o[j] /= sum;", "o[j] = o[j] / sum + i + 1;", "each row is off by a constant of its own"),
        ("o[j] /= sum;", "o[j] = 0;", "every element of out is zero"),
        ("o[j] /= sum;", "o[j] = 1;", "every element of out has the same value"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * (j == m - 1 ? 5 : 1);", "only the last column of out is wrong"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * (j ? 5 : 1);", "only the last columns of out are wrong"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * (j ? 1 : 5);", "only the first element of each row is wrong"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * (i == n - 1 ? 5 : 1);", "only the last row of out is wrong"),
        ("o[j] /= sum;", "o[j] = o[j] / sum * (1 + j % 2);", "some elements differ"),
        (
            "o[j] /= sum;",
            "o[j] = o[j] / sum * 1.0005f;",
            "the result is close, but less accurate than the tolerance allows",
        ),
        ("j < m", "j < m - 1", "the last column of out is not written"),
        ("j < m", "j < m / 8 * 8", "the last columns of out are not written"),
        ("i < n", "i < n - 1", "the last row of out is not written"),
        ("i < n", "i < n - 2", "the last rows of out are not written"),
        ("i < n", "i < 0", "nothing was written to out"),
        ("j++", "j += 2", "some elements of out are not written"),
        ("o[j] = v;", "o[j] += v;", "out is read before it is written"),
        ("o[j] /= sum;", "o[j] = INFINITY;", "infinity where a finite value is expected"),
        ("expf(o[j] - top)", "expf(o[j] * 99)", "nan where a finite value is expected"),
    ],
)
def test_how_a_result_is_wrong(checked, old, new, message):
    found = checked.evaluate(SOFTMAX, SOFTMAX_C.replace(old, new))
    assert found.status is Status.WRONG
    assert found.message == message
    assert not found.message.endswith(".")


@needs_compiler
def test_a_missing_last_step_is_quoted_as_a_call(checked):
    found = checked.evaluate(task("exp", "x = x * 3", "return torch.exp(x)"), double(value="3 * x[i]"))
    assert found.message == "the result equals the reference without `torch.exp(x)`"


@needs_compiler
def test_a_mean_instead_of_a_sum_is_a_factor_with_a_name(checked):
    source = """
void kernel(const float *x, float *out, int n, int m) {
  for (int i = 0; i < n; i++) {
    float s = 0;
    for (int j = 0; j < m; j++) s += x[i * m + j];
    out[i] = s / m;
  }
}
"""
    assert checked.evaluate(ROWS, source).message == "every element is off by the factor 1 / m"
    assert checked.evaluate(ROWS, source.replace("s / m", "s")).correct


@needs_compiler
def test_inaccuracy_is_told_from_error(checked):
    noisy = double(value="2 * x[i] + (i % 3 - 1) * 1e-3f")
    found = checked.evaluate(DOUBLE, noisy)
    assert found.message == "the result is close, but less accurate than the tolerance allows"
    assert found.max_error is not None and 1 < found.max_error < 30


def test_variants_leave_out_one_step_each():
    assert [text for text, _ in variants(SOFTMAX.reference)] == [
        "without line `x = x * y`",
        "without line `x = F.relu(x)`",
        "without `F.softmax(x, dim=-1)`",
        "stopped after line `x = x * y`",
        "stopped after line `x = F.relu(x)`",
    ]
    sources = dict(variants(task("v", "return torch.sqrt(x.abs() + 1)").reference))
    assert {text: source.split("return ")[1].split("\n")[0] for text, source in sources.items()} == {
        "without `torch.sqrt(x.abs() + 1)`": "x.abs() + 1",
        "without `x.abs() + 1`": "torch.sqrt(x.abs())",
        "without `x.abs()`": "torch.sqrt(x + 1)",
    }


def test_innermost_loops_of_a_source():
    source = """\
for (int i = 0; i < n; i++) { // for (never) {
  for (int j = 0; j < m;
       j++)
    s += x[j];
  "for (;;)"; /* while (1) */
  while (go) { if (x) { y(); } }
}
for (;;) for (;;) one();
"""
    assert innermost_loops(source) == [(2, 3), (6, 6), (8, 8)]


def test_the_first_loop_without_a_report_is_the_limit():
    source = "void k() {\nfor (a;b;c) x;\nfor (a;b;c) y;\nfor (a;b;c) z;\n}"
    vectorised = "kernel.c:2:9: optimized: loop vectorized using 32 byte vectors\n"
    library = "kernel.c:4:9: optimized: Loop 3 distributed: split to 0 loops and 1 library calls.\n"
    assert limit(source, vectorised + library) == {"limit": "the loop in line 3 is not vectorised"}
    assert limit(source, vectorised + vectorised.replace(":2:", ":3:") + library) == {}
