"""Make the starter policy: corpus, tokenizer, supervised training. `scripts/build_starter` runs it.

Everything follows from one seed, but for measured times: the speedups quoted in feedback differ in their last digits
from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kernelwright.chat import Chat
from kernelwright.context import digest, full
from kernelwright.environments.refine import refine
from kernelwright.feedback import feedback
from kernelwright.kernels import Evaluator
from kernelwright.loss import likelihood
from kernelwright.reward import kevin
from kernelwright.starter import corpus, tokenizer
from kernelwright.tasks import builtin
from kernelwright.types import Completion, Evaluation, Message, Optimiser, Outcome, Sample, Spans, Turn

Log = Callable[[str], None]


class Settings(NamedTuple):
    """Size of the corpus and of the model, and how it is trained."""

    # first attempts alone, which need no evaluation; dialogues of two and three turns, and on how many tasks
    attempts: int = 14_000
    dialogues: int = 3_600
    dialogue_chains: int = 600
    vocabulary: int = 3_072
    hidden: int = 160
    layers: int = 4
    heads: int = 4
    feed_forward: int = 432
    context: int = 2_048
    batch: int = 64
    epochs: float = 3.0
    lr: float = 2e-3


def build(out: Path, *, seed: int = 0, settings: Settings = Settings(), log: Log = print) -> None:  # noqa: B008
    """Write the starter policy into the folder `out`, in Hugging Face form with bfloat16 weights."""
    with Evaluator(backend="c") as evaluator:
        talks = dialogues(evaluator, settings, seed=seed, log=log)
        openings = Openings(evaluator)
        texts = [message.content for talk in talks for message in openings(talk.chain)]
    texts += [exchange.reply.text for talk in talks for exchange in talk.exchanges]
    texts += [feedback(exchange.evaluation) for talk in talks for exchange in talk.exchanges if exchange.evaluation]
    tokens = tokenizer.train(texts, vocabulary=settings.vocabulary)
    rows = training_rows(talks, openings, Chat(tokens), Random(seed))
    log(f"{len(rows)} rows, {sum(len(row.tokens) for row in rows) / 1e6:.2f} M tokens, vocabulary {len(tokens)}")
    model = train(rows, tokens, settings, seed=seed, log=log)
    save(model, tokens, out)


class Openings:
    """Opening messages of a chain's task, made once."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._made: dict[tuple[str, ...], tuple[Message, ...]] = {}

    def __call__(self, chain: tuple[str, ...]) -> tuple[Message, ...]:
        """The messages with which a trajectory on this chain starts."""
        if chain not in self._made:
            task = builtin.make(chain)
            self._made[chain] = refine(task, evaluator=self._evaluator, reward=kevin)[0]
        return self._made[chain]


def dialogues(evaluator: Evaluator, settings: Settings, *, seed: int, log: Log) -> list[corpus.Dialogue]:
    """The corpus: first attempts, and dialogues of two and three turns whose feedback is the evaluator's."""
    rng = Random(seed)
    chains = corpus.random_chains(rng)
    discussed = [next(chains) for _ in range(settings.dialogue_chains)]
    jobs = [(next(chains), 1, rng.randrange(1 << 60)) for _ in range(settings.attempts)]
    for index in range(settings.dialogues):
        jobs.append((discussed[index % len(discussed)], 2 + rng.randrange(2), rng.randrange(1 << 60)))

    def judge(chain: tuple[str, ...], source: str | None) -> Evaluation:
        return evaluator.evaluate(builtin.make(chain), source)

    def one(job: tuple[tuple[str, ...], int, int]) -> corpus.Dialogue:
        return corpus.dialogue(job[0], job[1], judge, Random(job[2]))

    talks: list[corpus.Dialogue] = []
    with ThreadPoolExecutor(4) as pool:
        for talk in pool.map(one, jobs):
            talks.append(talk)
            if len(talks) > settings.attempts and len(talks) % 500 == 0:
                log(f"{len(talks) - settings.attempts} of {settings.dialogues} dialogues evaluated")
    return talks


