"""Evaluation of generated kernels: the only place that runs generated code."""

from kernelwright.kernels.backends import BACKENDS
from kernelwright.kernels.backends.base import Backend
from kernelwright.kernels.evaluate import Evaluator, evaluate
from kernelwright.kernels.validate import validate

__all__ = ["BACKENDS", "Backend", "Evaluator", "evaluate", "validate"]
