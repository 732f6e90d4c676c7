"""A tiny random Llama with a byte-level BPE trained on the spot: what the engine tests run on, without a network."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|start|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEXTS = [
    "void kernel(const float *x, float *out, int n, int m) { for (int i = 0; i < n * m; i++) out[i] = x[i]; }",
    "Summary: the loop is vectorised. Compile error in line 3. Wrong result: every element differs.",
    "Grüße, 漢字, naïve 🙂",
]


def tiny_tokenizer(vocabulary: int = 320, template: str | None = TEMPLATE) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        additional_special_tokens=_SPECIAL[2:],
    )
    fast.chat_template = template
    return fast


def tiny_llama(vocabulary: int = 320, *, seed: int = 0, scale: float = 0.3, **changes: Any) -> LlamaForCausalLM:
    """Random weights with a spread that makes the distribution far from uniform."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": scale,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(sizes | changes)))
