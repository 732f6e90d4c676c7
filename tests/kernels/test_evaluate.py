"""The evaluator on C candidates: every status, what a record says, cache, repetition, times."""

import dataclasses
import shutil
import subprocess
import threading
import time

import msgspec
import pytest
from kernel_tasks import DOUBLE, ROWS, SOFTMAX, SOFTMAX_C, double, task

from kernelwright.errors import BadTask, InfrastructureError, MissingTool, UnknownName
from kernelwright.kernels import BACKENDS, Evaluator, evaluate
from kernelwright.types import Evaluation, Status

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def checked():
    with Evaluator(timing=False) as evaluator:
        yield evaluator


@pytest.fixture(scope="module")
def timed():
    with Evaluator() as evaluator:
        yield evaluator


def plain(evaluation: Evaluation) -> bytes:
    """A record as bytes, without what differs from run to run."""
    return msgspec.json.encode(dataclasses.replace(evaluation, seconds=0.0))


def test_a_correct_kernel_is_correct_and_timed(timed):
    found = timed.evaluate(SOFTMAX, SOFTMAX_C)
    assert (found.status, found.message, found.hacks) == (Status.CORRECT, "", ())
    assert len(found.kernel_ms) in (4, 8) and len(found.reference_ms) == 8
    assert found.max_error is not None and 0 < found.max_error < 1
    assert found.profile["bandwidth_gbs"] > 0
    assert found.verified == "cpu" and found.seconds > 0


def test_without_timing_there_is_no_time(checked):
    found = checked.evaluate(DOUBLE, double())
    assert found.correct and found.kernel_ms == () and found.speedup is None and "bandwidth_gbs" not in found.profile


def test_no_code():
    for source in (None, "", "  \n"):
        found = evaluate(DOUBLE, source, timing=False)
        assert found.status is Status.NO_CODE and not found.compiled


@pytest.mark.parametrize(
    ("change", "message", "line", "text"),
    [
        (("sum += o[j]", "sum += z[j]"), "'z' undeclared (first use in this function)", 15, "      sum += z[j];"),
        (("expf", "exponential"), "implicit declaration of function 'exponential'", 14, None),
        (("const float *x,", "float *x,"), "conflicting types for 'kernel'", 2, None),
        (("int m)", "long m)"), "conflicting types for 'kernel'", 2, None),
        (("float top", "floot top"), "unknown type name 'floot'", 6, None),
    ],
)
def test_compile_errors_name_the_line(checked, change, message, line, text):
    found = checked.evaluate(SOFTMAX, SOFTMAX_C.replace(*change))
    assert found.status is Status.COMPILE_ERROR and not found.compiled
    assert found.message.startswith(message) and "[-W" not in found.message
    assert found.location is not None and found.location.line == line and found.location.column
    if text is not None:
        assert found.location.text == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int unrelated;\n", "no function named 'kernel' is defined"),
        (double(top="float mystery(float);", value="mystery(x[i])"), "undefined symbol 'mystery'"),
        ("static " + double().split("\n\n")[-1], "static declaration of 'kernel' follows non-static declaration"),
    ],
)
def test_what_does_not_link_is_a_compile_error(checked, source, message):
    found = checked.evaluate(DOUBLE, source)
    assert found.status is Status.COMPILE_ERROR
    if "static" not in source:
        assert found.message == message


def test_a_wrong_element_is_reported_in_row_major_order(checked):
    found = checked.evaluate(DOUBLE, double(value="i == 41 || i == 90 ? 7.0f : 2 * x[i]"))
    assert found.status is Status.WRONG and found.error_index == (1, 4) and found.got == 7.0
    assert found.expected != 7.0 and found.max_error is not None and found.max_error > 1
    assert found.message == "a few elements differ"


def test_equal_evaluations_give_equal_bytes():
    sources = [SOFTMAX_C, SOFTMAX_C.replace("o[j] /= sum", "o[j] /= 3"), SOFTMAX_C.replace("- top", ""), "x"]
    runs = []
    for _ in range(2):
        with Evaluator(timing=False) as evaluator:
            runs.append([plain(evaluator.evaluate(SOFTMAX, source)) for source in sources])
    assert runs[0] == runs[1]


