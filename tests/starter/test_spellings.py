"""Every spelling of every operator, through the real evaluator: the right ones are right, the misconceptions wrong."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernelwright.kernels import Evaluator
from kernelwright.starter.drafts import Draft, source, spelling
from kernelwright.starter.spellings import double_precision
from kernelwright.tasks import builtin
from kernelwright.tasks.operators import OPERATORS
from kernelwright.types import Status

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


def _drafts(name: str) -> list[Draft]:
    found = spelling(name)
    rights = len(found.right) if found else 1
    return [
        Draft(chain=(name,), spellings=(choice,), single=single, fast_maths=single, rows_outside=single)
        for choice in range(rights)
        for single in (False, True)
    ]


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator(backend="c", timing=False) as pool:
        yield pool


def test_every_right_spelling_is_correct(evaluator):
    drafts = [draft for name in OPERATORS for draft in _drafts(name)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda draft: evaluator.evaluate(builtin.make(draft.chain), source(draft)), drafts))
    wrong = [
        f"{draft.chain[0]} {draft.spellings} single={draft.single}: {evaluation.status} {evaluation.message}"
        for draft, evaluation in zip(drafts, found, strict=True)
        if not evaluation.trusted
    ]
    assert not wrong, "\n".join(wrong)


def test_every_misconception_is_wrong(evaluator):
    names = [name for name in OPERATORS if (found := spelling(name)) and found.misconception]
    assert len(names) >= 24
    drafts = [Draft(chain=(name,), spellings=(-1,), single=single) for name in names for single in (False, True)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda draft: evaluator.evaluate(builtin.make(draft.chain), source(draft)), drafts))
    right = [
        draft.chain[0] for draft, evaluation in zip(drafts, found, strict=True) if evaluation.status is not Status.WRONG
    ]
    assert not right


@pytest.mark.parametrize(
    ("single", "double"),
    [
        ("v = 0.5f * v * (1.0f + erff(v * 0.70710678f));", "v = 0.5 * v * (1.0 + erf(v * 0.70710678));"),
        ("  float total = 0.0f;", "  double total = 0.0;"),
        ("power = 1.0f / sqrtf(power / m + 1e-5f);", "power = 1.0 / sqrt(power / m + 1e-5);"),
        ("float o[m];", "float o[m];"),
        ("float *o = out + i * m;", "float *o = out + i * m;"),
    ],
)
def test_double_precision(single, double):
    assert double_precision(single) == double
