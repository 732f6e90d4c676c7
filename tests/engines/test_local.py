"""Scores, gradients, checkpoints and refusals of the local engine, on a tiny random Llama."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_model import TEMPLATE, tiny_llama, tiny_tokenizer

from kernelwright.engines.local import LocalEngine, end_tokens
from kernelwright.engines.scoring import micro_batches
from kernelwright.errors import BadModel
from kernelwright.loss import clipped
from kernelwright.types import Engine, Optimiser, Sample, Sampling

# weights of this spread keep float32 within 1e-6 of float64; larger ones amplify rounding
SMOOTH = 0.1
OPTIMISER = Optimiser(lr=1e-3, clip=1e9)


def engine(scale: float = 0.3, **options) -> LocalEngine:
    return LocalEngine(tiny_llama(scale=scale), tiny_tokenizer(), device="cpu", **options)


def ragged_rows(count: int = 7, seed: int = 0) -> list[Sample]:
    """Rows of 4 to 30 tokens with sampled stretches between context, behaviour log-probabilities a little off."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(4, 31, (1,), generator=random))
        tokens = torch.randint(0, 320, (length,), generator=random).tolist()
        mask = [0, 1, *torch.randint(0, 2, (length - 2,), generator=random).tolist()]
        noise = torch.randn(length, generator=random).tolist()
        rows.append(
            Sample(
                tokens=tuple(tokens),
                mask=tuple(mask),
                logprobs=tuple((-5.0 + value) * on for value, on in zip(noise, mask, strict=True)),
                advantages=tuple(0.1 * value * on for value, on in zip(noise[::-1], mask, strict=True)),
                weights=tuple(0.1 * on for on in mask),
                origin=("t", index, 0),
            )
        )
    return rows


def gradients(held: LocalEngine, rows: list[Sample], loss=clipped) -> dict[str, torch.Tensor]:
    """The gradient of a first update: AdamW's first moment is then (1 - beta) times it."""
    held.update(rows, loss, OPTIMISER)
    state = held._optimiser.state
    return {name: state[value]["exp_avg"] / 0.1 for name, value in held.model.named_parameters()}


def oracle(rows: list[Sample], temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradient in float64, a row at a time, all logits, the clipped surrogate written out."""
    model = tiny_llama(scale=SMOOTH).double().eval()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0] / temperature
        logprobs = logits.log_softmax(-1)
        for position, on in enumerate(row.mask):
            if on:
                ratio = (logprobs[position - 1, row.tokens[position]] - row.logprobs[position]).exp()
                advantage = row.advantages[position]
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    total.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to the largest gradient of the model."""
    size = max(float(value.abs().max()) for value in expected.values())
    assert got.keys() == expected.keys()
    return max(float((got[name] - expected[name]).abs().max()) for name in expected) / size


def test_keeps_the_protocol() -> None:
    assert isinstance(engine(), Engine)


def test_sampler_and_trainer_agree_on_log_probabilities() -> None:
    held = engine()
    prompts = [tuple(range(20, 20 + length)) for length in (3, 9, 9, 30)]
    for temperature in (1.0, 0.7):
        sampling = Sampling(max_tokens=40, budget=100, temperature=temperature)
        replies = held.sample(prompts, sampling, [(index,) for index in range(4)])
        rows = [
            Sample(
                tokens=(*prompt, *reply.tokens),
                mask=(0,) * len(prompt) + (1,) * len(reply.tokens),
                logprobs=(0.0,) * len(prompt) + reply.logprobs,
                advantages=(0.0,) * (len(prompt) + len(reply.tokens)),
                weights=(0.0,) * (len(prompt) + len(reply.tokens)),
                origin=("t", 0, 0),
            )
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        for prompt, reply, scores in zip(prompts, replies, held.logprobs(rows, temperature), strict=True):
            assert scores[len(prompt) :] == pytest.approx(reply.logprobs, abs=1e-5)
        metrics = held.update(rows, clipped, Optimiser(lr=0.0), temperature=temperature)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_log_probabilities_of_ragged_rows_are_those_of_each_row_alone() -> None:
    rows = ragged_rows()
    model = tiny_llama().double().eval()
    for row, scores in zip(rows, engine(micro_tokens=64).logprobs(rows), strict=True):
        logprobs = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0].detach().log_softmax(-1)
        expected = [float(logprobs[place, token]) for place, token in enumerate(row.tokens[1:])]
        assert scores == pytest.approx([0.0, *expected], abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [1, 64, 10**6])
def test_gradient_is_that_of_float64_for_any_micro_batch(micro_tokens: int) -> None:
    rows = ragged_rows()
    assert worst(gradients(engine(SMOOTH, micro_tokens=micro_tokens), rows), oracle(rows)) < 1e-6


def test_families_that_change_logits_after_the_output_matrix() -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        logits_scaling=8.0,
    )
    held, rows = LocalEngine(GraniteForCausalLM(config), tiny_tokenizer(), device="cpu"), ragged_rows(3)
    for row, scores in zip(rows, held.logprobs(rows), strict=True):
        with torch.inference_mode():
            logprobs = held.model(input_ids=torch.tensor([row.tokens])).logits[0].log_softmax(-1)
        expected = [float(logprobs[place, token]) for place, token in enumerate(row.tokens[1:])]
        assert scores == pytest.approx([0.0, *expected], abs=1e-5)


