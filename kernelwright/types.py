"""Every record that flows through the package, and the two protocols. Nothing here computes more than a property.

Axes, used in names and in the bracketed lengths: P tasks of a step, G trajectories of a group, K turns of a trajectory,
C context tokens new at a turn, T sampled tokens of a turn, L tokens of a training row, B rows.

The records, in the order in which a step makes them:

    Task -> Prompt -> Completion -> Evaluation -> Outcome -> Turn -> Trajectory -> Group -> Sample

All are frozen, so a record is complete when it exists; a turn is three finished things (what was asked, what was
sampled, what came back), and advantages live on no record but `Sample`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

# ---------------------------------------------------------------- tasks


class Status(StrEnum):
    """How far a candidate got. The order is the order in which the evaluator finds out."""

    NO_CODE = "NO_CODE"
    COMPILE_ERROR = "COMPILE_ERROR"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    WRONG = "WRONG"
    CORRECT = "CORRECT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One tensor handed to `Model.forward`, with its shape in named sizes.

    Example: `Input(name="x", shape=("n", "m"))` with sizes `{"n": 5, "m": 37}` is a 5 x 37 float32 tensor.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str = "float32"
    # "signed" values of either sign; "positive" values in (0, 1]; "index" integers below `high`
    kind: Literal["signed", "positive", "index"] = "signed"
    high: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "index") != (self.high is not None):
            raise ValueError(f"input '{self.name}': 'high' goes with kind 'index', got kind '{self.kind}'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A PyTorch program to be turned into a kernel.

    Example: `Task(id="builtin/relu", statement="ReLU of a matrix", reference="import torch ...", inputs=(Input(
    name="x", shape=("n", "m")),), check_shapes=({"n": 5, "m": 37},), time_shapes=({"n": 256, "m": 1027},))`
    """

    id: str
    statement: str
    # Python source in KernelBench form: class Model, get_inputs(), get_init_inputs()
    reference: str
    # one entry per argument of Model.forward; empty means: only the shapes that get_inputs() itself makes
    inputs: tuple[Input, ...] = ()
    # sizes at which candidates are checked; never shown to the policy  [number of checks]
    check_shapes: tuple[Mapping[str, int], ...] = ()
    # sizes at which candidates are timed  [number of timings]
    time_shapes: tuple[Mapping[str, int], ...] = ()
    # tolerance: |got - expected| <= atol * rms(expected) + rtol * |expected|
    rtol: float = 1e-4
    atol: float = 1e-4
    # which library calls a candidate may make; () means none but the language's own maths library
    policy: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.id or any(c.isspace() for c in self.id):
            raise ValueError(f"a task id is one word, got {self.id!r}")
        if self.rtol < 0 or self.atol < 0:
            raise ValueError(f"task {self.id}: tolerances are not negative, got rtol {self.rtol}, atol {self.atol}")
        names = {size for tensor in self.inputs for size in tensor.shape}
        for sizes in (*self.check_shapes, *self.time_shapes):
            if missing := names - set(sizes):
                raise ValueError(f"task {self.id}: sizes {dict(sizes)} lack {sorted(missing)}")


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A place in the candidate's source, counted from one."""

    line: int
    column: int | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hack:
    """Evidence that a candidate earned its verdict by something else than computing the answer."""

    rule: str
    evidence: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What happened to one candidate. A wrong kernel with a time cannot be built.

    Example: `Evaluation(task="builtin/relu", backend="c", status=Status.CORRECT, kernel_ms=(0.1, 0.11),
    reference_ms=(0.3, 0.31), verified="cpu", seconds=0.2).speedup == 0.305 / 0.105`
    """

    task: str
    backend: str
    status: Status
    # one or a few sentences about the first thing that went wrong, empty when nothing did
    message: str = ""
    location: Location | None = None
    # largest |got - expected| over all checked elements, in units of the allowed error when `error_index` is set
    max_error: float | None = None
    # index of the first element outside the tolerance, and the two values there
    error_index: tuple[int, ...] | None = None
    expected: float | None = None
    got: float | None = None
    # timed calls in milliseconds  [number of calls]; empty when the candidate was not timed
    kernel_ms: tuple[float, ...] = ()
    reference_ms: tuple[float, ...] = ()
    # measured quantities only; a key that was not measured is absent
    profile: Mapping[str, Any] = field(default_factory=dict)
    hacks: tuple[Hack, ...] = ()
    # on what the verdict was reached
    verified: Literal["gpu", "cpu", "interpreter"] = "cpu"
    # wall-clock cost of the evaluation
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.kernel_ms or self.reference_ms) and self.status is not Status.CORRECT:
            raise ValueError(f"only a correct candidate has times, got {self.status} with {self.kernel_ms}")
        if bool(self.kernel_ms) != bool(self.reference_ms):
            raise ValueError("kernel_ms and reference_ms come together or not at all")
        if any(not math.isfinite(ms) or ms <= 0 for ms in (*self.kernel_ms, *self.reference_ms)):
            raise ValueError(f"times are positive, got {self.kernel_ms} and {self.reference_ms}")
        if self.status is Status.CORRECT and self.error_index is not None:
            raise ValueError("a correct candidate has no wrong element")

    @property
    def compiled(self) -> bool:
        """Whether a binary (or an importable module) came out of the source."""
        return self.status not in (Status.NO_CODE, Status.COMPILE_ERROR)

    @property
    def correct(self) -> bool:
        """Whether every checked element was within the tolerance."""
        return self.status is Status.CORRECT

    @property
    def trusted(self) -> bool:
        """Correct, and nothing suggests that it cheated."""
        return self.correct and not self.hacks

    @property
    def speedup(self) -> float | None:
        """Median reference time over median candidate time; None unless trusted and timed."""
        if not self.trusted or not self.kernel_ms:
            return None
        return _median(self.reference_ms) / _median(self.kernel_ms)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


# ---------------------------------------------------------------- what is asked and what is sampled

Role = Literal["system", "user", "assistant"]
Purpose = Literal["attempt", "summary", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat message."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the policy is asked at one turn."""

    messages: tuple[Message, ...]
    purpose: Purpose = "attempt"

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].role == "assistant":
            raise ValueError("a prompt ends with a message that is not the assistant's")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How an engine samples. `seed` and the caller's `keys` decide every random draw."""

    temperature: float = 1.0
    top_p: float = 1.0
    # room for one reply, in tokens
    max_tokens: int = 512
    # prompt and reply together never exceed this many tokens
    budget: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}")
        if not 0 < self.max_tokens < self.budget:
            raise ValueError(f"0 < max_tokens < budget, got {self.max_tokens} and {self.budget}")


