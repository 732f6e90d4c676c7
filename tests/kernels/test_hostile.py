"""Candidates that crash, hang, cheat or attack: each gets the right verdict, and the next evaluation is unharmed."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from kernel_tasks import DOUBLE, double

from kernelwright.kernels import Evaluator
from kernelwright.kernels.backends.base import Call
from kernelwright.kernels.evaluate import suspicions, trusted_ms
from kernelwright.types import Status

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluator")


@pytest.fixture(scope="module")
def checked(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        with Evaluator(timing=False) as evaluator:
            yield evaluator


@pytest.fixture(scope="module")
def timed():
    with Evaluator() as evaluator:
        yield evaluator


def left_in(place: Path) -> list[str]:
    """Names of the processes that work in a folder: runners, candidates, and what those started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.readlink(folder / "cwd").startswith(str(place)):
                    found.append((folder / "comm").read_text().strip())
            except OSError:  # it ended meanwhile
                continue
    return found


def test_left_over_processes_would_be_seen(checked, place):
    thread = threading.Thread(target=checked.evaluate, args=(DOUBLE, double(before="usleep(300000);")))
    thread.start()
    seen: set[str] = set()
    while thread.is_alive():
        seen.update(left_in(place))
    thread.join()
    assert any(name.startswith("runner-") for name in seen)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"value": "2 * x[i + 100000000]"}, Status.CRASH, "segmentation fault: an access outside the arrays"),
        ({"before": "abort();"}, Status.CRASH, "aborted: the heap was overwritten or abort() was called"),
        ({"before": "volatile int zero = 0, r = 77 / zero; (void)r;"}, Status.CRASH, "integer division by zero"),
        ({"before": "exit(0);"}, Status.CRASH, "the kernel ended the process"),
        ({"before": "_exit(0);"}, Status.CRASH, "the kernel ended the process"),
        ({"before": "for (volatile int i = 0;;) i++;"}, Status.TIMEOUT, "the kernel did not return in time"),
        ({"before": 'for (;;) { printf("%01000d", 1); fflush(stdout); }'}, Status.TIMEOUT, "the kernel did not return"),
        ({"before": "sleep(60);"}, Status.TIMEOUT, "the kernel did not return in time"),
        (
            {"before": "for (;;) *(volatile char *)malloc(1 << 20) = 1;"},
            Status.CRASH,
            "segmentation fault",
        ),
        (
            {"top": "__attribute__((constructor)) void c(void) { for (volatile int i = 0;;) i++; }"},
            Status.TIMEOUT,
            "the",
        ),
        ({"after": "out[n * m] = 1;"}, Status.WRONG, "the kernel wrote outside the output buffer"),
        ({"after": "out[-1] = 1;"}, Status.WRONG, "the kernel wrote outside the output buffer"),
        ({"after": "out[n * m] += 1;"}, Status.WRONG, "the kernel wrote outside the output buffer"),
        ({"after": "((float *)x)[0] = 1;"}, Status.WRONG, "the kernel changed its input x"),
        ({"after": "((float *)x)[n * m] = 1;"}, Status.WRONG, "the kernel wrote outside the buffer of x"),
        ({"value": "2 * x[i + 1]"}, Status.WRONG, "nan where a finite value is expected"),
    ],
)
def test_the_verdict_on_faults_and_the_evaluation_after(checked, place, change, status, message):
    start = time.perf_counter()
    found = checked.evaluate(DOUBLE, double(**change))
    assert (found.status, found.message.startswith(message)) == (status, True), found.message
    assert time.perf_counter() - start < 15
    assert left_in(place) == []
    assert checked.evaluate(DOUBLE, double(before=f"(void){len(str(change))};")).correct


def test_a_fork_bomb_finds_no_fork(checked, place):
    bomb = double(
        before="int forked = 0; for (int k = 0; k < 99; k++) { int p = fork(); while (!p) fork(); forked += p > 0; }",
        value="forked ? 0 : 2 * x[i]",
    )
    assert checked.evaluate(DOUBLE, bomb).correct
    assert left_in(place) == []