def test_temperature_enters_the_gradient() -> None:
    rows = ragged_rows()
    held = engine(SMOOTH)
    held.update(rows, clipped, OPTIMISER, temperature=0.5)
    state = held._optimiser.state
    got = {name: state[value]["exp_avg"] / 0.1 for name, value in held.model.named_parameters()}
    assert worst(got, oracle(rows, 0.5)) < 1e-6
    with pytest.raises(ValueError, match="temperature above 0"):
        held.update(rows, clipped, OPTIMISER, temperature=0.0)


def test_metrics_are_sums_and_token_means_over_all_micro_batches() -> None:
    rows = ragged_rows()
    one, many = (engine(micro_tokens=size).update(rows, clipped, OPTIMISER) for size in (10**6, 40))
    assert one["tokens"] == sum(sum(row.mask) for row in rows)
    assert many == pytest.approx(one, rel=1e-4, abs=1e-6)
    model = tiny_llama().double().eval()
    entropies = []
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0].detach().log_softmax(-1)
        spread = -(logprobs.exp() * logprobs).sum(-1)
        entropies += [float(spread[place - 1]) for place, on in enumerate(row.mask) if on]
    assert one["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


def group_rows(seed: int = 0) -> list[Sample]:
    """Two groups: a prompt that four rows share, one that three share (and one token of their replies), a lone row."""
    shared = []
    for length, members in ((25, 4), (18, 3), (9, 1)):
        prompt = tuple(torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist())
        # the first two rows of ragged_rows sample from position 1 on
        for row in ragged_rows(members, seed=seed + length):
            zeros = (0.0,) * length
            shared.append(
                Sample(
                    tokens=(*prompt, 7, *row.tokens[1:]),
                    mask=(0,) * length + row.mask,
                    logprobs=(*zeros, *row.logprobs),
                    advantages=(*zeros, *row.advantages),
                    weights=(*zeros, *row.weights),
                    origin=row.origin,
                )
            )
    return shared


@pytest.mark.parametrize("rows", [ragged_rows(40), group_rows()])
@pytest.mark.parametrize("tokens", [1, 100, 10**6])
def test_micro_batches_hold_every_row_once_and_their_size(rows: list[Sample], tokens: int) -> None:
    batches = micro_batches(tiny_llama(), rows, [row.mask for row in rows], tokens=tokens)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(rows)))
    for batch in batches:
        plan = batch.plan
        for index, head, tail in zip(batch.rows, plan.head, plan.tails, strict=True):
            assert plan.heads[head] + tail == rows[index].tokens
            assert not any(rows[index].mask[: len(plan.heads[head]) + 1])
        padded = len(plan.heads) * max(map(len, plan.heads)) + len(plan.tails) * max(map(len, plan.tails))
        assert padded <= tokens or len(batch.rows) == 1
    if tokens == 1:
        assert len(batches) == len(rows)


