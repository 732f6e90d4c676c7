"""Tasks and kernels that the tests of `kernelwright.kernels` share."""

from kernelwright.types import Input, Task

_MODEL = """\
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def forward(self, {arguments}):
{body}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
SHAPES = ({"n": 5, "m": 37}, {"n": 1, "m": 64}, {"n": 3, "m": 1})


def task(name: str, *body: str, arguments: tuple[str, ...] = ("x",), **values) -> Task:
    """A task on matrices [n, m]; `body` are the lines of `forward`."""
    reference = _MODEL.format(
        arguments=", ".join(arguments),
        body="\n".join(f"        {line}" for line in body),
        inputs=", ".join("torch.randn(64, 257)" for _ in arguments),
    )
    inputs = tuple(Input(name=argument, shape=("n", "m")) for argument in arguments)
    defaults = {"check_shapes": SHAPES, "time_shapes": ({"n": 64, "m": 257},)}
    return Task(id=f"test/{name}", statement=name, reference=reference, inputs=inputs, **{**defaults, **values})


SOFTMAX = task("softmax", "x = x * y", "x = F.relu(x)", "return F.softmax(x, dim=-1)", arguments=("x", "y"))
SOFTMAX_C = """\
#include <math.h>
void kernel(const float *x, const float *y, float *out, int n, int m) {
  for (int i = 0; i < n; i++) {
    const float *a = x + (long)i * m, *b = y + (long)i * m;
    float *o = out + (long)i * m;
    float top = -INFINITY, sum = 0;
    for (int j = 0; j < m; j++) {
      float v = a[j] * b[j];
      v = v > 0 ? v : 0;
      o[j] = v;
      top = v > top ? v : top;
    }
    for (int j = 0; j < m; j++) {
      o[j] = expf(o[j] - top);
      sum += o[j];
    }
    for (int j = 0; j < m; j++) {
      o[j] /= sum;
    }
  }
}
"""
DOUBLE = task("double", "return 2 * x")
ROWS = task("rows", "return x.sum(dim=-1)")
# the loop of DOUBLE with a place for mischief before, in and after it
_LOOP = """\
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <fcntl.h>
#include <pthread.h>
{top}
void kernel(const float *x, float *out, int n, int m) {{
  {before}
  for (int i = 0; i < n * m; i++) out[i] = {value};
  {after}
}}
"""


def double(*, top: str = "", before: str = "", value: str = "2 * x[i]", after: str = "") -> str:
    """A C kernel for DOUBLE with something added."""
    return _LOOP.format(top=top, before=before, value=value, after=after)
