"""The trusted side of an evaluation: inputs, expected outputs and the interface of a task.

A task's Python source is run here, in the parent, and nowhere near a candidate. Expected outputs are computed in
float64 from the same float32 inputs that the candidate gets.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from kernelwright.errors import BadTask
from kernelwright.kernels.arguments import input_names, size_name, split
from kernelwright.kernels.check import acceptance, root_mean_square
from kernelwright.types import Input, Task

# what a task's own code may raise when it is run on inputs that it was not written for
TASK_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

T = TypeVar("T")

_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """A buffer of the entry point, with its shape in named sizes (or numbers, for parameters)."""

    name: str
    shape: tuple[str, ...]
    # numpy's name of the element type
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Interface:
    """What a candidate is called with: every input, every parameter of the model, the output, the sizes."""

    inputs: tuple[Array, ...]
    output: Array
    sizes: tuple[str, ...]
    # for candidates that are a module as well: the arguments of its constructor, those of its `forward` (None stands
    # for the next input) and the names of its parameters and buffers, the last of `inputs`
    initial: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One call: what goes in and what must come out. `inputs` holds the parameters of the model too."""

    sizes: Mapping[str, int]
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray  # float64 (or an integer type), in the shape of the output
    # which draw of the inputs this is, see `_draw`
    distribution: str
    draw: int

    # element type that the candidate writes: the reference's own
    output_dtype: np.dtype
    # names the case among all cases of all tasks
    key: str
    # processor time that the reference took for it, in float64
    reference_seconds: float = 0.0
    # root mean square of what the reference gives for this distribution at the first check shape: where one element
    # is all the output, it says how large such elements are
    magnitude: float = 0.0

    # bounds between which a float32 output is accepted at once, see `check.acceptance`; kept for large outputs only
    bounds: tuple[np.ndarray, np.ndarray] | None = None

    def accepts(self, got: np.ndarray) -> bool:
        """Whether an output is surely right; False says nothing."""
        if self.bounds is None or got.dtype != np.float32:
            return False
        with np.errstate(invalid="ignore"):
            return bool(((got >= self.bounds[0]) & (got <= self.bounds[1])).all())

    @property
    def poison(self) -> int:
        """64-bit word that fills `out` before the call: signalling NaNs, which turn quiet when computed with."""
        return 0x7FF45A5A5A5A5A5A if self.output_dtype == np.float64 else 0x7F85A5A57F85A5A5

    @property
    def output_bytes(self) -> int:
        """Size of `out` in bytes."""
        return self.expected.size * self.output_dtype.itemsize


_loaded: dict[str, Reference] = {}
_loading = threading.Lock()


def load(task: Task, *, seed: int = 0) -> Reference:
    """The reference of a task; loaded once a process, because equal tasks have equal references.

    Raises:
        BadTask: it does not import, has no Model, or does not run on its own inputs.
    """
    key = f"{seed} {task!r}"
    with _loading:
        if key not in _loaded:
            _loaded[key] = Reference(task, seed=seed)
        return _loaded[key]


