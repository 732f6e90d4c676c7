"""The languages that a candidate can be written in."""

from kernelwright.kernels.backends import c
from kernelwright.kernels.backends.base import Backend

BACKENDS: dict[str, Backend] = {"c": c.BACKEND}
