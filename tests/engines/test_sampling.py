"""Draws by inversion, shared prompt beginnings, and replies that do not depend on the batch they were in."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_model import tiny_llama, tiny_tokenizer

from kernelwright.engines.decoders import ModuleDecoder, split, whole
from kernelwright.engines.local import LocalEngine
from kernelwright.engines.sampling import draw, generate, uniforms
from kernelwright.types import Sampling

LOGITS = torch.tensor([0.5, 0.3, 0.2]).log()


def draws(uniform: list[float], *, temperature: float = 1.0, top_p: float = 1.0) -> tuple[list[int], list[float]]:
    tokens, logprobs = draw(
        LOGITS.expand(len(uniform), -1), torch.tensor(uniform).double(), temperature=temperature, top_p=top_p
    )
    return tokens.tolist(), logprobs.exp().tolist()


def test_a_token_is_where_the_cumulative_probability_passes_the_uniform_number() -> None:
    tokens, probabilities = draws([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 1e-12])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert probabilities == pytest.approx([0.5, 0.5, 0.3, 0.3, 0.2, 0.2])


def test_temperature_and_nucleus_change_the_reported_probability() -> None:
    # squares of (.5, .3, .2) are (.25, .09, .04), sum .38
    tokens, probabilities = draws([0.0, 0.999], temperature=0.5)
    assert (tokens, probabilities) == ([0, 2], pytest.approx([0.25 / 0.38, 0.04 / 0.38]))
    # 0.5 alone falls short of 0.6, so the first two remain: .5 / .8 and .3 / .8
    tokens, probabilities = draws([0.0, 0.624, 0.626, 0.999], top_p=0.6)
    assert (tokens, probabilities) == ([0, 0, 1, 1], pytest.approx([0.625, 0.625, 0.375, 0.375]))
    assert draws([0.999], top_p=0.5) == ([0], [1.0])
    assert draws([0.999], temperature=0.0) == ([0], [1.0])


def test_frequencies_are_the_probabilities() -> None:
    stream = torch.from_numpy(uniforms(1, (2, 3), 20000))
    tokens, _ = draw(LOGITS.expand(20000, -1), stream, temperature=1.0, top_p=1.0)
    shares = torch.bincount(tokens, minlength=3) / 20000
    # four standard deviations of a share of 20000 draws
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=4 * math.sqrt(0.25 / 20000))


def test_streams_differ_by_seed_and_by_every_part_of_the_key() -> None:
    keys = [(0, (1,)), (0, (1, 0)), (0, (0, 1)), (1, (1,)), (-1, (1,)), (0, (-1,)), (0, (2**40,))]
    firsts = [uniforms(seed, key, 4)[0] for seed, key in keys]
    assert len(set(firsts)) == len(keys)
    np.testing.assert_array_equal(uniforms(0, (1, 2), 3), uniforms(0, (1, 2), 8)[:3])


def test_split_puts_prompts_together_again_and_shares_the_most() -> None:
    task, other = tuple(range(100, 130)), (*range(100, 110), *range(40))
    prompts = sorted([(*task, 1), (*task, 2, 3), task, (*other, 5), (*other, 6, 7, 8), (9,), (9,)])
    plan = split(prompts)
    assert [plan.heads[head] + tail for head, tail in zip(plan.head, plan.tails, strict=True)] == prompts
    assert all(plan.tails)
    # three prompts of `task` share 29 tokens (its shortest keeps one), two of `other` share all 50
    assert sorted(len(head) for head in plan.heads if head) == [29, 50]
    single = split([(1, 2, 3)])
    assert (single.heads, single.head, single.tails) == (((),), (0,), ((1, 2, 3),))


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"tie_word_embeddings": False}])
def test_decoding_with_shared_beginnings_gives_the_logits_of_the_plain_forward(changes: dict) -> None:
    model = tiny_llama(**changes).eval()
    random = torch.Generator().manual_seed(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 320, (count,), generator=random).tolist())

    first, second = some(30), some(17)
    prompts = sorted([first + some(5), first + some(9), first, second + some(3), second + some(3), some(4), (7,)])
    for plan in (split(prompts), whole(prompts)):
        decoder, rows, texts = ModuleDecoder(model), list(range(len(prompts))), [list(prompt) for prompt in prompts]
        with torch.inference_mode():
            logits = decoder.start(plan)
            for step in range(80):
                if step in (20, 50):
                    kept = [0, 2, 3] if step == 20 else [1, 2]
                    decoder.keep(torch.tensor(kept))
                    rows = [rows[index] for index in kept]
                else:
                    for index, row in enumerate(rows):
                        expected = model(input_ids=torch.tensor([texts[row]]), use_cache=False).logits[0, -1]
                        torch.testing.assert_close(logits[index], expected, atol=3e-5, rtol=1e-5)
                tokens = torch.randint(0, 320, (len(rows),), generator=random)
                for row, token in zip(rows, tokens.tolist(), strict=True):
                    texts[row].append(token)
                logits = decoder.step(tokens)


def engine(**changes) -> LocalEngine:
    return LocalEngine(tiny_llama(**changes), tiny_tokenizer(), device="cpu")


def contexts() -> list[tuple[int, ...]]:
    base = tuple(tiny_tokenizer().encode("void kernel(const float *x, float *out"))
    return [base, base, (*base, 7, 9), (8, 9, 10), base, (8,)]


KEYS = [(0, 0, member, 0) for member in range(6)]


def test_a_reply_does_not_depend_on_its_batch() -> None:
    sampling = Sampling(max_tokens=24, budget=100, seed=3)
    together = engine().sample(contexts(), sampling, KEYS)
    backwards = engine().sample(contexts()[::-1], sampling, KEYS[::-1])[::-1]
    alone = [engine().sample([context], sampling, [key])[0] for context, key in zip(contexts(), KEYS, strict=True)]
    assert len({reply.tokens for reply in together}) == 6
    for reply, other, single in zip(together, backwards, alone, strict=True):
        assert reply.tokens == other.tokens == single.tokens
        assert reply.logprobs == pytest.approx(single.logprobs, abs=3e-5)


def test_equal_keys_give_equal_replies_and_other_seeds_others() -> None:
    context = contexts()[:1] * 2
    sampling = Sampling(max_tokens=24, budget=100)
    first, second = engine().sample(context, sampling, [(1, 2), (1, 2)])
    assert first.tokens == second.tokens
    (other,) = engine().sample(context[:1], Sampling(max_tokens=24, budget=100, seed=1), [(1, 2)])
    assert other.tokens != first.tokens


def test_cache_of_a_few_rows_gives_the_same_replies() -> None:
    held, sampling = engine(), Sampling(max_tokens=24, budget=100)

    def replies(cache_tokens: int):
        with torch.inference_mode():
            return generate(
                lambda: ModuleDecoder(held.model),
                contexts(),
                sampling,
                KEYS,
                ends=(1,),
                policy=0,
                cache_tokens=cache_tokens,
            )

    assert [reply.tokens for reply in replies(1)] == [reply.tokens for reply in replies(10**6)]


def test_greedy_is_the_argmax_and_the_same_for_every_key() -> None:
    held = engine()
    context = list(contexts()[0])
    sampling = Sampling(temperature=0.0, max_tokens=12, budget=100)
    first, second = held.sample([context, context], sampling, [(0,), (1,)])
    assert first.tokens == second.tokens
    for token in first.tokens:
        with torch.inference_mode():
            assert int(held.model(input_ids=torch.tensor([context])).logits[0, -1].argmax()) == token
        context.append(token)


def test_replies_end_at_the_first_end_token_and_never_pass_the_budget() -> None:
    # an almost flat distribution over few tokens: ends are drawn often
    held = LocalEngine(tiny_llama(scale=0.001), tiny_tokenizer(), device="cpu", ends=range(60))
    prompts = [tuple(range(60, 60 + length)) for length in range(1, 40)] * 3
    keys = [(index,) for index in range(len(prompts))]
    stops = set()
    for prompt, reply in zip(prompts, held.sample(prompts, Sampling(max_tokens=10, budget=40), keys), strict=True):
        assert len(prompt) + len(reply.tokens) <= 40
        assert len(reply.tokens) <= 10
        assert all(token >= 60 for token in reply.tokens[:-1])
        assert (next(reversed(reply.tokens)) < 60) == (reply.stop == "end")
        if reply.stop == "length":
            assert len(reply.tokens) == min(10, 40 - len(prompt))
        stops.add(reply.stop)
    assert stops == {"end", "length"}


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 to 9 tokens .* got 10"):
        engine().sample([(5,) * 10], Sampling(max_tokens=4, budget=10), [(0,)])
    with pytest.raises(ValueError, match="one key a context, got 1 keys and 2 contexts"):
        engine().sample([(5,), (6,)], Sampling(max_tokens=4, budget=10), [(0,)])


def test_sliding_windows_are_those_of_the_plain_forward() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.3,
    )
    model = MistralForCausalLM(config).eval()
    prompts = sorted([tuple(range(20, 40)), (*range(20, 40), 5, 6), (9, 8, 7)])
    decoder, texts = ModuleDecoder(model), [list(prompt) for prompt in prompts]
    assert not decoder.shares
    with torch.inference_mode():
        logits = decoder.start(whole(prompts))
        for _ in range(6):
            for row, text in zip(logits, texts, strict=True):
                expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(row, expected, atol=3e-5, rtol=1e-5)
            tokens = logits.argmax(-1)
            for text, token in zip(texts, tokens.tolist(), strict=True):
                text.append(token)
            logits = decoder.step(tokens)


def test_prompts_of_a_group_keep_their_order_in_the_cache() -> None:
    prompts = sorted([(1, 2, 3), (1, 2, 4), (5, 6, 7), (5, 6, 8)])
    assert all(first <= second for first, second in pairwise(split(prompts).head))
