"""Sampling with a causal language model: contexts in, completions with log-probabilities out.

Every reply has its own stream of uniform numbers, seeded by (seed, key), and every token is the inverse of the
cumulative distribution at the next of them. So a reply is a function of the weights, its context, its key and
the sampling settings; the other rows of the batch enter only through the rounding of matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernelwright.engines.decoders import Split, split, whole
from kernelwright.types import Completion, Sampling


class Decoder(Protocol):
    """Incremental forward pass over a batch of rows."""

    shares: bool
    device: torch.device

    def start(self, plan: Split) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, rows: Tensor) -> None: ...


def draw(logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """One token a row by inversion, and its log-probability under the distribution it was drawn from.

    Args:
        logits: [R, V]; computed on in float32, summed up in float64.
        uniforms: [R] in [0, 1); token v is drawn where the cumulative probability first exceeds the uniform number.
        temperature: 0 takes the most likely token, whose probability is then 1.
        top_p: only the most likely tokens that together reach this probability can be drawn.

    Returns:
        tokens [R] and log-probabilities [R].
    """
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = logprobs.exp().sort(dim=-1, descending=True)
        outside = ordered.double().cumsum(-1) - ordered >= top_p
        logprobs = logprobs.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
        logprobs = torch.log_softmax(logprobs, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def uniforms(seed: int, key: tuple[int, ...], count: int) -> np.ndarray:
    """The reply's own stream: `count` numbers in [0, 1) from Philox, seeded by the run's seed and the reply's key."""
    # unsigned: a seed sequence takes no negative numbers; the length keeps (1,) and (1, 0) apart
    words = [value % 2**64 for value in (seed, len(key), *key)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words))).random(count)


def generate(
    decoder_of: Any,
    contexts: Sequence[Sequence[int]],
    sampling: Sampling,
    keys: Sequence[tuple[int, ...]],
    *,
    ends: Sequence[int],
    policy: int,
    cache_tokens: int,
) -> list[Completion]:
    """One completion a context.

    Args:
        decoder_of: makes a fresh `Decoder`.
        contexts: prompts as token ids, each shorter than `sampling.budget`.
        keys: one a context; equal keys with equal contexts give equal replies.
        ends: tokens that end a reply; they are part of it.
        policy: recorded in the completions.
        cache_tokens: rows x columns that the cache of one batch may have.
    """
    if len(contexts) != len(keys):
        raise ValueError(f"one key a context, got {len(keys)} keys and {len(contexts)} contexts")
    rooms = [min(sampling.max_tokens, sampling.budget - len(context)) for context in contexts]
    for context, room in zip(contexts, rooms, strict=True):
        if not context or room < 1:
            raise ValueError(
                f"a prompt has 1 to {sampling.budget - 1} tokens (the budget less one), got {len(context)}"
            )
    prompts = [tuple(context) for context in contexts]
    completions: list[Completion | None] = [None] * len(prompts)
    for rows in _chunks(prompts, rooms, cache_tokens):
        decoder = decoder_of()
        plan = (split if decoder.shares else whole)([prompts[row] for row in rows])
        streams = torch.tensor(
            np.stack([uniforms(sampling.seed, keys[row], sampling.max_tokens) for row in rows]), device=decoder.device
        )
        replies = _decode(decoder, plan, streams, [rooms[row] for row in rows], ends=ends, sampling=sampling)
        for row, (tokens, logprobs) in zip(rows, replies, strict=True):
            completions[row] = Completion(
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop="end" if tokens[-1] in ends else "length",
                policy=policy,
            )
    return [completion for completion in completions if completion is not None]


def _chunks(prompts: Sequence[tuple[int, ...]], rooms: Sequence[int], cache_tokens: int) -> Iterator[list[int]]:
    """Rows in sorted order, so that neighbours share their beginnings, cut where the cache would be full."""
    chunk: list[int] = []
    width = 0
    for row in sorted(range(len(prompts)), key=lambda row: prompts[row]):
        wider = max(width, len(prompts[row]) + rooms[row])
        if chunk and wider * (len(chunk) + 1) > cache_tokens:
            yield chunk
            chunk, wider = [], len(prompts[row]) + rooms[row]
        chunk.append(row)
        width = wider
    if chunk:
        yield chunk


def _decode(
    decoder: Decoder,
    plan: Split,
    streams: Tensor,
    rooms: Sequence[int],
    *,
    ends: Sequence[int],
    sampling: Sampling,
) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each row's reply; rows that are finished leave the batch."""
    device = decoder.device
    room, end = torch.tensor(rooms, device=device), torch.tensor(list(ends), dtype=torch.long, device=device)
    live = torch.arange(len(rooms), device=device)
    drawn = torch.zeros(len(rooms), max(rooms), dtype=torch.long, device=device)
    scores = torch.zeros(len(rooms), max(rooms), device=device)
    lengths = torch.zeros(len(rooms), dtype=torch.long, device=device)
    logits = decoder.start(plan)
    for step in range(max(rooms)):
        tokens, logprobs = draw(logits, streams[live, step], temperature=sampling.temperature, top_p=sampling.top_p)
        drawn[live, step], scores[live, step] = tokens, logprobs
        finished = torch.isin(tokens, end) | (step + 1 >= room[live])
        # a finished row stays in the batch for a while: only the first end counts
        lengths[live] = torch.where(finished & (lengths[live] == 0), step + 1, lengths[live])
        going = lengths[live] == 0
        count = int(going.sum())
        if count == 0:
            break
        if count <= 0.8 * len(live):
            rows = going.nonzero()[:, 0]
            live, tokens = live[rows], tokens[rows]
            decoder.keep(rows)
        logits = decoder.step(tokens)
    table = zip(drawn.tolist(), scores.tolist(), lengths.tolist(), strict=True)
    return [(tokens[:length], logprobs[:length]) for tokens, logprobs, length in table]
