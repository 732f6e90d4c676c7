"""Tasks that could be passed without computing are found."""

import dataclasses

import pytest
from kernel_tasks import DOUBLE, ROWS, SOFTMAX, task

from kernelwright.kernels import validate


@pytest.mark.parametrize("fine", [SOFTMAX, DOUBLE, ROWS])
def test_a_sound_task_has_no_complaints(fine):
    assert validate(fine) == []


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (("return x - x",), "an output of zeros passes every check"),
        (("return x * 1.0",), "the first input itself passes every check"),
        (("return x * 0 + 3",), "a constant passes every check"),
        (("return x * 0 + 3",), "the output for other inputs passes every check"),
        (("x = x - x", "return x"), "an output of which only the first half is written passes every check"),
        (("return F.dropout(x)",), "the reference is random: two runs on the same inputs differ"),
        (("return (x * 1e6 + 1e12) - 1e12",), "the reference in float32 differs from itself in float64"),
        (("return x @ x",), "the reference raised RuntimeError"),
    ],
)
def test_an_unsound_task_is_told_why(body, complaint):
    assert any(complaint in found for found in validate(task("unsound", *body)))


def test_relu_of_positive_inputs_is_the_identity():
    relu = task("relu", "return F.relu(x)")
    assert validate(relu) == []
    positive = dataclasses.replace(relu.inputs[0], kind="positive")
    assert "the first input itself passes every check" in validate(dataclasses.replace(relu, inputs=(positive,)))
