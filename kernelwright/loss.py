"""Policy losses over the trained tokens of a minibatch. Torch, but no model.

Every loss has the form

    loss(new [N], old [N], advantages [N], weights [N], rows [N], ...) -> (sum over the N tokens, metrics)

for the N trained tokens of all rows, one after another. `advantages` are already multiplied by `weights` (see
`kernelwright.samples.weighted`), which is harmless because the surrogates are positively homogeneous in the advantage;
terms without an advantage (KL, entropy) are multiplied by `weights` here. As the result is a sum, the losses of several
micro-batches add up to the loss of all rows, provided that a row is never cut in two.

Every metric is a detached mean over the N tokens: over micro-batches, average them weighted by N.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kernelwright.errors import UnknownName, UserError

Kl = Literal["none", "k1", "k2", "k3"]

# differences of log-probabilities are cut here: e^20 is finite in float32 and bfloat16, and no sane ratio is near it
_LOG_LIMIT = 20.0


def clipped(  # noqa: PLR0913  each is a tensor of the signature above or a knob of the published losses
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rows: Tensor | None = None,  # noqa: ARG001  every loss has this signature; only `sequence` needs it
    *,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
    kl: Kl = "none",
    beta: float = 0.0,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, token by token: `-sum_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)`.

    r_t = exp(new_t - old_t). (PPO: 1707.06347; unequal bounds: DAPO, 2503.14476; dual clip: 1912.09729, which for A < 0
    keeps the loss of a token below `-dual A`.) Added are `beta sum_t w_t kl_t` and
    `-entropy_coefficient sum_t w_t H_t`.

    Args:
        new: log-probabilities under the weights in training, with gradient [N].
        old: log-probabilities under the weights that sampled [N].
        advantages: advantages times weights [N].
        weights: weight of each token, not negative [N].
        rows: row number of each token [N]; not used here.
        low: distance from 1 to the lower bound of the ratio.
        high: distance from 1 to the upper bound of the ratio.
        dual: bound c > 1 for negative advantages, None for none; 3 in Dr. Kernel.
        kl: estimator of the divergence from `reference`, with d = reference - new: k1 = -d, k2 = d^2 / 2,
            k3 = e^d - d - 1. As a term of a loss k1 has a gradient that is zero on average; take k2 or k3.
        beta: coefficient of the divergence; with 0 it is only measured.
        reference: log-probabilities under the reference weights [N]; needed with `kl`.
        entropy: entropy of the distribution at each token, with gradient [N]; needed with `entropy_coefficient`.
        entropy_coefficient: coefficient of the entropy bonus.

    Returns:
        The sum, and means over tokens: `clip_fraction` (tokens whose surrogate has no gradient), `ratio_mean`,
        `kl_to_old`, and where they were given `kl_to_reference` and `entropy`.

    Raises:
        UserError: bounds out of range, or `kl`, `beta`, `reference`, `entropy` that do not go together.
        ValueError: tensors of different shapes.
    """
    _check_shapes(new, old, advantages, weights)
    log_ratio = (new - old).clamp(-_LOG_LIMIT, _LOG_LIMIT)
    surrogate, metrics = _surrogate(log_ratio.exp(), advantages, low=low, high=high, dual=dual)
    metrics |= _drift(log_ratio)
    extra, more = _penalties(
        new,
        weights,
        kl=kl,
        beta=beta,
        reference=reference,
        entropy=entropy,
        entropy_coefficient=entropy_coefficient,
    )
    return surrogate.sum() + extra, metrics | more


