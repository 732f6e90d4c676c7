"""Cached decoding for Llama-shaped models on a CPU, written out: at one to ten million parameters a step of the
general decoder is mostly Python and copies of keys and values.

What it does differently: fused projections; a prompt beginning that several rows share is kept once, and the queries of
all its rows meet it in one matrix product; own keys and values are written in place. `ModuleDecoder` is the reference
in its tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernelwright.engines.decoders import Split, right_padded

# R rows, U distinct beginnings, S tokens of a pass, P columns of a beginning, C columns of own keys and values,
# K key heads, Q query heads of each of them, D size of a head
_BLOCK = 64
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class _Layer(NamedTuple):
    norm: Tensor
    projection: Tensor  # queries, keys and values
    output: Tensor
    feed_norm: Tensor
    gate_up: Tensor
    down: Tensor


def supported(model: Any) -> bool:
    """Whether `LlamaDecoder` computes what the model's `forward` computes."""
    from transformers import LlamaForCausalLM

    config = model.config
    return (
        type(model) is LlamaForCausalLM
        and model.dtype == torch.float32
        and model.device.type == "cpu"
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and model.model.rotary_emb.rope_type in ("default", "linear", "llama3", "yarn")
    )


class LlamaDecoder:
    """Decodes a model that is `supported`; the weights are read once, at construction."""

    shares = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.device = model.device
        self._key_heads = config.num_key_value_heads
        self._queries = config.num_attention_heads // self._key_heads
        self._size = model.model.layers[0].self_attn.head_dim
        self._epsilon = config.rms_norm_eps
        self._rotary = model.model.rotary_emb
        self._embedding = model.model.embed_tokens.weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = model.lm_head.weight.detach()
        self._layers = [_fused(layer) for layer in model.model.layers]

    def start(self, plan: Split) -> Tensor:
        """Logits of the first reply token of each row  [R, V]."""
        heads, head_lengths = right_padded(plan.heads, self.device)
        tails, tail_lengths = right_padded(plan.tails, self.device)
        self._group = torch.tensor(plan.head, device=self.device)
        self._head_lengths, self._lengths = head_lengths[self._group], tail_lengths
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._own: list[list[Tensor]] = []
        if heads.shape[1]:
            self._forward(heads, torch.arange(heads.shape[1], device=self.device)[None], self._attend_head)
        self._index_groups(len(plan.heads))
        columns = torch.arange(tails.shape[1], device=self.device)
        causal = (columns[:, None] >= columns[None, :]).expand(len(tails), -1, -1)
        visible = self._head_visible(heads.shape[1])[:, None].expand(-1, tails.shape[1], -1)
        self._mask = torch.cat([visible, causal], dim=2)[:, None]
        hidden = self._forward(tails, self._head_lengths[:, None] + columns, self._attend_tail)
        return functional.linear(hidden[torch.arange(len(tails), device=self.device), tail_lengths - 1], self._head)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits after one more token a row  [R] -> [R, V]."""
        self._lengths = self._lengths + 1
        self._width = int(self._lengths.max())
        self._columns = torch.arange(self._width, device=self.device)
        own = self._columns < self._lengths[:, None]
        head = self._head_visible(self._shared[0][0].shape[2] if self._shared else 0)
        self._hidden = ~torch.cat([head, own], dim=1)[:, None, None]
        positions = (self._head_lengths + self._lengths - 1)[:, None]
        return functional.linear(self._forward(tokens[:, None], positions, self._attend_step)[:, 0], self._head)

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only."""
        self._lengths, self._head_lengths = self._lengths[rows], self._head_lengths[rows]
        groups, self._group = self._group[rows].unique(return_inverse=True)
        if self._shared and len(groups) < len(self._shared[0][0]):
            self._shared = [(keys[groups], values[groups]) for keys, values in self._shared]
        self._own = [[buffer[rows] for buffer in pair] for pair in self._own]
        self._index_groups(len(groups))

    def _head_visible(self, width: int) -> Tensor:
        return torch.arange(width, device=self.device) < self._head_lengths[:, None]

    def _index_groups(self, groups: int) -> None:
        """Number of each row within its group, and the largest group's size; rows of a group stand together."""
        counts = torch.bincount(self._group, minlength=groups)
        first = counts.cumsum(0) - counts
        self._rank = torch.arange(len(self._group), device=self.device) - first[self._group]
        self._members = int(counts.max())

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states  [R, S, hidden]."""
        hidden = functional.embedding(tokens, self._embedding)
        cosine, sine = (part[:, :, None] for part in self._rotary(hidden, positions))
        turning = self._key_heads * (self._queries + 1)
        shape = (*tokens.shape, turning + self._key_heads, self._size)
        for index, layer in enumerate(self._layers):
            mixed = functional.linear(self._normed(hidden, layer.norm), layer.projection).view(shape)
            turned = mixed[:, :, :turning]
            left, right = turned.chunk(2, dim=-1)
            turned = turned * cosine + torch.cat([-right, left], dim=-1) * sine
            query, key = turned.split([turning - self._key_heads, self._key_heads], dim=2)
            attended = attend(index, query, key, mixed[:, :, turning:])
            hidden = hidden + functional.linear(attended.reshape(*tokens.shape, -1), layer.output)
            gate, up = functional.linear(self._normed(hidden, layer.feed_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return self._normed(hidden, self._norm)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._epsilon)

    def _attend_head(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        del index
        keys, values = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        self._shared.append((keys, values))
        grouped = self._queries > 1
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, is_causal=True, enable_gqa=grouped
        )
        return mixed.transpose(1, 2)

    def _attend_tail(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = [key.transpose(1, 2), value.transpose(1, 2)]
        self._own.append([functional.pad(part, (0, 0, 0, _BLOCK)) for part in own])
        if self._shared:
            own = [
                torch.cat([shared[self._group], part], 2) for shared, part in zip(self._shared[index], own, strict=True)
            ]
        grouped = self._queries > 1
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), *own, attn_mask=self._mask, enable_gqa=grouped
        )
        return mixed.transpose(1, 2)

    def _attend_step(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = torch.arange(len(query), device=self.device)
        if self._width > self._own[index][0].shape[2]:
            self._own[index] = [functional.pad(buffer, (0, 0, 0, _BLOCK)) for buffer in self._own[index]]
        for buffer, new in zip(self._own[index], (key, value), strict=True):
            buffer[rows, :, self._lengths - 1] = new[:, 0]
        keys, values = (buffer[:, :, : self._width] for buffer in self._own[index])
        query = query.view(len(query), self._key_heads, self._queries, self._size) * self._size**-0.5  # [R, K, Q, D]
        own = query @ keys.transpose(2, 3)
        if not self._shared:
            return own.masked_fill_(self._hidden, -torch.inf).softmax(-1) @ values
        shared_keys, shared_values = self._shared[index]
        head = self._met(query, shared_keys.transpose(2, 3))
        weights = torch.cat([head, own], dim=-1).masked_fill_(self._hidden, -torch.inf).softmax(-1)
        width = shared_keys.shape[2]
        return self._met(weights[..., :width], shared_values) + weights[..., width:] @ values

    def _met(self, rows: Tensor, shared: Tensor) -> Tensor:
        """Matrix product of each row's [K, Q, X] with its group's [U, K, X, Y]: all rows of a group in one product."""
        groups, members = len(shared), self._members
        table = rows.new_zeros(groups, members, *rows.shape[1:])
        table[self._group, self._rank] = rows
        table = table.transpose(1, 2).reshape(groups, self._key_heads, members * self._queries, -1)
        product = (table @ shared).view(groups, self._key_heads, members, self._queries, -1)
        return product.transpose(1, 2)[self._group, self._rank]


def _fused(layer: Any) -> _Layer:
    attention, feed = layer.self_attn, layer.mlp
    projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return _Layer(
        norm=layer.input_layernorm.weight.detach(),
        projection=torch.cat(projections).detach(),
        output=attention.o_proj.weight.detach(),
        feed_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([feed.gate_proj.weight, feed.up_proj.weight]).detach(),
        down=feed.down_proj.weight.detach(),
    )
