"""The languages that a candidate can be written in."""

from kernelwright.kernels.backends import c, triton
from kernelwright.kernels.backends.base import Backend

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (c.BACKEND, triton.BACKEND)}
