"""Messages <-> tokens.

Tokens are the truth: what the policy sampled is kept as ids and is never encoded again. When a conversation only grew,
the new prompt is the old prompt's ids, the sampled ids and the ids of what was added (`Chat.extend`); when it did not
grow, or the template rewrites earlier turns, the whole prompt is encoded afresh (`Chat.encode`) and a new row starts.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from kernelwright.errors import BadModel
from kernelwright.types import Completion, Message

# for base models that bring no template: plain words, one blank line between turns, the end token after each reply
DEFAULT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{{ (eos_token or '') if message['role'] == 'assistant' else '' }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:\n{% endif %}"
)

# stands for the reply in a rendering; private-use characters, which no template treats in a special way
_SENTINEL = "\ue000reply\ue001"
# a byte sequence that is no UTF-8 (or not yet) decodes to this
_REPLACEMENT = "\ufffd"


class Chat:
    """A tokenizer's chat template as token arithmetic.

    Args:
        tokenizer: a transformers tokenizer, or an object with the same `encode`, `decode` and `apply_chat_template`.
            Without a chat template of its own, `DEFAULT_TEMPLATE` is used.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._options = {} if getattr(tokenizer, "chat_template", None) else {"chat_template": DEFAULT_TEMPLATE}
        # neighbouring members of a group share their prompts
        self._render = lru_cache(maxsize=256)(self._rendered)
        self._tokens = lru_cache(maxsize=1024)(self._encoded)
        self._bytes = _byte_pieces(tokenizer)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole prompt for the next reply  [C]."""
        return self._tokens(self._render(tuple(messages)))

    def extend(
        self, previous: Sequence[Message], completion: Completion, text: str, messages: Sequence[Message]
    ) -> tuple[int, ...] | None:
        """The tokens that follow the sampled ones in a conversation that only grew  [C], or None.

        Args:
            previous: messages of the prompt to which `completion` was sampled.
            completion: what was sampled; it ends with the end token (stop "end") or was cut (stop "length").
            text: the completion's text as it stands in `messages`.
            messages: the new prompt: `previous`, the reply, and at least one more message.

        None means that the new prompt has to be encoded afresh: it is no continuation, or the template does not keep
        earlier turns as they were (reasoning is stripped, the opening of a reply is changed), or the sampled end token
        is not the one that the template writes.
        """
        old, new, reply = tuple(previous), tuple(messages), len(previous)
        if len(new) <= reply + 1 or new[:reply] != old or new[reply] != Message(role="assistant", content=text):
            return None
        head = self._render(old)
        marked = self._render((*old, Message(role="assistant", content=_SENTINEL), *new[reply + 1 :]))
        full = self._render(new)
        start = marked.find(_SENTINEL)
        tail = marked[start + len(_SENTINEL) :]
        if start < 0 or marked[:start] != head or not full.startswith(head) or not full.endswith(tail):
            return None
        # templates may trim a reply, but must not rewrite it
        if full[len(head) : len(full) - len(tail)].strip() != text.strip():
            return None
        added = self._tokens(tail)
        if completion.stop == "end":
            if not added or added[0] != completion.tokens[-1]:
                return None
            added = added[1:]
        return added or None

    def end(self) -> int | None:
        """The token that the template writes after a reply, None when it writes no special token there."""
        text = self._render((Message(role="user", content="x"), Message(role="assistant", content=_SENTINEL)))
        tail = self._tokens(text[text.find(_SENTINEL) + len(_SENTINEL) :])
        return tail[0] if tail and tail[0] in self.tokenizer.all_special_ids else None

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def starts(self, tokens: Sequence[int]) -> list[int]:
        """Position in `decode(tokens)` at which each token starts  [T], non-decreasing.

        Special tokens have no width. All tokens of a character that is spread over several start where it starts.
        """
        if self._bytes is not None:
            return _byte_starts([self._bytes(token) for token in tokens])
        return self._window_starts(tokens)

    def _window_starts(self, tokens: Sequence[int]) -> list[int]:
        # A window of whole characters is decoded again at every token, because a decoder may treat a text's first
        # token (and incomplete characters) differently; its left edge moves up whenever a character is complete.
        starts, before, position, edge, read = [], "", 0, 0, 0
        for index in range(len(tokens)):
            starts.append(position)
            text = self.decode(tokens[edge : index + 1])
            if text.endswith(_REPLACEMENT) and len(text) >= len(before):
                continue
            position += len(text) - len(before)
            edge, read = read, index + 1
            before = self.decode(tokens[edge:read])
        return starts

    def _rendered(self, messages: tuple[Message, ...]) -> str:
        from jinja2.exceptions import TemplateError

        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=messages[-1].role != "assistant", **self._options
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise BadModel(
                f"the model's chat template refuses the roles {roles} ({error}); use another model"
            ) from error
        return str(text)

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def _byte_starts(pieces: Sequence[bytes]) -> list[int]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, position = [], 0
    for piece in pieces:
        starts.append(position)
        position += len(decoder.decode(piece))
    return starts


def _byte_pieces(tokenizer: Any) -> Any:
    """Function id -> bytes for byte-level BPE tokenizers (b"" for special tokens), None for all others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers.decoders import ByteLevel

    if not isinstance(backend.decoder, ByteLevel):
        return None
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    alphabet = _byte_alphabet()

    @cache
    def piece(token: int) -> bytes:
        if token in special:
            return b""
        name = backend.id_to_token(token) or ""
        values = [alphabet.get(character) for character in name]
        return name.encode() if None in values else bytes(value for value in values if value is not None)

    return piece


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
