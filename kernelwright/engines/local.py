"""The engine in this process: any transformers causal language model, sampled and trained with torch.

Weights, gradients and the optimiser are float32; with another `dtype` the forward passes run under autocast, so that
small steps are not lost to rounding.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from kernelwright.chat import Chat
from kernelwright.engines.decoders import ModuleDecoder
from kernelwright.engines.sampling import generate
from kernelwright.engines.scoring import MicroBatch, Scores, micro_batches, score
from kernelwright.errors import BadModel
from kernelwright.types import Completion, Loss, Optimiser, Sample, Sampling

# elements of one micro-batch's logits in an update or a scoring pass: 1 GiB in float32
_LOGITS = 2**28
# padded tokens of one micro-batch, whatever the vocabulary; on a CPU small ones stay in its caches (a third faster)
_MICRO_TOKENS = {"cpu": 2048, "cuda": 16384}
# bytes of keys and values that one batch of replies may hold
_CACHE_BYTES = 2**31
_STATE = "engine.pt"


class LocalEngine:
    """Holds a model, its tokenizer, an AdamW optimiser and, once a loss asks for it, a frozen copy of the weights.

    Args:
        model: a transformers causal language model; it is put on `device`, in float32 and evaluation mode (dropout
            would make the trainer's distribution another one than the sampler's).
        tokenizer: its transformers tokenizer.
        device: "auto" takes a CUDA device where there is one.
        dtype: arithmetic of the forward passes.
        micro_tokens: padded tokens of a micro-batch; by default as many as the vocabulary leaves room for.
        ends: tokens that end a reply; by default what the model, the tokenizer and the chat template say.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16"] = "float32",
        micro_tokens: int | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(device=device, dtype=torch.float32).eval()
        self.tokenizer = tokenizer
        self.policy = 0
        self.reference: Any = None
        self.micro_tokens = micro_tokens or min(
            _MICRO_TOKENS.get(self.model.device.type, 2048),
            _LOGITS // model.config.get_text_config(decoder=True).vocab_size,
        )
        self._dtype = getattr(torch, dtype)
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self._ends = tuple(ends) if ends is not None else end_tokens(model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16"] = "float32",
        threads: int | None = None,
    ) -> LocalEngine:
        """An engine on a model folder or a Hugging Face id.

        Args:
            source: folder with config.json, safetensors weights and a tokenizer; or an id on the Hugging Face hub.
            device: see the class.
            dtype: see the class.
            threads: threads of torch for the whole process; None leaves them as they are.

        Raises:
            BadModel: the folder is missing or corrupt, is no causal language model or has no tokenizer.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        model, tokenizer = read_model(source)
        return cls(model, tokenizer, device=device, dtype=dtype)

    def sample(
        self, contexts: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion a context; see `Engine.sample` and `kernelwright.engines.sampling`."""
        config = self.model.config.get_text_config(decoder=True)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        with torch.inference_mode(), self._arithmetic():
            return generate(
                lambda: ModuleDecoder(self.model),
                contexts,
                sampling,
                keys,
                ends=self._ends,
                policy=self.policy,
                cache_tokens=_CACHE_BYTES // (2 * 4 * config.num_hidden_layers * heads * size),
            )

    def logprobs(self, rows: Sequence[Sample], temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of each token given the tokens before it  [B][L], 0.0 at position 0."""
        result: list[list[float]] = [[0.0] for _ in rows]
        scored = [index for index, row in enumerate(rows) if len(row.tokens) > 1]
        chosen = [rows[index] for index in scored]
        wanted = [[0, *[1] * (len(row.tokens) - 1)] for row in chosen]
        for batch in micro_batches(self.model, chosen, wanted, tokens=self.micro_tokens):
            with torch.inference_mode():
                values = self._score(self.model, batch, wanted, temperature).logprobs
            for index, part in zip(batch.rows, values.split([sum(wanted[row]) for row in batch.rows]), strict=True):
                result[scored[index]] = [0.0, *part.tolist()]
        return result

    def update(
        self,
        rows: Sequence[Sample],
        loss: Loss,
        optimiser: Optimiser,
        *,
        lr_scale: float = 1.0,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One AdamW step on the loss summed over all rows.

        Args:
            rows: training rows; their advantages and weights carry all normalisation.
            loss: see `kernelwright.loss`. When it is a `functools.partial` that binds `kl`, it gets `reference`; when
                it binds `entropy_coefficient`, it gets `entropy`.
            optimiser: learning rate, betas, weight decay and the limit of the gradient's norm.
            lr_scale: factor on the learning rate (warm-up, schedule).
            temperature: of the sampler, see `score`.

        Returns:
            `loss` (sum), `grad_norm` (before clipping), `entropy` (nats, mean over trained tokens), `tokens` (trained),
            `lr`, `skipped`, and the loss's own metrics (means over trained tokens). `skipped` is 1 when the loss or the
            gradient is not finite, or no token is trained: then nothing changes, not even the optimiser's state.
        """
        trained = [row for row in rows if any(row.mask)]
        bound = getattr(loss, "keywords", {})
        if bound.get("kl", "none") != "none" and self.reference is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
        self._optimiser.zero_grad(set_to_none=True)
        sums: defaultdict[str, float] = defaultdict(float)
        masks = [row.mask for row in trained]
        for batch in micro_batches(self.model, trained, masks, tokens=self.micro_tokens):
            for name, value in self._backward(trained, batch, loss, temperature).items():
                sums[name] += value
        tokens, total = sums.pop("tokens", 0.0), sums.pop("loss", 0.0)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimiser.clip)) if tokens else 0.0
        skipped = not tokens or not math.isfinite(total) or not math.isfinite(norm)
        lr = optimiser.lr * lr_scale
        if not skipped:
            for group in self._optimiser.param_groups:
                group.update(lr=lr, betas=optimiser.betas, eps=optimiser.epsilon, weight_decay=optimiser.weight_decay)
            self._optimiser.step()
            self.policy += 1
        self._optimiser.zero_grad(set_to_none=True)
        means = {name: value / tokens for name, value in sums.items()} if tokens else {}
        return {**means, "loss": total, "grad_norm": norm, "tokens": tokens, "lr": lr, "skipped": float(skipped)}

    def _backward(
        self, trained: Sequence[Sample], batch: MicroBatch, loss: Loss, temperature: float
    ) -> dict[str, float]:
        """Adds the gradient of some rows; returns sums over their trained tokens."""
        wanted = [row.mask for row in trained]
        rows = [trained[index] for index in batch.rows]
        bound = getattr(loss, "keywords", {})
        scores = self._score(self.model, batch, wanted, temperature)
        extra: dict[str, Tensor] = {}
        if bound.get("kl", "none") != "none":
            with torch.no_grad():
                extra["reference"] = self._score(self.reference, batch, wanted, temperature).logprobs
        if bound.get("entropy_coefficient"):
            extra["entropy"] = scores.entropies
        numbers = [index for index, row in enumerate(rows) for on in row.mask if on]
        value, metrics = loss(
            scores.logprobs,
            *(self._trained(rows, name) for name in ("logprobs", "advantages", "weights")),
            torch.tensor(numbers, device=self.model.device),
            **extra,
        )
        value.backward()
        count = len(numbers)
        means = {"entropy": scores.entropies.detach().mean(), **metrics}
        sums = {name: float(mean) * count for name, mean in means.items()}
        return {**sums, "loss": float(value.detach()), "tokens": float(count)}

    def _trained(self, rows: Sequence[Sample], name: str) -> Tensor:
        values = [value for row in rows for value, on in zip(getattr(row, name), row.mask, strict=True) if on]
        return torch.tensor(values, device=self.model.device)

    def _score(self, model: Any, batch: MicroBatch, wanted: Sequence[Sequence[int]], temperature: float) -> Scores:
        with self._arithmetic():
            return score(model, batch.plan, [wanted[row] for row in batch.rows], temperature=temperature)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, dtype=self._dtype, enabled=self._dtype is not torch.float32)

    def save(self, path: str) -> None:
        """A model folder that `AutoModelForCausalLM` reads, and beside it optimiser, counter and random state."""
        with _quiet():
            self.model.save_pretrained(path)
            self.tokenizer.save_pretrained(path)
            if self.reference is not None:
                self.reference.save_pretrained(Path(path) / "reference")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        state = {
            "policy": self.policy,
            "optimiser": self._optimiser.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": cuda,
        }
        torch.save(state, Path(path) / _STATE)

    def load(self, path: str) -> None:
        """The inverse of `save`, to the same bits.

        Raises:
            BadModel: the folder is no saved engine, or is one of a different model.
        """
        folder = Path(path)
        if not (folder / _STATE).is_file():
            raise BadModel(f"'{path}' is no saved engine; expected a folder with {_STATE}; give a checkpoint folder")
        model, _ = read_model(path)
        _copy_weights(model, self.model, path)
        if (folder / "reference").is_dir():
            self.reference = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
            _copy_weights(read_weights(str(folder / "reference")), self.reference, path)
        else:
            self.reference = None
        state = _read_state(folder / _STATE)
        self._optimiser.load_state_dict(state["optimiser"])
        self.policy = state["policy"]
        torch.set_rng_state(state["torch_rng"])
        if torch.cuda.is_available() and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def capabilities(self) -> dict[str, Any]:
        """What this engine can do."""
        return {
            "train": True,
            "seeded": True,
            "exact_resume": True,
            "device": str(self.model.device),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self._dtype).removeprefix("torch."),
        }


