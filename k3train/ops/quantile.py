"""Quantile balancing: the router bias from a histogram of margins (report section 2.3.3, appendices C and D;
docs/k3.md section 3.1).

Within one optimizer step every micro-batch and layer adds integer counts taken under the same bias; after the step
`quantile_bias` turns the pooled counts into the bias of the next one. Integers make the result independent of how the
tokens were split over devices and micro-batches.

For comparison: `exact_bias`, which needs every margin, and `sign_bias`, the rule of loss-free balancing.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def _range(bias_E: Array) -> tuple[Array, Array]:
    """Lowest margin and width of the range: cutoff - score lies in [b_min - 1, b_max + 1]."""
    low, high = jnp.min(bias_E), jnp.max(bias_E)
    return low - 1.0, high - low + 2.0


def margins(scores_PE: Array, cutoff_P: Array, valid_P: Array) -> Array:
    """What each score lacked to the cutoff, without gradient: cutoff - score, infinite where a token does not count.

    Args:
        scores_PE: float32 unbiased scores; any number of leading axes.
        cutoff_P: float32 (K+1)-th largest biased scores.
        valid_P: bool; padding does not count, nor does a token with a non-finite score (its step is skipped anyway).

    Returns:
        float32, shaped like the scores.
    """
    scores_PE, cutoff_P = jax.lax.stop_gradient((scores_PE, cutoff_P))
    counted_P = valid_P & jnp.isfinite(cutoff_P + jnp.sum(scores_PE, axis=-1))
    return jnp.where(counted_P[..., None], cutoff_P[..., None] - scores_PE, jnp.inf)


def histogram(margins_PE: Array, bias_E: Array, *, num_bins: int) -> Array:
    """Counts of the margins per expert over uniform bins.

    Args:
        margins_PE: from `margins`; any number of leading axes.
        bias_E: float32 bias in force, the one the cutoffs were computed with.
        num_bins: bins over [b_min - 1, b_max + 1].

    Returns:
        int32 [E, num_bins]; every row sums to the number of counted tokens.
    """
    num_experts = margins_PE.shape[-1]
    margins_PE = margins_PE.reshape(-1, num_experts)
    low, width = _range(bias_E)
    bin_PE = jnp.clip(jnp.floor((margins_PE - low) * (num_bins / width)), 0, num_bins - 1).astype(jnp.int32)
    # Tokens that do not count go to an index past the end, which the scatter drops.
    flat_PE = jnp.arange(num_experts, dtype=jnp.int32) * num_bins + bin_PE
    flat_PE = jnp.where(jnp.isfinite(margins_PE), flat_PE, num_experts * num_bins)
    counts = jnp.zeros((num_experts * num_bins,), jnp.int32).at[flat_PE.reshape(-1)].add(1, mode="drop")
    return counts.reshape(num_experts, num_bins)


def quantile_bias(counts_EN: Array, bias_E: Array, *, num_selected: int) -> Array:
    """The next bias: per expert the margin that q = tokens * K / E tokens exceed, mean-centred.

    The first bin whose cumulative count reaches ceil(q) is interpolated linearly. The result is within one bin width of
    the exact order statistic.

    Args:
        counts_EN: int32 [E, num_bins] from `histogram`, summed over all micro-batches of the step.
        bias_E: float32 bias under which the counts were taken.
        num_selected: K.

    Returns:
        float32 [E]. The old bias when nothing was counted or when every expert is always chosen (K = E).
    """
    num_experts, num_bins = counts_EN.shape
    if num_selected == num_experts:
        return bias_E
    cumulative_EN = jnp.cumsum(counts_EN, axis=-1)
    num_tokens = cumulative_EN[0, -1]  # the same for every expert
    whole, rest = _target(num_tokens, num_selected, num_experts)
    bin_E = jnp.argmax(cumulative_EN >= whole + (rest > 0), axis=-1)
    in_bin_E = jnp.take_along_axis(counts_EN, bin_E[:, None], axis=-1)[:, 0]
    before_E = jnp.take_along_axis(cumulative_EN, bin_E[:, None], axis=-1)[:, 0] - in_bin_E
    share_E = ((whole - before_E) + rest / num_experts) / jnp.maximum(in_bin_E, 1)
    low, width = _range(bias_E)
    quantile_E = low + (bin_E + jnp.clip(share_E, 0.0, 1.0)) * (width / num_bins)
    return jnp.where(num_tokens > 0, quantile_E - jnp.mean(quantile_E), bias_E)


def exact_bias(margins_PE: Array, bias_E: Array, *, num_selected: int) -> Array:
    """The next bias by Algorithm 1: minus the (floor(q) + 1)-th largest score - cutoff, mean-centred.

    Needs every margin of the step: the reference for `quantile_bias`, for small runs.

    Args:
        margins_PE: from `margins`, of all tokens of the step.
        bias_E: float32 bias in force.
        num_selected: K.

    Returns:
        float32 [E]. The old bias when nothing was counted or when every expert is always chosen (K = E).
    """
    num_experts = margins_PE.shape[-1]
    if num_selected == num_experts:
        return bias_E
    margins_PE = margins_PE.reshape(-1, num_experts)
    num_tokens = jnp.sum(jnp.isfinite(margins_PE[:, 0]), dtype=jnp.int32)
    whole, _ = _target(num_tokens, num_selected, num_experts)
    quantile_E = jnp.sort(margins_PE, axis=0)[whole]
    return jnp.where(num_tokens > 0, quantile_E - jnp.mean(quantile_E), bias_E)


def _target(num_tokens: Array, num_selected: int, num_experts: int) -> tuple[Array, Array]:
    """q = tokens * K / E as (whole, rest) with q = whole + rest / E, without the product that could overflow int32."""
    per_expert, left = num_tokens // num_experts, num_tokens % num_experts
    whole = per_expert * num_selected + (left * num_selected) // num_experts
    return whole, (left * num_selected) % num_experts


def sign_bias(loads_E: Array, bias_E: Array, *, step: float) -> Array:
    """The next bias by the sign rule of loss-free balancing: `step` up below the mean load, `step` down above it.

    Args:
        loads_E: int32 tokens per expert, over all micro-batches of the step.
    """
    loads_E = loads_E.astype(jnp.float32)
    return bias_E + step * jnp.sign(jnp.mean(loads_E) - loads_E)


def expert_loads(ids_PK: Array, valid_P: Array, *, num_experts: int) -> Array:
    """Tokens per expert, int32 [E], padding not counted. They sum to (valid tokens) * K."""
    ids_PK = jnp.where(valid_P[..., None], ids_PK, num_experts)
    return jnp.zeros((num_experts,), jnp.int32).at[ids_PK.reshape(-1)].add(1, mode="drop")


def load_metrics(loads_E: Array) -> dict[str, Array]:
    """float32 over the last axis: `max_over_mean` load, `max_violation` (that minus one), `min_over_mean`.

    Without any load they are 0, -1 and 0.
    """
    loads_E = loads_E.astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(loads_E, axis=-1), 1e-9)
    most, least = jnp.max(loads_E, axis=-1) / mean, jnp.min(loads_E, axis=-1) / mean
    return {"max_over_mean": most, "max_violation": most - 1.0, "min_over_mean": least}