def test_shared_beginnings_go_through_the_model_once() -> None:
    rows = group_rows()
    (batch,) = micro_batches(tiny_llama(), rows, [row.mask for row in rows], tokens=10**6)
    assert sorted(map(len, batch.plan.heads)) == [0, 18, 25]


@pytest.mark.parametrize("micro_tokens", [1, 130, 10**6])
def test_gradient_through_shared_beginnings_is_that_of_each_row_alone(micro_tokens: int) -> None:
    rows = group_rows()
    assert worst(gradients(engine(SMOOTH, micro_tokens=micro_tokens), rows), oracle(rows)) < 1e-6


def test_one_step_is_adamw_on_the_clipped_gradient() -> None:
    held, rows = engine(SMOOTH), ragged_rows()
    optimiser = Optimiser(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, clip=0.5)
    before, gradient = copy.deepcopy(held.model), oracle(rows)
    metrics = held.update(rows, clipped, optimiser, lr_scale=0.5)
    norm = sum(float((value**2).sum()) for value in gradient.values()) ** 0.5
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["lr"] == 0.005
    for name, old in before.named_parameters():
        cut = gradient[name] * min(1.0, 0.5 / norm)
        # the first step of Adam: both moments are unbiased to the gradient and its square
        expected = old * (1 - 0.005 * 0.1) - 0.005 * cut / (cut.abs() + 1e-8)
        solid = cut.abs() > 1e-4
        torch.testing.assert_close(held.model.get_parameter(name)[solid], expected[solid].float(), atol=2e-5, rtol=0)


def test_what_is_reinforced_becomes_more_likely() -> None:
    held = engine()
    row = ragged_rows(1)[0]
    good = replace(row, advantages=tuple(0.1 * on for on in row.mask))

    def score() -> float:
        return sum(value for value, on in zip(held.logprobs([good])[0], good.mask, strict=True) if on)

    before = score()
    for _ in range(3):
        held.update([good], partial(clipped, low=0.9, high=1e9), OPTIMISER)
    assert score() > before + 0.5


def test_divergence_is_measured_from_the_weights_before_the_first_update() -> None:
    held, rows = engine(), ragged_rows()
    loss = partial(clipped, kl="k3", beta=0.1)
    assert held.update(rows, loss, OPTIMISER)["kl_to_reference"] == pytest.approx(0.0, abs=1e-9)
    assert held.update(rows, loss, OPTIMISER)["kl_to_reference"] > 1e-5
    start = engine().logprobs(rows)
    kept = LocalEngine(held.reference, held.tokenizer, device="cpu").logprobs(rows)
    assert kept == start


def test_entropy_bonus_raises_entropy() -> None:
    held, rows = engine(), ragged_rows()
    loss = partial(clipped, entropy_coefficient=10.0)
    first = held.update(rows, loss, OPTIMISER)["entropy"]
    held.update(rows, loss, OPTIMISER)
    assert held.update(rows, loss, OPTIMISER)["entropy"] > first + 0.01


@pytest.mark.parametrize("trouble", ["advantage", "nothing", "empty"])
def test_nothing_changes_when_there_is_no_step_to_take(trouble: str) -> None:
    held, rows = engine(), ragged_rows(3)
    held.update(rows, clipped, OPTIMISER)
    before, moments = copy.deepcopy(held.model.state_dict()), copy.deepcopy(held._optimiser.state_dict())
    row = rows[0]
    if trouble == "advantage":
        poison = tuple(float("nan") * on for on in row.mask)
        rows[0] = replace(row, advantages=poison)
    elif trouble == "nothing":
        zeros = (0,) * len(row.tokens)
        rows = [replace(row, mask=zeros, logprobs=zeros, advantages=zeros, weights=zeros)]
    else:
        rows = []
    metrics = held.update(rows, clipped, OPTIMISER)
    assert (metrics["skipped"], held.policy) == (1.0, 1)
    for name, value in held.model.state_dict().items():
        assert torch.equal(value, before[name])
    for index, state in held._optimiser.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], moments["state"][index]["exp_avg"])
    assert held.update(ragged_rows(3), clipped, OPTIMISER)["skipped"] == 0.0