def _read_state(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise BadModel(f"'{file}' is corrupt; expected what this engine saved") from error


def _copy_weights(source: Any, target: Any, path: str) -> None:
    new, old = dict(source.named_parameters()), dict(target.named_parameters())
    if {name: value.shape for name, value in new.items()} != {name: value.shape for name, value in old.items()}:
        raise BadModel(f"'{path}' holds a model of another shape than the one to be restored; give its own checkpoint")
    with torch.no_grad():
        for name, value in new.items():
            old[name].copy_(value)


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a reply: the model's, the tokenizer's and the one that the chat template writes after a reply."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    found = {tokenizer.eos_token_id, Chat(tokenizer).end(), *(ends if isinstance(ends, list) else [ends])}
    return tuple(sorted(token for token in found if token is not None))


def read_model(source: str) -> tuple[Any, Any]:
    """Model (float32, on the CPU) and tokenizer of a folder or hub id; `BadModel` when either does not load."""
    from transformers import AutoTokenizer

    model = read_weights(source)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadModel(f"model '{source}' has no tokenizer that loads ({_line(error)}); add tokenizer.json") from error
    known, words = model.get_input_embeddings().num_embeddings, tokenizer.vocab_size
    if words > known:
        raise BadModel(
            f"model '{source}' embeds {known} tokens, its tokenizer has {words}; give the tokenizer of this model"
        )
    return model, tokenizer


def read_weights(source: str) -> Any:
    """The model alone, see `read_model`."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder = Path(source)
    local = folder.is_absolute() or source.startswith(".") or folder.exists()
    if local and not (folder / "config.json").is_file():
        raise BadModel(
            f"model '{source}': no config.json there; expected a folder in Hugging Face form; check the path"
        )
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True
    try:
        with _quiet():
            model, info = cast(Any, AutoModelForCausalLM.from_pretrained(source, **options))
    except SafetensorError as error:
        raise BadModel(
            f"model '{source}': corrupt weights ({_line(error)}); expected safetensors; copy it again"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, StrictDataclassError) as error:
        advice = "check the files" if local else "check the id and the network, or give a folder"
        raise BadModel(f"model '{source}' is no causal language model that loads ({_line(error)}); {advice}") from error
    if info["mismatched_keys"]:
        name, *shapes = sorted(info["mismatched_keys"])[0]
        got, expected = (tuple(shape) for shape in shapes)
        raise BadModel(
            f"model '{source}': '{name}' is {got}, config.json says {expected}; copy weights and config.json together"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])[0]
        raise BadModel(f"model '{source}' lacks weights such as '{missing}'; expected a causal language model")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers and its hub say on the way: bars that the command line's own display cannot place, and
    reports on what then becomes one line of an error."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    shown, level, hub_level = logging.is_progress_bar_enabled(), logging.get_verbosity(), hub_logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if shown:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # a first line that only announces the second says nothing
    return " ".join(line.strip() for line in (lines[:2] if lines[0].endswith(":") else lines[:1]))
