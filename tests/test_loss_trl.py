"""TRL as an oracle: the same rows through `GRPOTrainer._compute_loss` give our loss and our gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelwright.credit import PRESETS
from kernelwright.loss import clipped, sequence
from kernelwright.samples import rows as training_rows
from kernelwright.samples import weighted
from kernelwright.types import Completion, Group, Outcome, Sample, Spans, Trajectory, TrajectoryStop, Turn

# transformers, datasets and TRL warn about their own future; that is not ours to fix
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY = 40
PAD = 40


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GRPOTrainer around a random Llama of two layers, in float64."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    return make_trainer(trl, datasets, tmp_path_factory.mktemp("trl"))


def make_trainer(trl: Any, datasets: Any, folder: Path) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)} | {"<pad>": PAD, "<eos>": PAD + 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY + 2,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    made = trl.GRPOTrainer(
        model=LlamaForCausalLM(shape).double(),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=2,
            per_device_train_batch_size=2,
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1"]}),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def random_batch(seed: int, *, turns: int, preset: str) -> list[Sample]:
    """Rows of a group of four, with observations between replies where a turn continues. Ratios near 1."""
    draw = random.Random(seed)

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(low, high)))

    def turn(number: int) -> Turn:
        sampled = some(1, 6)
        return Turn(
            purpose="attempt",
            context=some(1, 5),
            continues=number > 0 and draw.random() < 0.6,
            completion=Completion(
                tokens=sampled,
                logprobs=tuple(-3.74 + draw.gauss(0, 0.4) for _ in sampled),
                temperature=1.0,
                top_p=1.0,
                stop="end",
            ),
            text="",
            source=None,
            spans=Spans(),
            outcome=Outcome(feedback="", parts={"reward": draw.random()}),
        )

    group = Group(
        task="t",
        trajectories=tuple(
            Trajectory(turns=tuple(turn(k) for k in range(draw.randint(1, turns))), stop=TrajectoryStop.MAX_TURNS)
            for _ in range(4)
        ),
    )
    keep = [[True] * len(one.turns) for one in group.trajectories]
    return training_rows(group, PRESETS[preset](group, keep), keep)


def ours(model: Any, batch: Sequence[Sample], loss: Callable[..., Any], *, reference: bool) -> Tensor:
    """Loss of weighted rows, each through the model alone and without padding."""
    new: list[Tensor] = []
    numbers: list[int] = []
    for number, row in enumerate(batch):
        tokens = torch.tensor([row.tokens])
        scores = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        new.append(scores[torch.tensor(row.mask[1:]).bool()])
        numbers += [number] * sum(row.mask)

    def column(name: str) -> Tensor:
        values = [value for row in batch for value, bit in zip(getattr(row, name), row.mask, strict=True) if bit]
        return torch.tensor(values, dtype=torch.float64)

    extra = {"reference": column("logprobs") + 0.3} if reference else {}
    columns = (column(name) for name in ("logprobs", "advantages", "weights"))
    value, _ = loss(torch.cat(new), *columns, torch.tensor(numbers), **extra)
    return value


def theirs(trainer: Any, batch: Sequence[Sample]) -> Tensor:
    """TRL's loss of rows without weights: prompt left-padded, the rest right-padded, observations in the tool mask."""
    starts = [row.mask.index(1) for row in batch]
    before, after = max(starts), max(len(row.tokens) - start for row, start in zip(batch, starts, strict=True))

    def left(name: str, fill: float) -> list[list[float]]:
        return [[fill] * (before - s) + list(getattr(row, name)[:s]) for row, s in zip(batch, starts, strict=True)]

    def right(name: str, fill: float) -> list[list[float]]:
        parts = [list(getattr(row, name)[s:]) for row, s in zip(batch, starts, strict=True)]
        return [part + [fill] * (after - len(part)) for part in parts]

    lengths = [len(row.tokens) - start for row, start in zip(batch, starts, strict=True)]
    old = torch.tensor(right("logprobs", 0.0), dtype=torch.float64)
    return trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.tensor(left("tokens", PAD)).long(),
            "prompt_mask": torch.tensor([[0] * (before - start) + [1] * start for start in starts]),
            "completion_ids": torch.tensor(right("tokens", PAD)).long(),
            "completion_mask": torch.tensor([[1] * length + [0] * (after - length) for length in lengths]),
            "tool_mask": torch.tensor(right("mask", 0)).long(),
            "old_per_token_logps": old,
            "ref_per_token_logps": old + 0.3,
            "advantages": torch.tensor(right("advantages", 0.0), dtype=torch.float64),
            "num_items_in_batch": torch.tensor(float(sum(sum(row.mask) for row in batch))),
        },
    )


CASES: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    # name: settings of TRL, our loss, our aggregation
    "grpo": ({"loss_type": "grpo"}, clipped, {"mode": "seq_mean_token_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, clipped, {"mode": "token_mean"}),
    "dapo": ({"loss_type": "dapo"}, clipped, {"mode": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, clipped, {"mode": "constant", "constant": 17}),
    "dual clip": ({"loss_type": "grpo", "delta": 1.5}, partial(clipped, dual=1.5), {"mode": "seq_mean_token_mean"}),
    "kl": ({"loss_type": "grpo", "beta": 0.04}, partial(clipped, kl="k3", beta=0.04), {"mode": "seq_mean_token_mean"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        partial(sequence, low=0.2, high=0.28),
        {"mode": "seq_mean_token_mean"},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("seed", "turns", "preset"), [(0, 1, "grpo"), (1, 3, "grpo"), (2, 3, "kevin")])
def test_loss_and_gradient_are_those_of_trl(trainer: Any, name: str, seed: int, turns: int, preset: str):
    settings, loss, aggregation = CASES[name]
    if name == "gspo" and preset == "kevin":
        pytest.skip(
            "one ratio a row with several advantages in it: TRL takes the sequence form, ours is the token form"
        )
    trainer.loss_type = settings["loss_type"]
    trainer.importance_sampling_level = settings.get("importance_sampling_level", "token")
    trainer.beta = settings.get("beta", 0.0)
    trainer.args.delta = settings.get("delta")
    # TRL multiplies the divergence by the ratio unless told otherwise (DeepSeek-V3.2); GRPO as published does not
    trainer.args.use_bias_correction_kl = False
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 0.28
    trainer.max_completion_length = 17
    trainer.args.steps_per_generation = 1
    batch = random_batch(seed, turns=turns, preset=preset)
    parameters = list(trainer.model.parameters())
    expected = theirs(trainer, batch)
    slopes = torch.autograd.grad(expected, parameters)
    # TRL has no trajectories: its sequences are rows
    got = ours(trainer.model, weighted(batch, unit="row", **aggregation), loss, reference="beta" in settings)
    gradients = torch.autograd.grad(got, parameters)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    size = torch.cat([slope.flatten() for slope in slopes]).norm().item()
    apart = torch.cat([(a - b).flatten() for a, b in zip(gradients, slopes, strict=True)]).norm().item()
    assert size > 0
    assert apart <= 1e-6 * size
