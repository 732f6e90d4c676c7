"""The starter policy's tokenizer: byte-level BPE whose pieces are whole lines, so a kernel is a few dozen tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# where a piece ends besides the end of a line: inside the sentences whose parts recombine
_CUTS = (
    r"\n|Plan: | then | of |without line |in line \d+: |Correct: | times the |; the loop in |out\[|\] is |, expected "
)


def train(texts: Iterable[str], *, vocabulary: int = 2560) -> Any:
    """A `transformers` tokenizer trained on `texts`; deterministic."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_CUTS), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[3],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
