"""Token-exact continuation and token positions, on byte-level and on word-level tokenizers."""

from __future__ import annotations

import random

import pytest
from tiny_model import TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kernelwright.chat import Chat
from kernelwright.engines.scripted import ByteTokenizer
from kernelwright.errors import BadModel
from kernelwright.types import Completion, Message

ASK = (Message(role="system", content="be brief"), Message(role="user", content="write void kernel(...)"))
STRIPS_REASONING = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
OPENS_REASONING = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
TRIMS = TEMPLATE.replace("message['content']", "message['content'] | trim")


def completion(tokens: tuple[int, ...], stop: str = "end") -> Completion:
    return Completion(tokens=tokens, logprobs=(-0.5,) * len(tokens), temperature=1.0, top_p=1.0, stop=stop)  # pyright: ignore[reportArgumentType]


def grown(text: str, *more: Message) -> tuple[Message, ...]:
    return (*ASK, Message(role="assistant", content=text), *more)


AGAIN = Message(role="user", content="Compile error in line 3. Again.")


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), tiny_tokenizer(template=None), ByteTokenizer()])
def test_continuation_is_what_the_template_writes(tokenizer) -> None:
    chat = Chat(tokenizer)
    text = "the loop is vectorised 漢字"
    reply = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    added = chat.extend(ASK, completion(reply), text, grown(text, AGAIN))
    assert added is not None
    assert (*chat.encode(ASK), *reply, *added) == chat.encode(grown(text, AGAIN))


def test_sampled_ids_need_not_be_the_canonical_ones() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    text = "void kernel"
    spelled = tuple(tokenizer.convert_tokens_to_ids(list("voidĠkernel")))
    assert len(spelled) > len(tokenizer.encode(text)), "the characters one by one, where the tokenizer merges"
    added = chat.extend(ASK, completion((*spelled, tokenizer.eos_token_id)), text, grown(text, AGAIN))
    assert added is not None
    assert tokenizer.decode(added).startswith("\n<|user|>Compile error")


def test_cut_reply_gets_its_end_as_context() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    reply = tuple(tokenizer.encode("the loop"))
    cut = chat.extend(ASK, completion(reply, "length"), "the loop", grown("the loop", AGAIN))
    whole = chat.extend(ASK, completion((*reply, 1)), "the loop", grown("the loop", AGAIN))
    assert cut is not None
    assert cut[0] == tokenizer.eos_token_id
    assert cut[1:] == whole


@pytest.mark.parametrize(
    ("template", "text"), [(STRIPS_REASONING, "<think>hm</think>done"), (OPENS_REASONING, "hm</think>done")]
)
def test_templates_that_rewrite_history_are_refused(template: str, text: str) -> None:
    tokenizer = tiny_tokenizer(template=template)
    reply = completion((*tokenizer.encode(text), 1))
    assert Chat(tokenizer).extend(ASK, reply, text, grown(text, AGAIN)) is None


def test_template_that_only_trims_is_continued_from_the_sampled_ids() -> None:
    tokenizer = tiny_tokenizer(template=TRIMS)
    text = "done \n"
    added = Chat(tokenizer).extend(ASK, completion((*tokenizer.encode(text), 1)), text, grown(text, AGAIN))
    plain = Chat(tiny_tokenizer()).extend(ASK, completion((*tokenizer.encode(text), 1)), text, grown(text, AGAIN))
    assert added is not None
    assert added == plain


def test_what_did_not_only_grow_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    reply = completion((*tokenizer.encode("done"), 1))
    assert chat.extend(ASK, reply, "done", grown("other", AGAIN)) is None
    assert chat.extend(ASK, reply, "done", (ASK[1], *grown("done", AGAIN)[2:])) is None
    assert chat.extend(ASK, reply, "done", ASK) is None
    foreign_end = completion((*tokenizer.encode("done"), 2))
    assert chat.extend(ASK, foreign_end, "done", grown("done", AGAIN)) is None


