"""What the starter policy learns from: chains it may see, slips that fail as they say, dialogues that go somewhere."""

import itertools
import shutil
from random import Random

import pytest

from kernelwright.kernels import Evaluator
from kernelwright.prompts import read_reply
from kernelwright.starter import corpus, tokenizer
from kernelwright.starter.drafts import Draft, repaired, source
from kernelwright.tasks import builtin
from kernelwright.types import Evaluation, Status

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")

CHAIN = ("mul", "softmax")


def _clean(**changes) -> Draft:
    return Draft(chain=CHAIN, spellings=(0, 0), single=True, **changes)


def test_no_chain_of_a_measured_set_is_in_the_corpus():
    reserved = {*builtin.chains("validation"), *builtin.chains("heldout")}
    seen = set(itertools.islice(corpus.random_chains(Random(3)), 5000))
    assert len(seen) > 2000
    assert not seen & reserved


@needs_compiler
@pytest.mark.parametrize(
    ("slip", "statuses"),
    [
        ("semicolon", {Status.COMPILE_ERROR}),
        ("undeclared", {Status.COMPILE_ERROR}),
        ("brace", {Status.COMPILE_ERROR}),
        ("crash", {Status.CRASH, Status.TIMEOUT}),
        ("endless", {Status.TIMEOUT}),
        ("bounds", {Status.WRONG}),
        ("overrun", {Status.WRONG, Status.CRASH}),
        ("drop", {Status.WRONG}),
        ("initial", {Status.WRONG}),
        ("stride", {Status.WRONG, Status.CRASH}),
    ],
)
def test_a_slip_fails_as_it_should(slip, statuses):
    with Evaluator(backend="c", timing=False) as evaluator:
        assert evaluator.evaluate(builtin.make(CHAIN), source(_clean(slip=slip))).status in statuses


def test_a_reply_is_read_back_as_it_was_written():
    written = corpus.reply(_clean(), "mul then softmax in single precision.", "first version.")
    read = read_reply(written.text)
    assert (read.source, read.summary) == (source(_clean()), "first version.")
    assert read_reply(corpus.reply(_clean(slip="no_code"), "x.", "y.").text).source is None


def test_repairs_remove_what_they_name():
    broken = Draft(chain=("gelu", "std"), spellings=(-1, -1), slip="bounds")
    assert broken.misconceptions == ("gelu", "std")
    assert repaired(broken, misconceptions=False) == Draft(chain=("gelu", "std"), spellings=(-1, -1))
    assert repaired(broken, slip=False).misconceptions == ()


def test_a_dialogue_is_a_function_of_its_seed_and_answers_what_was_said():
    def judge(chain, text):
        del chain
        status = Status.NO_CODE if text is None else Status.WRONG if "erff(v))" in text else Status.CORRECT
        return Evaluation(task="t", backend="c", status=status)

    first, second = (corpus.dialogue(("gelu",), 3, judge, Random(5)) for _ in range(2))
    assert first == second
    assert [exchange.evaluation is None for exchange in first.exchanges] == [False, False, True]
    cured = answered = 0
    for seed in range(300):
        talk = corpus.dialogue(("gelu",), 2, judge, Random(seed))
        before, after = (exchange.reply.draft for exchange in talk.exchanges)
        evaluation = talk.exchanges[0].evaluation
        if evaluation and evaluation.status is Status.WRONG and before.slip is None:
            answered += 1
            cured += not after.misconceptions
    assert answered > 50
    # the share of the module, within four standard errors
    assert abs(cured / answered - corpus.CURES_MISCONCEPTION) < 4 * (0.2 / answered) ** 0.5


def test_a_kernel_is_a_few_dozen_tokens_and_comes_back_unchanged():
    rng = Random(1)
    texts = [corpus.first_reply(chain, rng).text for chain in itertools.islice(corpus.random_chains(rng), 800)]
    tokens = tokenizer.train(texts, vocabulary=1500)
    encoded = [tokens.encode(text, add_special_tokens=False) for text in texts]
    assert [tokens.decode(ids) for ids in encoded] == texts
    assert sum(map(len, encoded)) / len(encoded) < 40
    unseen = "Plan: ünseen → 3.25\n```c\nint q;\n```\n"
    assert tokens.decode(tokens.encode(unseen, add_special_tokens=False)) == unseen
