"""The training loop on a real, tiny, random model: it learns, and goes on to the same bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from runs import guess_recipe, guess_task, run_files, vowels
from tiny_model import tiny_llama, tiny_tokenizer

from kernelwright import store
from kernelwright.context import digest
from kernelwright.engines.local import LocalEngine
from kernelwright.train import Event, train
from kernelwright.types import Optimiser, Sampling

TASKS = [guess_task(number) for number in range(2)]


def engine() -> LocalEngine:
    return LocalEngine(tiny_llama(), tiny_tokenizer(), device="cpu")


RECIPE = guess_recipe(
    environment=partial(vowels),
    sampling=Sampling(max_tokens=12, budget=200),
    group_size=16,
    optimiser=Optimiser(lr=1e-2, minibatches=2, schedule="linear"),
    steps=15,
    evaluate_every=5,
    evaluate_samples=8,
)


def test_a_model_learns_what_is_rewarded(tmp_path: Path) -> None:
    train(RECIPE, engine=engine(), out=tmp_path / "run", tasks=TASKS, validation=TASKS, heldout=TASKS)
    before, after = (line for line in store.evaluations(tmp_path / "run") if line["set"] == "heldout")
    assert after["avg"]["score"] > before["avg"]["score"] + 0.1
    metrics = store.metrics(tmp_path / "run")
    assert all(line["grad_norm"] > 0 for line in metrics)
    # the first update of every step is on-policy, so ratios stay near 1
    assert all(abs(line["ratio_mean"] - 1) < 0.3 for line in metrics)
    tokenizers = list((tmp_path / "run" / "checkpoints" / "best").glob("tokenizer.json"))
    assert len(tokenizers) == 1


class _Stopped(BaseException):
    pass


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    recipe = guess_recipe(
        environment=partial(vowels),
        context=partial(digest),
        sampling=Sampling(max_tokens=12, budget=200),
        optimiser=Optimiser(lr=3e-3, minibatches=2),
    )

    def stop(event: Event) -> None:
        if event.kind == "step" and event.step == 3:
            raise _Stopped

    def run(name: str, **changes: object) -> dict[str, str]:
        path = train(recipe, engine=engine(), out=tmp_path / name, tasks=TASKS, validation=TASKS, heldout=(), **changes)  # type: ignore[arg-type]
        weights = (path / "checkpoints" / "step-4" / "model.safetensors").read_bytes()
        return {**run_files(path), "weights": weights.hex()}

    whole = run("whole")
    assert run("again") == whole
    with pytest.raises(_Stopped):
        run("stopped", progress=stop)
    assert run("stopped", resume=True) == whole
