"""Teacher-forced log-probabilities of training rows under a causal language model, with or without gradient.

Rows of one task begin with the same prompt. That beginning goes through the model once a micro-batch and its keys and
values serve every row; the gradient of all rows flows back through it, so the sum of the gradients is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kernelwright.engines.decoders import Split, cache_argument, shares_beginnings, split, whole
from kernelwright.types import Sample

# some families change the logits after the output matrix; for those the model's own `forward` is asked for logits
# share of all tokens that shared beginnings must save: attention over a cache is slower than over plain rows
_WORTH_SHARING = 0.3
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Scores(NamedTuple):
    """Of the N scored tokens, rows one after another."""

    logprobs: Tensor  # [N]
    entropies: Tensor  # [N]


class MicroBatch(NamedTuple):
    """Some of the rows, cut into shared beginnings and own ends."""

    rows: list[int]  # [R]
    plan: Split


def micro_batches(
    model: Any, rows: Sequence[Sample], wanted: Sequence[Sequence[int]], *, tokens: int
) -> list[MicroBatch]:
    """All rows in batches of at most `tokens` padded tokens, rows with ends of similar length together.

    A row longer than `tokens` is a batch of its own. A beginning is shared as far as no wanted token is predicted from
    it.
    """
    # up to the first wanted token; `split` leaves the last of these, from which it is predicted, to the row's own end
    openings = [row.tokens[: list(flags).index(1)] for row, flags in zip(rows, wanted, strict=True)]
    order = sorted(range(len(rows)), key=lambda row: openings[row])
    prompts = [openings[row] for row in order]
    plan = split(prompts) if shares_beginnings(model) else whole(prompts)
    saved = sum(len(plan.heads[index]) for index in plan.head) - sum(map(len, plan.heads))
    if saved < _WORTH_SHARING * sum(len(row.tokens) for row in rows):
        plan = whole(prompts)
    head = dict(zip(order, plan.head, strict=True))
    tails = {row: rows[row].tokens[len(plan.heads[head[row]]) :] for row in order}
    batches: list[list[int]] = []
    width, heads = 0, set[int]()
    # longest first: the first row of a batch is its width
    for row in sorted(order, key=lambda row: (-len(tails[row]), row)):
        together = heads | {head[row]}
        size = width * (len(batches[-1]) + 1) if batches else 0
        if not batches or size + len(together) * max(len(plan.heads[index]) for index in together) > tokens:
            batches.append([])
            width, together = len(tails[row]), {head[row]}
        batches[-1].append(row)
        heads = together
    return [_micro_batch(batch, plan, head, tails) for batch in batches]


def _micro_batch(rows: list[int], plan: Split, head: dict[int, int], tails: dict[int, tuple[int, ...]]) -> MicroBatch:
    used = sorted({head[row] for row in rows})
    place = {index: new for new, index in enumerate(used)}
    part = Split(
        heads=tuple(plan.heads[index] for index in used),
        head=tuple(place[head[row]] for row in rows),
        tails=tuple(tails[row] for row in rows),
    )
    return MicroBatch(rows, part)


def score(model: Any, plan: Split, wanted: Sequence[Sequence[int]], *, temperature: float) -> Scores:
    """Log-probability and entropy at the wanted tokens.

    Args:
        model: a transformers causal language model.
        plan: the rows of a micro-batch.
        wanted: one list a row: 1 where the token's score is wanted  [R][L]; never within a shared beginning.
        temperature: the logits are divided by it, as they were in sampling.

    Padding is on the right, where causal attention cannot see it from any real token. Only the wanted positions go
    through the output matrix and the softmax, which is in float32.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    device = model.device
    tokens, _ = right_padded(plan.tails, device)
    own = [flags[len(plan.heads[head]) :] for head, flags in zip(plan.head, wanted, strict=True)]
    row, column = right_padded(own, device)[0].nonzero(as_tuple=True)
    logits = _logits(model, plan, tokens, (row, column - 1)).float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return Scores(
        logprobs=logprobs.gather(-1, tokens[row, column][:, None])[:, 0],
        entropies=-(logprobs.exp() * logprobs).sum(-1),
    )


def right_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged rows, left-aligned and filled up with zeros  [R, longest], and their lengths  [R]."""
    width = max(len(row) for row in rows)
    values = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long, device=device)
    return values, torch.tensor([len(row) for row in rows], device=device)


def _logits(model: Any, plan: Split, tokens: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Logits at (row, column) of the rows' own ends  [N, V]."""
    config = model.config.get_text_config(decoder=True)
    direct = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES)
    forward = model if direct else model.get_decoder()
    positions = torch.arange(tokens.shape[1], device=model.device).expand(len(tokens), -1)
    call: dict[str, Any] = {"use_cache": False}
    if any(plan.heads):
        heads, lengths = right_padded(plan.heads, model.device)
        columns = torch.arange(heads.shape[1], device=model.device)
        name, cache = cache_argument(model), cast(Any, DynamicCache())
        forward(input_ids=heads, position_ids=columns.expand(len(heads), -1), use_cache=True, **{name: cache})
        of_row = torch.tensor(plan.head, device=model.device)
        # beam search's name for "row i continues from beginning of_row[i]"; the gradient sums over its rows
        cache.reorder_cache(of_row)
        lengths = lengths[of_row][:, None]
        seen = torch.cat([columns < lengths, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
        positions = positions + lengths
        call = {"use_cache": True, "attention_mask": seen.long(), name: cache}
    output = forward(input_ids=tokens, position_ids=positions, **call)
    return output.logits[places] if direct else model.get_output_embeddings()(output.last_hidden_state[places])