class Reference:
    """One task, loaded. Safe to share between threads: each call works on its own copy of the model."""

    def __init__(self, task: Task, *, seed: int = 0) -> None:
        self.task = task
        self.seed = seed
        self.key = hashlib.sha256(f"{seed} {task!r}".encode()).hexdigest()
        self._lock = threading.Lock()
        self._memory: dict[str, Any] = {}
        self.namespace = self._execute(task.reference)
        given = self._call("get_init_inputs") if "get_init_inputs" in self.namespace else []
        self.initial, self.keywords = split(given)
        self.model = self._build(self.namespace["Model"])
        self.parameters = _parameters(self.model)
        self.given: list[Any] | None = None
        self.task_inputs = task.inputs
        self.check_shapes: tuple[Mapping[str, int], ...] = task.check_shapes
        self.time_shapes: tuple[Mapping[str, int], ...] = task.time_shapes
        if not task.inputs:
            self._derive_inputs()
        self.interface = self._interface()

    def forward(self, values: Sequence[Any], *, dtype: torch.dtype, model: Any = None) -> torch.Tensor:
        """The reference's output for one call.

        Args:
            values: one tensor or plain value per argument of `forward`; floating tensors are cast to `dtype`.
            model: a changed model (an ablation) instead of the task's own.

        Raises:
            BadTask: the reference fails or returns something other than one tensor.
        """
        module = copy.deepcopy(self.model if model is None else model).to(dtype)
        cast = [v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]
        with torch.no_grad():
            try:
                result = module(*cast)
            except TASK_ERRORS as error:
                what = f"{type(error).__name__}: {_line(error)}"
                raise BadTask(f"task {self.task.id}: the reference raised {what}") from error
        if isinstance(result, (tuple, list)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise BadTask(f"task {self.task.id}: the reference returns {type(result).__name__}, expected one tensor")
        return result

    def check_cases(self) -> tuple[Case, ...]:
        """Every check shape: all distributions at the first, one (rotating) at each of the others."""
        plan = [(self.check_shapes[0], name) for name in DISTRIBUTIONS]
        names = list(DISTRIBUTIONS)
        plan += [(sizes, names[(i + 1) % len(names)]) for i, sizes in enumerate(self.check_shapes[1:])]

        def make() -> tuple[Case, ...]:
            cases = [self.case(sizes, name, i) for i, (sizes, name) in enumerate(plan)]
            sizes = {case.distribution: root_mean_square(case.expected) for case in cases[: len(DISTRIBUTIONS)]}
            return tuple(replace(case, magnitude=sizes[case.distribution]) for case in cases)

        return self.cached("check", make)

    def case(self, sizes: Mapping[str, int], distribution: str, draw: int) -> Case:
        """Inputs for one call and, in float64, what must come out."""
        values = self.values(sizes, distribution, draw)
        started = time.thread_time()
        wide = self.forward(values, dtype=torch.float64)
        seconds = time.thread_time() - started
        expected = wide.contiguous().numpy()
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        return Case(
            sizes=dict(sizes),
            inputs=tuple(t.contiguous().numpy() for t in (*tensors, *(tensor for _, tensor in self.parameters))),
            expected=expected.astype(np.float64) if wide.is_floating_point() else expected,
            distribution=distribution,
            draw=draw,
            key=f"{self.key} {dict(sizes)} {distribution} {draw}",
            reference_seconds=seconds,
            output_dtype=np.dtype(self.interface.output.dtype),
        )

    def values(self, sizes: Mapping[str, int], distribution: str, draw: int) -> list[Any]:
        """Arguments of `forward` for one draw; the same draw gives the same bits in every process."""
        drawn = [self._draw(tensor, sizes, distribution, draw, i) for i, tensor in enumerate(self.task_inputs)]
        if self.given is None:
            return drawn
        queue = iter(drawn)
        return [next(queue) if isinstance(value, torch.Tensor) else value for value in self.given]

    def _draw(
        self, tensor: Input, sizes: Mapping[str, int], distribution: str, draw: int, position: int
    ) -> torch.Tensor:
        key = [self.seed, zlib.crc32(self.task.id.encode()), draw, position]
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        shape = tuple(sizes[name] for name in tensor.shape)
        if tensor.kind == "index":
            high = sizes.get(tensor.high or "") or int(tensor.high or 1)
            array = generator.integers(0, high, shape)
        elif tensor.kind == "positive":
            array = DISTRIBUTIONS[distribution][1](generator.random(shape))
        else:
            array = DISTRIBUTIONS[distribution][0](generator.standard_normal(shape))
        if tensor.dtype == "bool":
            array = array > 0
        return torch.from_numpy(np.ascontiguousarray(np.asarray(array))).to(getattr(torch, tensor.dtype))

    def cached(self, key: str, make: Callable[[], T]) -> T:
        """What `make` gives, made once."""
        with self._lock:
            if key not in self._memory:
                self._memory[key] = make()
            return self._memory[key]

    def changed_model(self, source: str) -> Any:
        """A copy of the model, parameters included, with the methods of `Model` in another source.

        Raises:
            BadTask: the source does not run.
        """
        model = copy.deepcopy(self.model)
        model.__class__ = self._execute(source)["Model"]
        return model

    def _execute(self, source: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "reference"}
        try:
            exec(compile(source, f"<{self.task.id}>", "exec"), namespace)
        except (*TASK_ERRORS, SyntaxError, ImportError) as error:
            raise BadTask(f"task {self.task.id}: the reference does not import: {_line(error)}") from error
        if "Model" not in namespace:
            raise BadTask(f"task {self.task.id}: got no class Model, expected KernelBench form (Model, get_inputs)")
        return namespace

    def _call(self, name: str) -> list[Any]:
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return list(self.namespace[name]())
        except (KeyError, *TASK_ERRORS) as error:
            raise BadTask(f"task {self.task.id}: {name}() failed: {type(error).__name__}: {_line(error)}") from error

    def _build(self, cls: Any) -> Any:
        """The model with all parameters moved away from ones and zeros, so that none can be left out unnoticed."""
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = cls(*self.initial, **self.keywords)
        except TASK_ERRORS as error:
            raise BadTask(f"task {self.task.id}: Model() failed: {type(error).__name__}: {_line(error)}") from error
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for tensor in model.parameters():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.mul_(0.5 + torch.rand(tensor.shape, generator=generator)).add_(0.1 * noise)
            for tensor in model.buffers():
                if tensor.is_floating_point():  # variances stay positive
                    tensor.mul_(0.5 + torch.rand(tensor.shape, generator=generator)).add_(
                        0.1 * torch.rand(tensor.shape, generator=generator)
                    )
        return model

    def _derive_inputs(self) -> None:
        """Inputs and sizes of a task that states none: from `get_inputs()` and the arguments of `forward`."""
        self.given = self._call("get_inputs")
        names = input_names(self.namespace["Model"].forward, len(self.given))
        sizes: dict[int, str] = {}
        inputs = []
        for position, value in enumerate(self.given):
            if not isinstance(value, torch.Tensor):
                continue
            for extent in value.shape:
                count = len(sizes)
                sizes.setdefault(extent, size_name(count))
            shape = tuple(sizes[extent] for extent in value.shape)
            whole = not value.is_floating_point() and value.dtype != torch.bool
            high = str(int(value.max()) + 1) if whole and value.numel() else None
            dtype = str(value.dtype).removeprefix("torch.")
            kind = "index" if high else "signed"
            inputs.append(Input(name=names[position], shape=shape, dtype=dtype, kind=kind, high=high))
        self.task_inputs = tuple(inputs)
        self.check_shapes = self.time_shapes = ({name: extent for extent, name in sizes.items()},)
        self.task_inputs = self._within_domain()

    def _within_domain(self) -> tuple[Input, ...]:
        """The inputs, drawn positive where the reference is not defined for signed numbers (a logarithm, a root)."""
        for kind in ("signed", "positive"):
            inputs = tuple(replace(x, kind=kind) if x.kind in ("signed", "positive") else x for x in self.task_inputs)
            self.task_inputs = inputs
            output = self.forward(self.values(self.check_shapes[0], "scaled", 0), dtype=torch.float64)
            if bool(output.isfinite().all()):
                break
        return self.task_inputs

    def _interface(self) -> Interface:
        if not self.check_shapes:
            raise BadTask(f"task {self.task.id}: got no check shapes, expected at least one; add check_shapes")
        arrays = [Array(name=t.name, shape=t.shape, dtype=t.dtype) for t in self.task_inputs]
        arrays += [
            Array(name=name, shape=tuple(map(str, tensor.shape)), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.parameters
        ]
        sizes = tuple(dict.fromkeys(name for tensor in self.task_inputs for name in tensor.shape if not name.isdigit()))
        result, shape = self._output_shape(sizes)
        dtype = str(result.dtype).removeprefix("torch.")
        given = [None] * len(self.task_inputs) if self.given is None else self.given
        return Interface(
            inputs=tuple(arrays),
            output=Array(name="out", shape=shape, dtype=dtype),
            sizes=sizes,
            initial=tuple(self.initial),
            keywords=self.keywords,
            arguments=tuple(None if isinstance(value, torch.Tensor) else value for value in given),
            parameters=tuple(name for name, _ in _named(self.model)),
        )

    def _output_shape(self, sizes: tuple[str, ...]) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Runs the reference at sizes that are distinct primes, so that each extent of the output names itself."""
        primes = dict(zip(sizes, _PRIMES, strict=False))
        if self.given is None and not self.parameters and len(primes) == len(sizes):
            result = self.forward(self.values(primes, "signed", 0), dtype=torch.float32)
            names = {extent: name for name, extent in primes.items()}
            return result, tuple(names.get(extent, str(extent)) for extent in result.shape)
        first = self.check_shapes[0]
        result = self.forward(self.values(first, "signed", 0), dtype=torch.float32)
        names = {extent: name for name, extent in reversed(list(first.items()))}
        return result, tuple(names.get(extent, str(extent)) for extent in result.shape)


# sets of inputs for every shape at which candidates are timed
TIME_SETS = 5


def time_draw(position: int, index: int) -> int:
    """Which draw the set `index` of the time shape `position` is; no check uses it."""
    return 100 + TIME_SETS * position + index


@functools.lru_cache(maxsize=24)  # tens of megabytes each
def time_cases(reference: Reference) -> tuple[tuple[Case, ...], ...]:
    """The sets of inputs for every shape at which candidates are timed  [number of timings][TIME_SETS]."""
    rtol, atol = reference.task.rtol, reference.task.atol

    def case(sizes: Mapping[str, int], draw: int) -> Case:
        made = reference.case(sizes, "signed", draw)
        return replace(made, bounds=acceptance(made.expected, rtol=rtol, atol=atol))

    shapes = enumerate(reference.time_shapes)
    return tuple(tuple(case(sizes, time_draw(i, j)) for j in range(TIME_SETS)) for i, sizes in shapes)


# how the values of "signed" and of "positive" inputs are drawn: a candidate that is right on one kind of values only
# (never negative, never large, centred) is wrong
DISTRIBUTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "signed": (lambda normal: normal, lambda uniform: 1.0 - uniform),
    "scaled": (lambda normal: 8.0 * normal, lambda uniform: (1.0 - uniform) ** 3 + 1e-3),
    "offset": (lambda normal: normal + 3.0, lambda uniform: 1.0 - 0.5 * uniform),
}


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, as far as a kernel can be handed them as arrays."""
    return [(name, t) for name, t in [*model.named_parameters(), *model.named_buffers()] if t.dim() > 0]


def _parameters(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name.replace(".", "_"), tensor.detach().clone()) for name, tensor in _named(model)]


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
