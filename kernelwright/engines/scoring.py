"""Teacher-forced log-probabilities of training rows under a causal language model, with or without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelwright.types import Sample

# some families change the logits after the output matrix; for those the model's own `forward` is asked for logits
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Scores(NamedTuple):
    """Of the N scored tokens, rows one after another."""

    logprobs: Tensor  # [N]
    entropies: Tensor  # [N]


def micro_batches(rows: Sequence[Sample], tokens: int) -> list[list[int]]:
    """Row numbers in batches of at most `tokens` padded tokens, rows of similar length together.

    A row longer than `tokens` is a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    # longest first: the first row of a batch is its width
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens)):
        if not batches or (len(batches[-1]) + 1) * width > tokens:
            batches.append([])
            width = len(rows[index].tokens)
        batches[-1].append(index)
    return batches


def score(model: Any, rows: Sequence[Sample], wanted: Sequence[Sequence[int]], *, temperature: float) -> Scores:
    """Log-probability and entropy at the wanted tokens.

    Args:
        model: a transformers causal language model.
        rows: training rows of any lengths.
        wanted: one list a row: 1 where the token's score is wanted  [B][L]; never at position 0.
        temperature: the logits are divided by it, as they were in sampling.

    Padding is on the right, where causal attention cannot see it from any real token, so there is no mask. Only the
    wanted positions go through the output matrix and the softmax, which is in float32.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    width = max(len(row.tokens) for row in rows)
    padded = [(*row.tokens, *[0] * (width - len(row.tokens))) for row in rows]
    tokens = torch.tensor(padded, dtype=torch.long, device=model.device)
    flags = [[*list(flag), *[0] * (width - len(flag))] for flag in wanted]
    row, column = torch.tensor(flags, dtype=torch.bool, device=model.device).nonzero(as_tuple=True)
    positions = torch.arange(width, device=model.device).expand(len(rows), -1)
    logits = _logits(model, tokens, positions, row, column - 1).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return Scores(
        logprobs=logprobs.gather(-1, tokens[row, column][:, None])[:, 0],
        entropies=-(logprobs.exp() * logprobs).sum(-1),
    )


def _logits(model: Any, tokens: Tensor, positions: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Logits at (row, column)  [N, V]."""
    call = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES):
        return model(**call).logits[row, column]
    hidden = model.get_decoder()(**call).last_hidden_state
    return model.get_output_embeddings()(hidden[row, column])