Stop = Literal["end", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the policy sampled: ids as they were drawn (the end token included), with their log-probabilities."""

    tokens: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] under the distribution that was sampled from, see the next two fields
    temperature: float
    top_p: float
    stop: Stop
    # version of the weights: the number of optimiser steps they have seen
    policy: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs) or not self.tokens:
            raise ValueError(f"one log-probability a token, got {len(self.tokens)} and {len(self.logprobs)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Half-open token ranges of the parts of a reply, on the sampled ids; (0, 0) where a part is absent."""

    plan: tuple[int, int] = (0, 0)
    code: tuple[int, int] = (0, 0)
    summary: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an episode answers to one reply."""

    # the text the policy sees next
    feedback: str
    # named reward parts; their sum is the reward
    parts: Mapping[str, float]
    evaluation: Evaluation | None = None
    # the episode accepts no further reply
    done: bool = False

    @property
    def reward(self) -> float:
        """Sum of the reward parts."""
        return math.fsum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request to the policy and what came of it.

    With `continues`, `context` holds only the tokens added since the end of the previous turn's completion, so the
    prompt was: everything before, then `context`. Without it, `context` is the whole prompt.
    """

    purpose: Purpose
    context: tuple[int, ...]  # [C]
    continues: bool
    completion: Completion
    # decoded completion without special tokens
    text: str
    # the code block found in `text`, None if there is none
    source: str | None
    spans: Spans
    # the policy's own one line about what it changed, quoted by some contexts
    summary: str = ""
    # None for a summary or a note
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        if (self.purpose == "attempt") != (self.outcome is not None):
            raise ValueError("an attempt has an outcome, and nothing else has")
        if not self.context:
            raise ValueError("a turn has at least one context token")


class TrajectoryStop(StrEnum):
    """Why a trajectory ended."""

    DONE = "DONE"
    MAX_TURNS = "MAX_TURNS"
    CONTEXT_FULL = "CONTEXT_FULL"
    INFRASTRUCTURE = "INFRASTRUCTURE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode: the chain of turns that is the unit of multi-turn RL."""

    turns: tuple[Turn, ...]  # [K]
    stop: TrajectoryStop
    # one line about CONTEXT_FULL or INFRASTRUCTURE, empty otherwise
    note: str = ""

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Reward of each turn  [K]; None where a turn was no attempt."""
        return tuple(turn.outcome.reward if turn.outcome else None for turn in self.turns)

    @property
    def best(self) -> Turn | None:
        """The attempt with the highest reward, the earliest among equals."""
        attempts = [turn for turn in self.turns if turn.outcome]
        return max(attempts, key=lambda turn: turn.outcome.reward if turn.outcome else 0.0, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All trajectories of one task in one step."""

    task: str
    trajectories: tuple[Trajectory, ...]  # [G]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training row. Rows are summed by every engine, so all normalisation is already in the numbers.

    Example: prompt of two tokens, reply of two, feedback of one, second reply of one:
    `tokens=(5, 6, 7, 8, 9, 4), mask=(0, 0, 1, 1, 0, 1), logprobs=(0, 0, -.1, -.2, 0, -.3), advantages=(0, 0, .5, .5,
    0, 1), weights=(0, 0, .25, .25, 0, .25)`
    """

    tokens: tuple[int, ...]  # [L]
    # 1 where the policy sampled the token and it is trained on
    mask: tuple[int, ...]  # [L]
    # behaviour log-probabilities, 0 where mask is 0
    logprobs: tuple[float, ...]  # [L]
    advantages: tuple[float, ...]  # [L]
    # weight of the token in the loss (aggregation mode), 0 where mask is 0
    weights: tuple[float, ...]  # [L]
    # (task, trajectory, first turn) this row is from
    origin: tuple[str, int, int]
    policy: int = 0
    # targets of a critic, None without one
    returns: tuple[float, ...] | None = None  # [L]

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.mask), len(self.logprobs), len(self.advantages), len(self.weights)}
        if self.returns is not None:
            lengths.add(len(self.returns))
        if len(lengths) != 1:
            raise ValueError(f"a row's lists have one length, got {sorted(lengths)}")
        if self.mask[0]:
            raise ValueError("the first token of a row has no prediction and cannot be trained on")


# ---------------------------------------------------------------- protocols


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimiser:
    """AdamW and how a step's rows are cut into updates."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    # added to the root of the second moment: parameters whose gradients are below it hardly move
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    # gradient-norm limit
    clip: float = 1.0
    schedule: Literal["constant", "linear"] = "constant"
    warmup: int = 0
    # optimiser steps per batch of rollouts: each epoch passes over all rows in this many parts
    minibatches: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"0 <= lr < inf and 0 <= betas < 1, got {self.lr} and {self.betas}")
        if not self.clip > 0 or not self.epsilon > 0 or not 0 <= self.weight_decay < math.inf:
            got = f"{self.clip}, {self.epsilon} and {self.weight_decay}"
            raise ValueError(f"clip and epsilon are above 0, weight_decay is at least 0, got {got}")
        if self.minibatches < 1 or self.epochs < 1 or self.warmup < 0:
            got = f"{self.minibatches}, {self.epochs} and {self.warmup}"
            raise ValueError(f"minibatches and epochs are at least 1, warmup at least 0, got {got}")