def test_undefined_behaviour_repeats_itself():
    # an uninitialised local and a read before the array
    source = double(before="float junk[64];", value="2 * x[i] + junk[i % 64] * 1e30f + x[-3 - i % 5]")
    runs = []
    for _ in range(3):
        with Evaluator(timing=False) as evaluator:
            runs.append(plain(evaluator.evaluate(DOUBLE, source)))
    assert runs[0] == runs[1] == runs[2]


def test_another_seed_draws_other_inputs():
    wrong = double(value="3 * x[i]")
    first, second = (evaluate(DOUBLE, wrong, timing=False, seed=seed) for seed in (0, 1))
    assert first.got != second.got and first.message == second.message


def test_the_cache_serves_repeats_and_joins_those_in_flight():
    with Evaluator(timing=False) as evaluator:
        found: list[Evaluation] = []
        slow = double(before="usleep(200000);")
        threads = [threading.Thread(target=lambda: found.append(evaluator.evaluate(DOUBLE, slow))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (evaluator.hits, evaluator.misses) == (3, 1)
        assert len(found) == 4 and all(evaluation is found[0] for evaluation in found)
        evaluator.evaluate(ROWS, double())
        assert (evaluator.hits, evaluator.misses) == (3, 2), "another task is another question"


def test_the_cache_can_be_left_out():
    with Evaluator(timing=False, cache=False) as evaluator:
        first, second = (evaluator.evaluate(DOUBLE, double()) for _ in range(2))
        assert first is not second and plain(first) == plain(second)
        assert (evaluator.hits, evaluator.misses) == (0, 2)


def test_cache_hits_are_fast(checked):
    checked.evaluate(DOUBLE, double())
    start = time.perf_counter()
    for _ in range(500):
        checked.evaluate(DOUBLE, double())
    assert time.perf_counter() - start < 2.5


def test_distinct_candidates_are_evaluated_side_by_side():
    with Evaluator(timing=False, workers=4) as evaluator:
        slow = [double(before=f"usleep({100_000 + i});") for i in range(4)]
        evaluator.evaluate(DOUBLE, double())
        start = time.perf_counter()
        threads = [threading.Thread(target=evaluator.evaluate, args=(DOUBLE, source)) for source in slow]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together = time.perf_counter() - start
        # five calls of 0.1 s each and a compilation, four times
        assert evaluator.misses == 5 and together < 4 * 0.5


def test_an_unknown_backend_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'triton'"):
        Evaluator(backend="tritonn")


def test_a_machine_without_compiler_says_what_to_install(monkeypatch):
    missing = dataclasses.replace(BACKENDS["c"], available=lambda: "no C compiler was found; install gcc")
    monkeypatch.setitem(BACKENDS, "c", missing)
    with pytest.raises(MissingTool, match="install gcc"):
        Evaluator()


def test_our_own_failure_is_retried_once_and_then_no_verdict(monkeypatch):
    attempts = []

    def build(interface, source, workspace):
        attempts.append(source)
        if len(attempts) != 2:
            raise InfrastructureError("the disk is full")
        return original.build(interface, source, workspace)

    original = BACKENDS["c"]
    monkeypatch.setitem(BACKENDS, "c", dataclasses.replace(original, build=build))
    with Evaluator(timing=False) as evaluator:
        assert evaluator.evaluate(DOUBLE, double()).correct and len(attempts) == 2
        with pytest.raises(InfrastructureError, match="disk is full"):
            evaluator.evaluate(ROWS, double())
        assert len(attempts) == 4


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("import nonexistent_module", "does not import"),
        ("def f(:", "does not import"),
        ("x = 1", "no class Model"),
        (DOUBLE.reference.replace("2 * x", "x @ x"), "the reference raised RuntimeError"),
        (DOUBLE.reference.replace("2 * x", "(x, x)"), "returns tuple, expected one tensor"),
    ],
)
def test_a_bad_task_is_the_users_error(reference, message):
    with pytest.raises(BadTask, match=message):
        evaluate(dataclasses.replace(DOUBLE, id=f"test/{abs(hash(reference))}", reference=reference), double())