def sequence(  # noqa: PLR0913  as for `clipped`
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rows: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
    dual: float | None = None,
    kl: Kl = "none",
    beta: float = 0.0,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with one ratio a row, the geometric mean of its token ratios (GSPO, arXiv 2507.18071).

    s_i = exp(mean over the tokens t of row i of new_t - old_t). In the paper's token form (its equation 14) each token
    has the ratio `sg[s_i] p_t / sg[p_t]`: the value is s_i, the gradient that of the token alone, so that tokens of one
    row may have different advantages. Where they are equal it is the sequence form exactly. Pair it with mode
    "seq_mean_token_mean" and unit "row". Arguments, results and errors as in `clipped`.
    """
    _check_shapes(new, old, advantages, weights, rows)
    log_ratio = (new - old).clamp(-_LOG_LIMIT, _LOG_LIMIT)
    ratio = _row_means(log_ratio.detach(), rows).exp() * (new - new.detach()).exp()
    surrogate, metrics = _surrogate(ratio, advantages, low=low, high=high, dual=dual)
    metrics |= _drift(log_ratio)
    extra, more = _penalties(
        new,
        weights,
        kl=kl,
        beta=beta,
        reference=reference,
        entropy=entropy,
        entropy_coefficient=entropy_coefficient,
    )
    return surrogate.sum() + extra, metrics | more


def likelihood(
    new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, rows: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: minus the weighted sum of log-probabilities; behaviour and advantages play no part.

    Args:
        new: log-probabilities of the trained tokens  [N]; `old` and `advantages` as in `clipped`, unread.
        weights: weight of each token  [N].
        scale: factor on the sum, one over the number of tokens for a mean.
    """
    del advantages, rows
    _check_shapes(new, old, weights)
    return -scale * (weights * new).sum(), {}


def divergence(new: Tensor, reference: Tensor, *, kl: Kl = "k3") -> Tensor:
    """Estimate of KL(new || reference) at each token [N], from tokens sampled by `new`; formulas in `clipped`."""
    difference = (reference - new).clamp(-_LOG_LIMIT, _LOG_LIMIT)
    if kl == "k1":
        return -difference
    if kl == "k2":
        return 0.5 * difference.square()
    if kl == "k3":
        return difference.expm1() - difference
    raise UnknownName("estimator of the KL divergence", kl, [name for name in get_args(Kl) if name != "none"])


def _surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token [N], and the share of tokens at a bound."""
    if not 0 <= low <= 1 or high < 0 or (dual is not None and dual <= 1):
        raise UserError(
            f"the loss expects 0 <= low <= 1, high >= 0, dual > 1 or None; got low={low}, high={high}, dual={dual}"
        )
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    positive, negative = advantages > 0, advantages < 0
    at_bound = (positive & (ratio > 1 + high)) | (negative & (ratio < 1 - low))
    if dual is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual * advantages), loss)
        at_bound |= negative & (ratio > dual)
    return loss, {"clip_fraction": _mean(at_bound.to(ratio.dtype))}


def _drift(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the weights have moved since sampling; the divergence is k3 of KL(old || new)."""
    ratio = log_ratio.exp()
    return {"ratio_mean": _mean(ratio), "kl_to_old": _mean(ratio - 1 - log_ratio)}


def _penalties(
    new: Tensor,
    weights: Tensor,
    *,
    kl: Kl,
    beta: float,
    reference: Tensor | None,
    entropy: Tensor | None,
    entropy_coefficient: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The terms that know no advantage: divergence from a reference and entropy bonus."""
    total, metrics = new.new_zeros(()), {}
    if beta < 0 or (beta and kl == "none"):
        raise UserError(f"got kl='{kl}' with beta={beta}; expected a positive beta and an estimator, such as kl='k3'")
    if kl != "none":
        if reference is None:
            raise UserError(f"kl='{kl}' expects log-probabilities of a reference model; use an engine that has one")
        per_token = divergence(new, reference, kl=kl)
        total = total + beta * (weights * per_token).sum()
        metrics["kl_to_reference"] = _mean(per_token)
    if entropy is not None:
        metrics["entropy"] = _mean(entropy)
    if entropy_coefficient:
        if entropy is None:
            raise UserError(f"entropy_coefficient={entropy_coefficient} expects entropies; use an engine that has them")
        total = total - entropy_coefficient * (weights * entropy).sum()
    return total, metrics


def _row_means(values: Tensor, rows: Tensor) -> Tensor:
    """Each entry replaced by the mean over its row [N]."""
    _, number, count = rows.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(count.shape).index_add(0, number, values)
    return (sums / count)[number]


def _mean(values: Tensor) -> Tensor:
    """Detached mean, 0 of nothing."""
    return values.detach().mean() if values.numel() else values.detach().new_zeros(())


def _check_shapes(new: Tensor, *others: Tensor) -> None:
    if new.dim() != 1 or any(other.shape != new.shape for other in others):
        raise ValueError(f"expected vectors of one length, got {[tuple(other.shape) for other in (new, *others)]}")