@pytest.mark.parametrize(
    ("attack", "succeeded"),
    [
        ('open("/tmp/kernelwright-was-here", O_CREAT | O_WRONLY, 0600)', ">= 0"),
        ('unlink("/tmp/kernelwright-victim")', "== 0"),
        ('execl("/bin/sh", "sh", "-c", "echo", (char *)0)', "== 0"),
        ("socket(2, 1, 0)", ">= 0"),
        ("kill(getppid(), 9)", "== 0"),
        ("ptrace(16, getppid(), 0, 0)", "== 0"),
    ],
)
def test_the_worker_is_sealed(checked, attack, succeeded):
    victim = Path("/tmp/kernelwright-victim")
    victim.write_text("still here")
    top = "#include <signal.h>\n#include <sys/socket.h>\n#include <sys/ptrace.h>"
    found = checked.evaluate(
        DOUBLE, double(top=top, before=f"int won = {attack} {succeeded};", value="won ? 0 : 2 * x[i]")
    )
    assert found.correct, found.message
    assert victim.read_text() == "still here" and not Path("/tmp/kernelwright-was-here").exists()
    victim.unlink()


def test_nothing_of_the_parent_is_in_the_worker(checked, monkeypatch):
    monkeypatch.setenv("KERNELWRIGHT_SECRET", "1")
    before = 'int secret = getenv("KERNELWRIGHT_SECRET") != 0 || getenv("HOME") != 0;'
    assert checked.evaluate(DOUBLE, double(before=before, value="secret ? 0 : 2 * x[i]")).correct


@pytest.mark.parametrize(
    "cheat",
    [
        # the first result for ever
        {"top": "static float *kept;", "value": "kept ? kept[i] : 2 * x[i]",
         "after": "if (!kept) { kept = malloc(4 * 100000); memcpy(kept, out, 4 * n * m); }"},
        # keyed by pointer and size
        {"top": "static const float *seen; static int size; static float kept[100000];",
         "value": "(seen == x && size == n * m) ? kept[i] : 2 * x[i]",
         "after": "seen = x; size = n * m; memcpy(kept, out, 4 * size);"},
        # right for as many calls as there are checks, then idle
        {"top": "static int calls;", "before": "if (++calls > 5) return;"},
        {"top": "static int calls;", "before": "if (n * m > 1000 && ++calls > 4) return;"},
        # what `out` held before
        {"value": "out[i]"},
    ],
)  # fmt: skip
def test_stale_results_do_not_pass(timed, cheat):
    found = timed.evaluate(DOUBLE, double(**cheat))
    assert found.status is Status.WRONG and not found.kernel_ms


def test_work_after_the_return_is_too_late(timed):
    late = double(
        top="static const float *from; static float *to; static int count;"
        "static void *work(void *p) { usleep(3000); for (int i = 0; i < count; i++) to[i] = 2 * from[i]; return p; }",
        before="from = x; to = out; count = n * m; pthread_t t; pthread_create(&t, 0, work, 0); return;",
    )
    assert timed.evaluate(DOUBLE, late).status is Status.WRONG


def test_a_forged_answer_is_no_result(timed):
    # the worker's channel is descriptor 4: an answer before the work is done
    forged = double(
        top="struct { long long loaded, ns; char error[240]; } answer = {1, 10, {0}};",
        before="write(4, &answer, sizeof answer); usleep(2000);",
    )
    assert timed.evaluate(DOUBLE, forged).status is not Status.CORRECT


def test_time_spent_in_threads_counts(timed):
    busy = "for (volatile int k = 0; k < 2000000;) k++;"
    alone = timed.evaluate(DOUBLE, double(before=busy))
    helped = timed.evaluate(
        DOUBLE,
        double(
            top=f"static void *work(void *p) {{ {busy} return p; }}",
            before="pthread_t t; pthread_create(&t, 0, work, 0); pthread_join(t, 0);",
        ),
    )
    assert alone.correct and helped.correct
    assert sum(helped.kernel_ms) > 0.5 * sum(alone.kernel_ms)


def calls(inside: float, outside: float) -> list[Call]:
    return [Call(status="ok", ms=inside, outside_ms=outside) for _ in range(5)]


def test_the_clock_out_of_reach_wins():
    # a switch of processes and cold caches may cost 0.003 + 0.0025 ms for one megabyte, and half of a call at most
    assert trusted_ms(calls(1.0, 1.005)[0], 1e6) == 1.0
    assert trusted_ms(calls(0.001, 0.9)[0], 1e6) == pytest.approx(0.8945)
    assert trusted_ms(calls(0.001, 0.008)[0], 1e6) == pytest.approx(0.004)
    assert suspicions(calls(1.0, 1.5), 1e6) == []
    assert [hack.rule for hack in suspicions(calls(0.001, 30.0), 1e6)] == ["clock"]


def test_faster_than_memory_is_no_speedup():
    # 100 MB in 0.01 ms would be 10 TB/s
    assert [hack.rule for hack in suspicions(calls(0.01, 0.02), 1e8)] == ["faster than memory"]
    assert suspicions(calls(1.0, 1.1), 1e8) == []
