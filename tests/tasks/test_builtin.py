"""The builtin task sets: their sizes, what keeps them apart, and that the self-checks accept them."""

import pytest

from kernelwright.errors import BadTask, UnknownName, UserError
from kernelwright.kernels import validate
from kernelwright.tasks import builtin, load
from kernelwright.tasks.operators import OPERATORS, UNPRACTISED, composable


def test_the_sets_have_their_sizes_and_share_no_task():
    sets = {name: set(builtin.chains(name)) for name in builtin.SETS}
    assert (len(sets["validation"]), len(sets["heldout"])) == (16, 64)
    assert len(sets["train"]) >= 200
    assert sum(len(chains) for chains in sets.values()) == len(set.union(*sets.values())) == len(load("builtin"))


def test_held_out_tasks_are_compositions_and_half_of_them_contain_an_operator_nobody_practised():
    practised = {name for chain in builtin.chains("train") for name in chain}
    assert not practised & set(UNPRACTISED)
    heldout = builtin.chains("heldout")
    assert all(len(chain) > 1 for chain in heldout)
    assert 24 <= sum(bool(set(chain) & set(UNPRACTISED)) for chain in heldout) <= 40


def test_operators():
    assert len(OPERATORS) >= 24
    assert composable(("matmul", "gelu", "sum", "sqrt_abs"))
    assert not composable(("gelu", "matmul"))
    assert not composable(("sum", "softmax"))
    assert not composable(("sum", "mul"))
    assert not composable(("add", "mul"))  # both read y


def test_a_reference_reads_as_a_person_would_write_it():
    task = load("builtin/mul-gelu-softmax")[0]
    assert "x = x * y\n        x = F.gelu(x)\n        return F.softmax(x, dim=-1)" in task.reference
    assert [tensor.name for tensor in task.inputs] == ["x", "y"]
    sizes = [tuple(shape.values()) for shape in task.check_shapes]
    assert (1, 1) in sizes
    assert any(n % 2 and m % 2 and m > 64 for n, m in sizes)


@pytest.mark.parametrize("name", ["validation", "heldout"])
def test_the_self_checks_accept_the_measured_tasks(name):
    assert {task.id: found for task in load(f"builtin:{name}") if (found := validate(task))} == {}


def test_the_self_checks_refuse_weak_tasks():
    constant = builtin.make(("softmax", "sum"))
    zero = builtin.make(("max_shift", "relu"))
    assert any("constant" in line for line in validate(constant))
    assert any("zeros" in line for line in validate(zero))


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("builtin:trian", UnknownName, "did you mean 'train'"),
        ("builtin/softmx", UnknownName, "did you mean 'softmax'"),
        ("kernels", UserError, "expected one of builtin"),
        ("file:no/such/file.py", BadTask, "does not exist"),
    ],
)
def test_a_wrong_spec_is_one_line_that_helps(spec, kind, words):
    with pytest.raises(kind) as error:
        load(spec)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
