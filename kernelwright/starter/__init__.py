"""The built-in starter policy: a small causal language model that writes C kernels, imperfectly on purpose.

`weights/` is a Hugging Face folder made by `scripts/build_starter`; `path()` is where it lies.
"""

from __future__ import annotations

from importlib import resources


def path() -> str:
    """The folder of the starter policy's weights and tokenizer."""
    return str(resources.files("kernelwright.starter").joinpath("weights"))
