"""Tokens a second of the local engine on a starter-sized Llama with random weights: `python benchmarks/sampling.py`.

Turn 1: the members of a group share their prompt. Turn 3: they share its beginning only. Updates: all rows of turn 3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernelwright.engines.local import LocalEngine
from kernelwright.engines.scripted import ByteTokenizer
from kernelwright.loss import clipped
from kernelwright.types import Optimiser, Sample, Sampling


def main() -> None:
    """Measure and print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the shared beginning")
    parser.add_argument("--history", type=int, default=120, help="further prompt tokens at turn 3")
    parser.add_argument("--reply", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = _engine()
    random = np.random.default_rng(0)
    tasks = [tuple(random.integers(10, 1000, options.prompt).tolist()) for _ in range(options.tasks)]
    first = [task for task in tasks for _ in range(options.members)]
    third = [(*task, *random.integers(10, 1000, options.history).tolist()) for task in first]
    sampling = Sampling(max_tokens=options.reply, budget=2048)
    keys = [(row,) for row in range(len(first))]
    for name, contexts in (("turn 1", first), ("turn 3", third)):
        seconds, replies = _timed(lambda contexts=contexts: engine.sample(contexts, sampling, keys))
        tokens = sum(len(reply.tokens) for reply in replies)
        print(f"{name}: {tokens} tokens sampled in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    rows = [_row(context, reply.tokens, reply.logprobs) for context, reply in zip(third, replies, strict=True)]
    total = sum(len(row.tokens) for row in rows)
    for name, work in (
        ("logprobs", lambda: engine.logprobs(rows)),
        ("update", lambda: engine.update(rows, clipped, Optimiser(lr=1e-5))),
    ):
        seconds, _ = _timed(work)
        print(f"{name}: {total} tokens in {seconds:.2f} s, {total / seconds:.0f} tokens/s")


def _engine() -> LocalEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # no end token: every reply has the full length
        eos_token_id=None,
        bos_token_id=None,
    )
    return LocalEngine(LlamaForCausalLM(config), ByteTokenizer(), device="cpu", ends=())


def _row(context: tuple[int, ...], tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Sample:
    zeros, count = (0.0,) * len(context), len(tokens)
    return Sample(
        tokens=(*context, *tokens),
        mask=(0,) * len(context) + (1,) * count,
        logprobs=(*zeros, *logprobs),
        advantages=(*zeros, *(0.1,) * count),
        weights=(*zeros, *(0.1,) * count),
        origin=("random", 0, 0),
    )


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the faster of two runs, and the result."""
    best, result = float("inf"), None
    for _ in range(2):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


if __name__ == "__main__":
    main()