def test_interrupted_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    loss = partial(clipped, kl="k3", beta=0.01)
    straight, first = engine(), engine()
    for seed in range(4):
        straight.update(ragged_rows(seed=seed), loss, OPTIMISER, lr_scale=1 / (seed + 1))
    for seed in range(2):
        first.update(ragged_rows(seed=seed), loss, OPTIMISER, lr_scale=1 / (seed + 1))
    noise = torch.rand(3)
    first.save(str(tmp_path / "step-2"))
    after_save = torch.rand(3)
    second = engine()
    second.update(ragged_rows(seed=9), loss, OPTIMISER)
    second.load(str(tmp_path / "step-2"))
    assert torch.equal(torch.rand(3), after_save)
    assert not torch.equal(noise, after_save)
    for seed in range(2, 4):
        second.update(ragged_rows(seed=seed), loss, OPTIMISER, lr_scale=1 / (seed + 1))
    assert second.policy == straight.policy == 4
    for name, value in straight.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name
    assert second.logprobs(ragged_rows()) == straight.logprobs(ragged_rows())


def test_checkpoint_is_a_hugging_face_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    held = engine()
    held.update(ragged_rows(), clipped, OPTIMISER)
    held.save(str(tmp_path))
    again = LocalEngine.from_pretrained(str(tmp_path), device="cpu")
    assert capfd.readouterr() == ("", "")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for name, value in held.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    text = "void kernel 漢字"
    assert tokenizer.encode(text) == held.tokenizer.encode(text)
    assert tokenizer.chat_template == TEMPLATE
    assert again.logprobs(ragged_rows()) == held.logprobs(ragged_rows())
    assert (again.policy, again.capabilities()["parameters"]) == (0, sum(p.numel() for p in model.parameters()))


def test_ends_are_those_of_model_tokenizer_and_template() -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [1, 5]
    tokenizer = tiny_tokenizer(template=TEMPLATE.replace("eos_token", "'<|system|>'"))
    assert end_tokens(model, tokenizer) == (1, 4, 5)


def saved(path: Path) -> Path:
    engine().save(str(path))
    return path


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"no config.json there; expected a folder") as caught:
        LocalEngine.from_pretrained(str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


def test_corrupt_weights_are_one_line(tmp_path: Path) -> None:
    weights = saved(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadModel, match="corrupt weights") as caught:
        LocalEngine.from_pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_weights_and_foreign_configs_are_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModel, match="no causal language model"):
        LocalEngine.from_pretrained(str(folder))
    folder = saved(tmp_path / "b")
    (folder / "config.json").write_text("{not json")
    with pytest.raises(BadModel, match="no causal language model"):
        LocalEngine.from_pretrained(str(folder))
    folder = saved(tmp_path / "c")
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(BadModel, match="no causal language model"):
        LocalEngine.from_pretrained(str(folder))


def test_model_of_another_kind_is_one_line(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(BadModel) as caught:
        LocalEngine.from_pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_lacking_layers_are_one_line(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(BadModel, match=r"lacks weights such as 'model\.layers\.2"):
        LocalEngine.from_pretrained(str(tmp_path))


def test_model_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    for name in saved(tmp_path).glob("*token*"):
        name.unlink()
    with pytest.raises(BadModel, match="no tokenizer") as caught:
        LocalEngine.from_pretrained(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no saved engine"):
        engine().load(str(tmp_path))
    saved(tmp_path)
    wider = LocalEngine(tiny_llama(intermediate_size=64), tiny_tokenizer(), device="cpu")
    with pytest.raises(BadModel, match="another shape"):
        wider.load(str(tmp_path))
