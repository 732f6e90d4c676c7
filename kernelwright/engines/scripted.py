"""An engine without a model: it replies from a script. The double for tests of everything above the engines.

It keeps the whole protocol, so `train` runs on it: completions are deterministic, `update` counts, and `save` / `load`
restore all of its state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import BadModel
from kernelwright.types import Completion, Loss, Optimiser, Sample, Sampling

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


class ByteTokenizer:
    """One token a byte of UTF-8, and four special tokens; the calls are those of a transformers tokenizer."""

    eos_token_id = 256
    eos_token = _SPECIAL[0]
    # only its presence is asked for: `apply_chat_template` is written out below
    chat_template = "<|role|>content<|end|>"
    all_special_ids = (256, 257, 258, 259)

    def __len__(self) -> int:
        return 256 + len(_SPECIAL)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str | list[int]:
        """`<|role|>content<|end|>` a message, then `<|assistant|>` when a reply is asked for."""
        text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
        text += "<|assistant|>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; the names of special tokens become those tokens, and none is added."""
        del add_special_tokens
        for index, name in enumerate(_SPECIAL):
            text = text.replace(name, chr(0xF0000 + index))
        tokens: list[int] = []
        for character in text:
            index = ord(character) - 0xF0000
            tokens.extend([256 + index] if 0 <= index < len(_SPECIAL) else character.encode())
        return tokens

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        del clean_up_tokenization_spaces
        data = b"".join(
            bytes([token]) if token < 256 else b"" if skip_special_tokens else _SPECIAL[token - 256].encode()
            for token in tokens
        )
        return data.decode(errors="replace")


class ScriptedEngine:
    """Replies from a list or a function.

    Args:
        replies: a list: the reply to a request with `keys[i] == (..., turn)` is `replies[sum(keys[i]) % len(replies)]`;
            or a function (prompt text, key) -> reply. Either way equal requests get equal replies.
        tokenizer: with the calls of a transformers tokenizer; default: `ByteTokenizer`.

    Attributes:
        seen: every context in the order of the requests.
        updated: the rows of every `update`.
    """

    def __init__(self, replies: Sequence[str] | Callable[[str, tuple[int, ...]], str], tokenizer: Any = None) -> None:
        if not callable(replies) and not replies:
            raise ValueError("a script has at least one reply, got an empty list")
        self.replies = replies
        self.tokenizer = tokenizer if tokenizer is not None else ByteTokenizer()
        self.policy = 0
        self.seen: list[tuple[int, ...]] = []
        self.updated: list[tuple[Sample, ...]] = []

    def sample(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion a context, cut (stop "length") where the room ends; see `Engine.sample`."""
        if len(contexts) != len(keys):
            raise ValueError(f"one key a context, got {len(keys)} keys and {len(contexts)} contexts")
        return [self._reply(tuple(context), sampling, key) for context, key in zip(contexts, keys, strict=True)]

    def _reply(self, context: tuple[int, ...], sampling: Sampling, key: tuple[int, ...]) -> Completion:
        self.seen.append(context)
        room = min(sampling.max_tokens, sampling.budget - len(context))
        if room < 1:
            raise ValueError(f"no room for a reply: {len(context)} prompt tokens, budget {sampling.budget}")
        if callable(self.replies):
            text = self.replies(self.tokenizer.decode(list(context)), key)
        else:
            text = self.replies[sum(key) % len(self.replies)]
        tokens = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        return Completion(
            tokens=tokens[:room],
            logprobs=(_LOGPROB,) * len(tokens[:room]),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop="end" if len(tokens) <= room else "length",
            policy=self.policy,
        )

    def logprobs(self, rows: Sequence[Sample], temperature: float = 1.0) -> list[list[float]]:
        """The same constant for every token but the first  [B][L]."""
        del temperature
        return [[0.0, *[_LOGPROB] * (len(row.tokens) - 1)] for row in rows]

    def update(
        self,
        rows: Sequence[Sample],
        loss: Loss,
        optimiser: Optimiser,
        *,
        lr_scale: float = 1.0,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Counts one optimiser step and records the rows; `loss` is minus the sum of the advantages."""
        del loss, temperature
        self.updated.append(tuple(rows))
        self.policy += 1
        total = -math.fsum(value for row in rows for value, on in zip(row.advantages, row.mask, strict=True) if on)
        tokens = sum(sum(row.mask) for row in rows)
        return {"loss": total, "grad_norm": 0.0, "entropy": -_LOGPROB, "tokens": tokens, "lr": optimiser.lr * lr_scale}

    def save(self, path: str) -> None:
        """The counter, as JSON, into the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "scripted.json").write_text(json.dumps({"policy": self.policy}))

    def load(self, path: str) -> None:
        """The inverse of `save`."""
        file = Path(path) / "scripted.json"
        if not file.is_file():
            raise BadModel(f"'{path}' holds no saved script; expected the file scripted.json in it")
        self.policy = int(json.loads(file.read_text())["policy"])

    def capabilities(self) -> dict[str, Any]:
        """What this engine can do."""
        return {"train": True, "seeded": True, "exact_resume": True, "device": "none"}


# e to the power of this is one half
_LOGPROB = -math.log(2.0)