def test_end_is_the_token_that_the_template_writes_after_a_reply() -> None:
    assert Chat(tiny_tokenizer()).end() == 1
    assert Chat(tiny_tokenizer(template=TEMPLATE.replace("eos_token", "'<|system|>'"))).end() == 4
    assert Chat(tiny_tokenizer(template=TEMPLATE.replace("eos_token", "'.'"))).end() is None


def test_default_template_reads_as_documented() -> None:
    chat = Chat(tiny_tokenizer(template=None))
    text = chat.tokenizer.decode(chat.encode(grown("done", AGAIN)))
    assert text == (
        "<|start|>System:\nbe brief\n\nUser:\nwrite void kernel(...)\n\nAssistant:\ndone<|end|>\n\n"
        "User:\nCompile error in line 3. Again.\n\nAssistant:\n"
    )


def test_template_that_refuses_a_role_is_one_line() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(BadModel, match=r"refuses the roles system, user \(no system\)"):
        Chat(tiny_tokenizer(template=template)).encode(ASK)


def test_starts_of_a_character_spread_over_tokens() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    bytes_of_smile = tokenizer.convert_tokens_to_ids(list("ðŁĻĤ"))
    tokens = [*tokenizer.convert_tokens_to_ids(["a"]), *bytes_of_smile, 1, *tokenizer.convert_tokens_to_ids(["b"])]
    assert chat.decode(tokens) == "a🙂b"
    assert chat.starts(tokens) == [0, 1, 1, 1, 1, 2, 2]


def test_starts_are_the_lengths_of_the_decoded_beginnings() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    text = "void kernel(漢字, naïve 🙂) { Grüße; }"
    tokens = tokenizer.encode(text)
    starts = chat.starts(tokens)
    assert chat.decode(tokens) == text
    for index, start in enumerate(starts):
        beginning = tokenizer.decode(tokens[:index])
        assert start == len(beginning.rstrip("\ufffd"))


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_have_the_same_starts_from_bytes_and_from_windows(seed: int) -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    draw = random.Random(seed)
    # whole texts and their single bytes, with special tokens between: always valid UTF-8
    pieces = ["void", " kernel", "漢", "🙂", "ü", "\n", "<|end|>", "x;"]
    tokens: list[int] = []
    for piece in draw.choices(pieces, k=30):
        merged = tokenizer.encode(piece)
        single = [tokenizer.convert_tokens_to_ids(c) for name in merged for c in tokenizer.convert_ids_to_tokens(name)]
        tokens += merged if piece.startswith("<") or draw.random() < 0.5 else single
    assert chat.starts(tokens) == chat._window_starts(tokens)


def test_invalid_bytes_keep_starts_within_the_text() -> None:
    chat = Chat(tiny_tokenizer())
    draw = random.Random(0)
    for _ in range(50):
        tokens = [draw.randrange(len(chat.tokenizer)) for _ in range(40)]
        starts = chat.starts(tokens)
        assert starts == sorted(starts)
        assert starts[-1] <= len(chat.decode(tokens))
        whole = chat.decode(tokens)
        for index, start in enumerate(starts):
            assert whole.startswith(chat.decode(tokens[:index])[:start])


def test_tokenizer_that_is_not_byte_level() -> None:
    words = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "\u2581loop": 3, "s": 4, "\u2581漢字": 5}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    chat = Chat(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))
    assert chat.decode([2, 3, 4, 5, 1]) == "the loops 漢字"
    assert chat.starts([2, 3, 4, 5, 1]) == [0, 3, 8, 9, 12]


def test_starts_are_linear_in_the_reply() -> None:
    chat = Chat(tiny_tokenizer())
    calls = 0
    decode = chat.tokenizer.decode

    class Counting:
        def decode(self, tokens, **options):
            nonlocal calls
            calls += len(tokens)
            return decode(tokens, **options)

    chat.tokenizer = Counting()
    tokens = tiny_tokenizer().encode("void kernel(const float *x) { out[i] = x[i]; } " * 40)
    chat._window_starts(tokens)
    assert calls < 8 * len(tokens)