# the loss of one minibatch: (new logprobs [N], old logprobs [N], advantages [N], weights [N]) of the trained tokens of
# all rows, concatenated, and the row number of each -> (loss, metrics); see kernelwright.loss
Loss = Callable[..., Any]


@runtime_checkable
class Engine(Protocol):
    """Something that holds a policy: samples from it, scores with it, updates it."""

    # a transformers tokenizer, or an object with the same encode, decode and chat-template calls
    tokenizer: Any
    # number of optimiser steps the current weights have seen
    policy: int

    def sample(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion a context. `keys[i]`, with the sampling seed, decides the random draws of completion i."""
        ...

    def logprobs(self, rows: Sequence[Sample], temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of each token of each row given the tokens before it  [B][L], 0.0 at position 0."""
        ...

    def update(
        self,
        rows: Sequence[Sample],
        loss: Loss,
        optimiser: Optimiser,
        *,
        lr_scale: float = 1.0,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimiser step on the sum over rows; returns metrics."""
        ...

    def save(self, path: str) -> None:
        """Weights, optimiser and random state into the folder `path`."""
        ...

    def load(self, path: str) -> None:
        """The inverse of `save`, to the same bits."""
        ...

    def capabilities(self) -> dict[str, Any]:
        """What this engine can do: `train`, `seeded`, `exact_resume`, `device`, ..."""
        ...


@runtime_checkable
class Episode(Protocol):
    """A single-use environment: takes replies, answers with outcomes."""

    def step(self, text: str) -> Outcome:
        """Judge one reply."""
        ...

    def close(self) -> None:
        """Free what the episode holds."""
        ...


# ---------------------------------------------------------------- recipes

Fits = Callable[[Sequence[Message]], bool]
Environment = Callable[[Task], tuple[tuple[Message, ...], Episode]]
Context = Callable[[tuple[Message, ...], Sequence[Turn], Fits], Prompt | None]
Select = Callable[[Group], list[list[bool]]]  # keep [G][K]
Credit = Callable[[Group, list[list[bool]]], list[list[list[float]]]]  # advantages [G][K][T]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A published system (or your own) as one value. Slots hold functions or `functools.partial` over keywords."""

    name: str
    # where it is from: title and arXiv number, or a sentence
    paper: str
    # a Hugging Face id, a folder, or "starter"
    model: str
    # task SPECs: trained on; used to choose the checkpoint; measured before and after
    tasks: str
    validation: str | None = None
    heldout: str | None = None
    # entered as a context manager once a run; gives the Environment of all tasks, see environments/refine.py
    environment: Callable[..., Any]
    context: Callable[..., Any]
    max_turns: int
    group_size: int
    tasks_per_step: int
    sampling: Sampling
    select: Callable[..., Any]
    credit: Callable[..., Any]
    loss: Callable[..., Any]
    # rows of one optimiser step -> the same rows with weights, see kernelwright.samples.weighted
    aggregate: Callable[..., Any]
    optimiser: Optimiser
    steps: int
    seed: int = 0
    # validation every so many steps (0: never); the best checkpoint on validation is kept
    evaluate_every: int = 0
    # trajectories a task in evaluations
    evaluate_samples: int = 4
    # how many of the training tasks, evenly spread, are measured before and after (0: none)
    evaluate_tasks: int = 48
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.group_size < 1 or self.tasks_per_step < 1 or self.steps < 0:
            raise ValueError("max_turns, group_size and tasks_per_step are at least 1, steps at least 0")
        if self.evaluate_samples < 1 or self.checkpoint_every < 1 or self.evaluate_every < 0 or self.evaluate_tasks < 0:
            raise ValueError(
                "evaluate_samples and checkpoint_every are at least 1, evaluate_every and evaluate_tasks at least 0"
            )
        if not self.name or "/" in self.name:
            raise ValueError(f"a recipe's name is part of a folder's name, got '{self.name}'")