def training_rows(
    talks: Iterable[corpus.Dialogue], openings: Openings, chat: Chat, rng: Random, *, share_full: float = 0.35
) -> list[Sample]:
    """Every reply once: a share of the longer dialogues as growing conversations, the others digested turn by turn."""
    rows = []
    for talk in talks:
        opening = openings(talk.chain)
        turns = [_turn(exchange) for exchange in talk.exchanges]
        if len(turns) > 1 and rng.random() < share_full:
            rows.append(_grown(opening, turns, chat))
            continue
        for count, turn in enumerate(turns):
            prompt = digest(opening, turns[:count], lambda _: True)
            if prompt is None:
                raise ValueError("a digest that always fits is never None")
            rows.append(_row([(chat.encode(prompt.messages), 0), (_reply_tokens(turn, chat), 1)]))
    return rows


def _grown(opening: tuple[Message, ...], turns: Sequence[Turn], chat: Chat) -> Sample:
    parts: list[tuple[Sequence[int], int]] = []
    messages: tuple[Message, ...] = ()
    for count, turn in enumerate(turns):
        prompt = full(opening, turns[:count], lambda _: True)
        if prompt is None:
            raise ValueError("a full context that always fits is never None")
        if count == 0:
            parts.append((chat.encode(prompt.messages), 0))
        else:
            before = turns[count - 1]
            completion = Completion(
                tokens=tuple(_reply_tokens(before, chat)),
                logprobs=(0.0,) * len(_reply_tokens(before, chat)),
                temperature=1.0,
                top_p=1.0,
                stop="end",
            )
            added = chat.extend(messages, completion, before.text, prompt.messages)
            if added is None:
                raise ValueError("the starter's chat template continues every conversation")
            parts.append((added, 0))
        parts.append((_reply_tokens(turn, chat), 1))
        messages = prompt.messages
    return _row(parts)


def _reply_tokens(turn: Turn, chat: Chat) -> list[int]:
    return [*chat.tokenizer.encode(turn.text, add_special_tokens=False), chat.tokenizer.eos_token_id]


def _turn(exchange: corpus.Exchange) -> Turn:
    reply, evaluation = exchange
    outcome = Outcome(feedback="", parts={})
    if evaluation is not None:
        outcome = Outcome(feedback=feedback(evaluation), parts=kevin(evaluation, cap=2.0), evaluation=evaluation)
    return Turn(
        purpose="attempt",
        context=(0,),
        continues=False,
        completion=Completion(tokens=(0,), logprobs=(0.0,), temperature=1.0, top_p=1.0, stop="end"),
        text=reply.text,
        source=reply.source,
        spans=Spans(),
        summary=reply.summary,
        outcome=outcome,
    )


def _row(parts: Sequence[tuple[Sequence[int], int]]) -> Sample:
    tokens = tuple(token for piece, _ in parts for token in piece)
    mask = tuple(trained for piece, trained in parts for _ in piece)
    zeros = (0.0,) * len(tokens)
    weights = tuple(map(float, mask))
    return Sample(tokens=tokens, mask=mask, logprobs=zeros, advantages=zeros, weights=weights, origin=("corpus", 0, 0))


def train(rows: list[Sample], tokens: Any, settings: Settings, *, seed: int, log: Log) -> Any:
    """A Llama-shaped model of the given size, trained on the replies with a cosine schedule; returns the engine."""
    import math

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kernelwright.engines.local import LocalEngine

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    engine = LocalEngine(LlamaForCausalLM(config), tokens, device="cpu")
    optimiser = Optimiser(lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rng = Random(seed)
    steps = int(len(rows) * settings.epochs / settings.batch)
    order: list[int] = []
    for step in range(steps):
        if len(order) < settings.batch:
            order += rng.sample(range(len(rows)), len(rows))
        batch = [rows[order.pop(0)] for _ in range(settings.batch)]
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        weight = 1.0 / sum(sum(row.mask) for row in batch)
        metrics = engine.update(batch, partial(likelihood, scale=weight), optimiser, lr_scale=scale)
        if step % 50 == 0 or step == steps - 1:
            log(f"step {step} of {steps}: loss {metrics['loss']:.4f} nats a token")
    return engine


def save(engine: Any, tokens: Any, out: Path) -> None:
    """Weights in bfloat16 and the tokenizer."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    engine.model.to(torch.bfloat16).save_pretrained(out)
    tokens.save_pretrained(out)
