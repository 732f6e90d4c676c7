"""Cached decoding with a transformers causal language model: prompts in, the next token's logits out, step by step.

Rows that share the beginning of their prompt (the members of a group) share the work on it: the beginning goes through
the model once, its keys and values are copied to every row, then the rows' own ends follow. In the cache each row is
`[padding | shared beginning | padding | own end | reply so far]`; the mask and explicit positions hide the padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kernelwright.errors import BadModel

# columns by which a full cache grows
_BLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Prompts cut into shared beginnings and own ends: prompt i is `heads[head[i]] + tails[i]`."""

    # distinct beginnings, possibly empty ones
    heads: tuple[tuple[int, ...], ...]
    head: tuple[int, ...]  # [R]
    # never empty: the last token of a prompt is what the first reply token is predicted from
    tails: tuple[tuple[int, ...], ...]  # [R]


def split(prompts: Sequence[tuple[int, ...]]) -> Split:
    """Cut prompts (sorted, so that neighbours share most) where that saves the most tokens.

    Neighbours whose common beginning has at least `threshold` tokens go together; every common length is tried as the
    threshold (at most 32 of them).
    """
    common = [_common(first, second) for first, second in pairwise(prompts)]
    candidates = sorted(set(common) - {0})
    best: tuple[int, list[tuple[int, int, int]]] = (0, [(row, row + 1, 0) for row in range(len(prompts))])
    for threshold in candidates[:: max(1, len(candidates) // 32)]:
        groups = _groups(common, threshold)
        saved = sum((stop - start - 1) * length for start, stop, length in groups)
        best = max(best, (saved, groups), key=lambda choice: choice[0])
    groups = best[1]
    return Split(
        heads=tuple(prompts[start][:length] for start, _, length in groups),
        head=tuple(index for index, (start, stop, _) in enumerate(groups) for _ in range(start, stop)),
        tails=tuple(prompts[row][length:] for start, stop, length in groups for row in range(start, stop)),
    )


def whole(prompts: Sequence[tuple[int, ...]]) -> Split:
    """The cut that shares nothing."""
    return Split(heads=((),), head=(0,) * len(prompts), tails=tuple(prompts))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    # one less than the shorter prompt: every row keeps an end of its own
    limit = min(len(first), len(second)) - 1
    if first[:limit] == second[:limit]:
        return limit
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _groups(common: Sequence[int], threshold: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, shared length) of each run of neighbours; lone rows share nothing."""
    groups, start = [], 0
    for row in range(len(common) + 1):
        if row == len(common) or common[row] < threshold:
            groups.append((start, row + 1, min(common[start:row], default=0)))
            start = row + 1
    return groups


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask of ragged rows, right-aligned  [R, longest]."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], dtype=torch.long, device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return tokens, torch.arange(width, device=device)[None, :] >= (width - lengths)[:, None]


class ModuleDecoder:
    """Decodes through the model's own `forward`; works for every causal model whose layers all attend."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.device
        self._cache_name = cache_argument(model)
        config = model.config.get_text_config(decoder=True)
        self._layers = [_Layer() for _ in range(config.num_hidden_layers)]
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise BadModel(
                f"layers of kind {', '.join(sorted(kinds))} cannot be sampled here; take a model that attends"
            )
        self.shares = shares_beginnings(model)

    def start(self, plan: Split) -> Tensor:
        """Logits of the first reply token of each row  [R, V]."""
        rows = torch.tensor(plan.head, device=self.device)
        lengths = torch.tensor([len(head) for head in plan.heads], device=self.device)[rows]
        self.mask = torch.zeros(len(plan.head), 0, dtype=torch.bool, device=self.device)
        if any(plan.heads):
            tokens, self.mask = left_padded(plan.heads, self.device)
            self._forward(tokens, self.mask.cumsum(1).sub(1).clamp(min=0))
            self.keep(rows)
        tokens, mask = left_padded(plan.tails, self.device)
        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = lengths[:, None] + mask.cumsum(1) - 1
        logits = self._forward(tokens, positions.clamp(min=0))
        self.position = positions[:, -1]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token a row  [R] -> [R, V]."""
        self.position = self.position + 1
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None], self.position[:, None])

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only (a row may be named several times)."""
        self.mask = self.mask[rows]
        if hasattr(self, "position"):
            self.position = self.position[rows]
        for layer in self._layers:
            layer.keep(rows)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens,
            attention_mask=self.mask.long(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: Cache(layers=list(self._layers))},
        )
        return output.logits[:, -1]


class _Layer(DynamicLayer):
    """Keys and values written in place; growing by a block at a time, instead of a copy of everything at each token."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = [state.new_empty((*state.shape[:2], 0, state.shape[3])) for state in (key_states, value_states)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        if stop > self.buffers[0].shape[2]:
            self.buffers = [_grown(buffer, self.length, stop + _BLOCK) for buffer in self.buffers]
        for buffer, state in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : stop] = state
        self.length = stop
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, rows: Tensor) -> None:
        self.buffers = [
            _grown(buffer[:, :, : self.length][rows], self.length, self.length + _BLOCK) for buffer in self.buffers
        ]


def _grown(buffer: Tensor, length: int, size: int) -> Tensor:
    grown = buffer.new_empty((*buffer.shape[:2], size, buffer.shape[3]))
    grown[:, :, :length] = buffer[:, :, :length]
    return grown


def cache_argument(model: Any) -> str:
    """Name of the cache argument of the model's `forward`, which changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def shares_beginnings(model: Any) -> bool:
    """Whether rows may have padding in their middle: windows of sliding attention are counted in columns."""
    return not getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
