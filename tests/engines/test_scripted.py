"""The double keeps the engine protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelwright.chat import Chat
from kernelwright.engines.scripted import ByteTokenizer, ScriptedEngine
from kernelwright.errors import BadModel
from kernelwright.types import Engine, Message, Optimiser, Sample, Sampling

SAMPLING = Sampling(max_tokens=8, budget=64)


def row() -> Sample:
    return Sample(
        tokens=(1, 2, 3),
        mask=(0, 0, 1),
        logprobs=(0, 0, -0.5),
        advantages=(0, 0, 2.0),
        weights=(0, 0, 1),
        origin=("t", 0, 0),
    )


def test_keeps_the_protocol() -> None:
    assert isinstance(ScriptedEngine(["a"]), Engine)


def test_replies_of_a_list_follow_the_key() -> None:
    engine = ScriptedEngine(["a", "b", "c"])
    replies = engine.sample([(65,), (66,), (67,)], SAMPLING, [(0, 0, 0), (0, 0, 1), (1, 2, 2)])
    assert [engine.tokenizer.decode(reply.tokens, skip_special_tokens=True) for reply in replies] == ["a", "b", "c"]
    assert engine.seen == [(65,), (66,), (67,)]
    assert replies == engine.sample([(65,), (66,), (67,)], SAMPLING, [(0, 0, 0), (0, 0, 1), (1, 2, 2)])


def test_reply_of_a_function_sees_prompt_and_key() -> None:
    engine = ScriptedEngine(lambda prompt, key: f"{prompt[-3:]}{key[-1]}")
    (reply,) = engine.sample([tuple(b"hello")], SAMPLING, [(4, 7)])
    assert reply.tokens == (*b"llo7", 256)
    assert reply.stop == "end"


def test_long_replies_are_cut_and_the_budget_holds() -> None:
    engine = ScriptedEngine(["0123456789"])
    (reply,) = engine.sample([(65,)], SAMPLING, [(0,)])
    assert (reply.tokens, reply.stop) == (tuple(b"01234567"), "length")
    (reply,) = engine.sample([(65,) * 60], SAMPLING, [(0,)])
    assert len(reply.tokens) == 4
    with pytest.raises(ValueError, match="no room"):
        engine.sample([(65,) * 64], SAMPLING, [(0,)])


def test_update_counts_and_save_restores(tmp_path: Path) -> None:
    engine = ScriptedEngine(["a"])
    metrics = engine.update([row()], lambda *_: None, Optimiser(lr=0.5), lr_scale=0.5)
    assert (metrics["loss"], metrics["tokens"], metrics["lr"], engine.policy) == (-2.0, 1, 0.25, 1)
    assert engine.updated == [(row(),)]
    engine.save(str(tmp_path / "new"))
    other = ScriptedEngine(["a"])
    other.load(str(tmp_path / "new"))
    assert other.policy == 1
    with pytest.raises(BadModel, match="no saved script"):
        other.load(str(tmp_path))


def test_byte_tokenizer_is_its_own_inverse() -> None:
    tokenizer = ByteTokenizer()
    text = "<|user|>naïve 🙂<|end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "naïve 🙂"
    chat = Chat(tokenizer)
    assert chat.encode((Message(role="user", content="hi"),)) == (258, *b"hi", 256, 259)
    assert chat.starts(tokenizer.encode("aü🙂b")) == [0, 1, 1, 2, 2, 2, 2, 3]