def test_sizes_and_parameters_of_a_plain_kernelbench_file():
    reference = """\
import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
    def forward(self, x, power):
        return self.norm(x) ** power
def get_inputs():
    return [torch.randn(6, 10), 2]
def get_init_inputs():
    return [10]
"""
    plain_file = dataclasses.replace(
        DOUBLE, id="test/plain", reference=reference, inputs=(), check_shapes=(), time_shapes=()
    )
    text = BACKENDS["c"].instructions(plain_file)
    prototype = (
        "void kernel(const float *x, const float *norm_weight, const float *norm_bias, float *out, int n, int m)"
    )
    assert f"{prototype};" in text and "x [n, m], norm_weight [10], norm_bias [10], out [n, m]" in text
    body = """
  for (int i = 0; i < n; i++) {
    float mean = 0, square = 0;
    for (int j = 0; j < m; j++) mean += x[i * m + j] / m;
    for (int j = 0; j < m; j++) square += (x[i * m + j] - mean) * (x[i * m + j] - mean) / m;
    for (int j = 0; j < m; j++) {
      float v = (x[i * m + j] - mean) / sqrtf(square + 1e-5f) * WEIGHT;
      out[i * m + j] = v * v;
    }
  }
}
"""
    source = f"#include <math.h>\n{prototype} {{{body}"
    with Evaluator() as evaluator:
        found = evaluator.evaluate(plain_file, source.replace("WEIGHT", "norm_weight[j] + norm_bias[j]"))
        assert found.trusted and found.speedup
        # parameters are moved away from ones and zeros, so leaving them out shows
        assert evaluator.evaluate(plain_file, source.replace("WEIGHT", "1")).status is Status.WRONG


def test_the_prompt_names_the_sizes():
    assert BACKENDS["c"].instructions(ROWS).splitlines()[1:3] == [
        "void kernel(const float *x, float *out, int n, int m);",
        "Arrays are dense, row-major: x [n, m], out [n].",
    ]


def test_the_unvectorised_loop_is_named_by_its_line(checked):
    if "Free Software" not in _compiler_version():
        pytest.skip("only gcc reports which loops it vectorised")
    assert checked.evaluate(DOUBLE, double()).profile == {}
    # a call of expf for every element
    exponential = task("exponential", "return torch.exp(x)")
    source = "#include <math.h>\n#include <stdlib.h>\n" + double(value="expf(x[i])")
    line = 1 + source[: source.index("for (int i")].count("\n")
    assert checked.evaluate(exponential, source).profile == {"limit": f"the loop in line {line} is not vectorised"}


def _compiler_version() -> str:
    return subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout


def test_a_slower_kernel_measures_slower(timed):
    quick = timed.evaluate(ROWS, _sums(1))
    slow = timed.evaluate(ROWS, _sums(40))
    assert quick.correct and slow.correct
    assert quick.speedup and slow.speedup and quick.speedup > 4 * slow.speedup


def test_what_is_far_slower_than_the_reference_is_measured_in_one_process_instead_of_two(timed):
    large = task("large", "return x + x", time_shapes=({"n": 512, "m": 1027},))
    quick = timed.evaluate(large, double())
    slow = timed.evaluate(large, double(before="for (volatile int spin = 0; spin < 20000000; spin++) {}"))
    assert quick.speedup and slow.speedup and slow.speedup < 0.1 < 0.5 < quick.speedup
    assert (len(slow.kernel_ms), len(quick.kernel_ms)) == (4, 8)


def _sums(times: int) -> str:
    return f"""
void kernel(const float *x, float *out, int n, int m) {{
  for (volatile int r = 0; r < {times}; r++)
    for (int i = 0; i < n; i++) {{
      float s = 0;
      for (int j = 0; j < m; j++) s += x[i * m + j];
      out[i] = s;
    }}
}}
"""


def test_openmp_works_and_has_one_thread(checked):
    threads = double(
        top="#include <omp.h>",
        before="if (omp_get_max_threads() != 1) { out[0] = 0; return; }",
        value="2 * x[i]",
    ).replace("for (int i", '_Pragma("omp parallel for num_threads(2)") for (int i')
    assert checked.evaluate(DOUBLE, threads).correct


def test_integer_tasks():
    tokens = task("embed", "return x * 3")
    tokens = dataclasses.replace(
        tokens,
        id="test/integers",
        inputs=(dataclasses.replace(tokens.inputs[0], dtype="int64", kind="index", high="m"),),
    )
    loop = "for (int i = 0; i < n * m; i++) out[i] = 3 * x[i];"
    source = f"void kernel(const long long *x, long long *out, int n, int m) {{ {loop} }}"
    assert evaluate(tokens, source, timing=False).correct
    assert evaluate(tokens, source.replace("3 *", "2 *"), timing=False).status is Status.WRONG
