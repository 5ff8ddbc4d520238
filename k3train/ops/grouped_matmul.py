"""Expert MLPs over tokens grouped by expert: nothing is dropped, shapes are static (docs/k3.md section 2.5).

`expert_mlp` has two implementations of one contract, chosen by backend:

* `ragged` (GPU, TPU): pairs sorted by expert, three `grouped_matmul` calls (`lax.ragged_dot`).
* `blocked` (CPU, where `lax.ragged_dot` is a dense masked product): sorted pairs cut into blocks of one expert each, a
  few blocks at a time in a loop whose trip count follows the real loads. Nothing of the size tokens x experts per token
  is kept: the backward pass recomputes gate and up.

Fake quantisation needs no third one (`parallel/expert.py`): weights and tokens are rounded before the call, the rest by
the activation function, whose result is what meets the down matrix. Where hardware multiplies MX types, replace
`grouped_matmul`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Activation = Callable[[Array, Array], Array]

IMPLEMENTATIONS = ("blocked", "ragged")


class GroupPlan(NamedTuple):
    """Token-expert pairs in order of their expert. N = P x K pairs; pair n belongs to token n // K."""

    order_N: Array  # int32, the pairs sorted by expert, stable; pairs without an expert here come last
    sizes_E: Array  # int32, pairs per expert


def default_implementation() -> str:
    """The implementation for the default backend."""
    return "blocked" if jax.default_backend() == "cpu" else "ragged"


def plan_groups(ids_PK: Array, num_experts: int) -> GroupPlan:
    """Sort the pairs by expert.

    Args:
        ids_PK: integer expert of each pair. `num_experts` or above marks a pair that is not computed here.
        num_experts: E, the experts held here.
    """
    ids_N = jnp.minimum(ids_PK.reshape(-1), num_experts)
    num_pairs = ids_N.shape[0]
    sizes_E = jnp.zeros((num_experts,), jnp.int32).at[ids_N].add(1, mode="drop")
    if (num_experts + 1) * num_pairs < 2**32:
        # Sorting one word that holds both expert and position is several times faster than a sort with a payload.
        packed_N = ids_N.astype(jnp.uint32) * num_pairs + jnp.arange(num_pairs, dtype=jnp.uint32)
        order_N = (jnp.sort(packed_N) % num_pairs).astype(jnp.int32)
    else:
        order_N = jnp.argsort(ids_N, stable=True).astype(jnp.int32)
    return GroupPlan(order_N, sizes_E)


def inverse(order_N: Array) -> Array:
    """The inverse of a permutation: where each pair is in the sorted order."""
    arange_N = jnp.arange(order_N.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(arange_N).at[order_N].set(arange_N, unique_indices=True)


def expert_mlp(
    x_PL: Array,
    weights_PK: Array,
    plan: GroupPlan,
    w1_ELF: Array,
    w3_ELF: Array,
    w2_EFL: Array,
    *,
    activation: Activation,
    implementation: str | None = None,
    expected_pairs: int | None = None,
) -> Array:
    """sum over a token's pairs of weight * (activation(x w1, x w3) w2), each pair with the matrices of its expert.

    Args:
        x_PL: tokens in the compute dtype.
        weights_PK: float32 combine weights.
        plan: of the pairs' experts. Pairs it leaves out add nothing and get zero gradients.
        w1_ELF, w3_ELF, w2_EFL: gate, up and down matrices in the compute dtype.
        activation: function of (gate, up), same dtype out. Hashable, no arrays inside.
        implementation: one of IMPLEMENTATIONS; default by backend.
        expected_pairs: how many of the pairs are likely to be computed here; sizes the blocks, never the result.
            Default: all of them.

    Returns:
        float32 [P, L]: expert outputs in the compute dtype, summed in float32.

    Raises:
        ValueError: unknown implementation.
    """
    implementation = implementation or default_implementation()
    if implementation == "ragged":
        return _ragged(x_PL, weights_PK, plan, w1_ELF, w3_ELF, w2_EFL, activation)
    if implementation == "blocked":
        num_experts, width, inner = w1_ELF.shape
        tiling = _tiling(expected_pairs or weights_PK.size, num_experts, width + inner)
        return _blocked(x_PL, weights_PK, plan, w1_ELF, w3_ELF, w2_EFL, activation, tiling)
    raise ValueError(f"implementation {implementation!r} unknown, accepted: {', '.join(IMPLEMENTATIONS)}")


# ---------------------------------------------------------------------------------------------------------- ragged


def grouped_matmul(x_NI: Array, w_EIO: Array, sizes_E: Array) -> Array:
    """x[n] times the matrix of n's expert, rows sorted by expert; rows past sum(sizes) give zeros. Not for CPU."""
    return jax.lax.ragged_dot(x_NI, w_EIO, sizes_E)


@jax.custom_vjp
def take_pairs(x_PL: Array, order_N: Array, place_PK: Array) -> Array:
    """Row of the token of every sorted pair: x[order // K]; `place` says where each of a token's K pairs is."""
    return x_PL[order_N // place_PK.shape[1]]


def _take_pairs_bwd(place_PK: Array, dy_NL: Array) -> tuple[Array, None, None]:
    # A gather by the inverse permutation: no scatter whose order of additions could vary.
    return jnp.sum(dy_NL[place_PK].astype(jnp.float32), axis=1).astype(dy_NL.dtype), None, None


take_pairs.defvjp(lambda x, order, place: (take_pairs(x, order, place), place), _take_pairs_bwd)


@jax.custom_vjp
def permute(x_NL: Array, to_N: Array, back_N: Array) -> Array:
    """x[to]; `back` is the inverse permutation."""
    return x_NL[to_N]


permute.defvjp(lambda x, to, back: (x[to], back), lambda back, dy: (dy[back], None, None))


def _ragged(
    x_PL: Array, weights_PK: Array, plan: GroupPlan, w1_ELF: Array, w3_ELF: Array, w2_EFL: Array, activation: Activation
) -> Array:
    num_tokens, num_chosen = weights_PK.shape
    num_pairs = num_tokens * num_chosen
    place_N = inverse(plan.order_N)
    computed_N1 = (jnp.arange(num_pairs) < jnp.sum(plan.sizes_E))[:, None]

    def matmul(rows_NI: Array, w_EIO: Array) -> Array:
        # Masked on both sides, as kernels leave what lies past the last group undefined, backwards too.
        return jnp.where(computed_N1, grouped_matmul(rows_NI, w_EIO, plan.sizes_E), 0)

    x_NL = jnp.where(computed_N1, take_pairs(x_PL, plan.order_N, place_N.reshape(num_tokens, num_chosen)), 0)
    hidden_NF = jnp.where(computed_N1, activation(matmul(x_NL, w1_ELF), matmul(x_NL, w3_ELF)), 0)
    y_NL = permute(matmul(hidden_NF, w2_EFL), place_N, plan.order_N)
    return jnp.einsum(
        "PKL,PK->PL", y_NL.reshape(num_tokens, num_chosen, -1).astype(jnp.float32), weights_PK.astype(jnp.float32)
    )


# --------------------------------------------------------------------------------------------------------- blocked


class _Blocks(NamedTuple):
    """Sorted pairs cut into blocks of at most C pairs of one expert, G blocks to a step of the loop."""

    expert_B: Array  # int32 expert of each block
    first_B: Array  # int32 place of its first pair in the sorted order
    stop_B: Array  # int32 end of the pairs of its expert in the sorted order; 0 for blocks past the last
    num_steps: Array  # int32 steps that hold any pair


def _tiling(num_pairs: int, num_experts: int, widths: int) -> tuple[int, int]:
    """(C pairs a block, G blocks a step); `widths` is L + F.

    Measured on two x86 cores (scripts/bench_moe.py): one block for an expert of average load, but not longer than pays
    for fetching its matrices; as many blocks a step as keep both cores busy and the rows within the caches, and no more
    than there can be: a decode step has few pairs.
    """
    longest = max(64, widths // 4)
    block = min(-(-num_pairs // num_experts) + 7, longest) // 8 * 8
    return block, max(1, min(2**18 // (widths * block), _most_blocks(num_pairs, num_experts, block)))


def _most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks that hold a pair under the worst loads."""
    return num_pairs // block + min(num_experts, num_pairs)


def _cut(plan: GroupPlan, block: int, group: int) -> _Blocks:
    num_pairs, num_experts = plan.order_N.shape[0], plan.sizes_E.shape[0]
    most = _most_blocks(num_pairs, num_experts, block)
    index_B = jnp.arange(-(-most // group) * group, dtype=jnp.int32)
    stop_E = jnp.cumsum(plan.sizes_E)
    start_E = stop_E - plan.sizes_E
    blocks_E = (plan.sizes_E + block - 1) // block
    last_E = jnp.cumsum(blocks_E)
    expert_B = jnp.repeat(jnp.arange(num_experts, dtype=jnp.int32), blocks_E, total_repeat_length=index_B.shape[0])
    first_B = start_E[expert_B] + (index_B - (last_E - blocks_E)[expert_B]) * block
    stop_B = jnp.where(index_B < last_E[-1], stop_E[expert_B], 0)
    return _Blocks(expert_B, first_B, stop_B, (last_E[-1] + group - 1) // group)


def _step_of(blocks: _Blocks, plan: GroupPlan, step: Array, tiling: tuple[int, int]) -> tuple[Array, Array]:
    """Experts [G] and pairs [G, C] of one step; places without a pair hold the number of pairs."""
    block, group = tiling
    expert_G, first_G, stop_G = (
        jax.lax.dynamic_slice_in_dim(a, step * group, group) for a in (blocks.expert_B, blocks.first_B, blocks.stop_B)
    )
    place_GC = first_G[:, None] + jnp.arange(block, dtype=jnp.int32)
    num_pairs = plan.order_N.shape[0]
    pair_GC = jnp.where(place_GC < stop_G[:, None], plan.order_N[jnp.minimum(place_GC, num_pairs - 1)], num_pairs)
    return expert_G, pair_GC


def _rows(x_PL: Array, index_GC: Array) -> Array:
    return x_PL.at[index_GC].get(mode="fill", fill_value=0)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _blocked(
    x_PL: Array,
    weights_PK: Array,
    plan: GroupPlan,
    w1_ELF: Array,
    w3_ELF: Array,
    w2_EFL: Array,
    activation: Activation,
    tiling: tuple[int, int],
) -> Array:
    num_chosen = weights_PK.shape[1]
    blocks = _cut(plan, *tiling)
    weights_N = weights_PK.reshape(-1).astype(jnp.float32)

    def step(i: Array, out_PL: Array) -> Array:
        expert_G, pair_GC = _step_of(blocks, plan, i, tiling)
        token_GC = jax.lax.div(pair_GC, num_chosen)
        x_GCL = _rows(x_PL, token_GC)
        gate_GCF = jnp.einsum("GCL,GLF->GCF", x_GCL, w1_ELF[expert_G])
        up_GCF = jnp.einsum("GCL,GLF->GCF", x_GCL, w3_ELF[expert_G])
        y_GCL = jnp.einsum("GCF,GFL->GCL", activation(gate_GCF, up_GCF), w2_EFL[expert_G])
        y_GCL = y_GCL.astype(jnp.float32) * _rows(weights_N, pair_GC)[..., None]
        return out_PL.at[token_GC].add(y_GCL, mode="drop")

    out_PL = jnp.zeros((x_PL.shape[0], w2_EFL.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.num_steps, step, out_PL)


def _blocked_fwd(x_PL, weights_PK, plan, w1_ELF, w3_ELF, w2_EFL, activation, tiling):
    saved = (x_PL, weights_PK, plan, w1_ELF, w3_ELF, w2_EFL)
    return _blocked(*saved, activation, tiling), saved


def _blocked_bwd(activation: Activation, tiling: tuple[int, int], saved: tuple, dout_PL: Array) -> tuple:
    x_PL, weights_PK, plan, w1_ELF, w3_ELF, w2_EFL = saved
    num_chosen = weights_PK.shape[1]
    blocks = _cut(plan, *tiling)
    weights_N = weights_PK.reshape(-1).astype(jnp.float32)
    dtype = x_PL.dtype

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        dx_PL, dweights_N, dw1_ELF, dw3_ELF, dw2_EFL = sums
        expert_G, pair_GC = _step_of(blocks, plan, i, tiling)
        token_GC = jax.lax.div(pair_GC, num_chosen)
        x_GCL = _rows(x_PL, token_GC)
        w1_GLF, w3_GLF, w2_GFL = w1_ELF[expert_G], w3_ELF[expert_G], w2_EFL[expert_G]
        gate_GCF = jnp.einsum("GCL,GLF->GCF", x_GCL, w1_GLF)
        up_GCF = jnp.einsum("GCL,GLF->GCF", x_GCL, w3_GLF)
        hidden_GCF, pull = jax.vjp(activation, gate_GCF, up_GCF)
        # The combine weight's gradient <dout, hidden w2> as <hidden, dout w2^T>: no expert output is needed
        # (report section 5.2.2).
        dout_GCL = _rows(dout_PL, token_GC)
        weight_GC1 = _rows(weights_N, pair_GC)[..., None]
        back_GCF = jnp.einsum("GCL,GFL->GCF", dout_GCL.astype(dtype), w2_GFL, preferred_element_type=jnp.float32)
        dweight_GC = jnp.sum(hidden_GCF.astype(jnp.float32) * back_GCF, axis=-1)
        dgate_GCF, dup_GCF = pull((weight_GC1 * back_GCF).astype(dtype))
        dy_GCL = (weight_GC1 * dout_GCL).astype(dtype)
        dx_GCL = jnp.einsum("GCF,GLF->GCL", dgate_GCF, w1_GLF) + jnp.einsum("GCF,GLF->GCL", dup_GCF, w3_GLF)

        def add_weight(total: Array, a_GCI: Array, b_GCO: Array) -> Array:
            return total.at[expert_G].add(jnp.einsum("GCI,GCO->GIO", a_GCI, b_GCO, preferred_element_type=jnp.float32))

        return (
            dx_PL.at[token_GC].add(dx_GCL.astype(jnp.float32), mode="drop"),
            dweights_N.at[pair_GC].set(dweight_GC, mode="drop"),
            add_weight(dw1_ELF, x_GCL, dgate_GCF),
            add_weight(dw3_ELF, x_GCL, dup_GCF),
            add_weight(dw2_EFL, hidden_GCF, dy_GCL),
        )

    zeros = tuple(jnp.zeros(a.shape, jnp.float32) for a in (x_PL, weights_N, w1_ELF, w3_ELF, w2_EFL))
    dx, dweights, dw1, dw3, dw2 = jax.lax.fori_loop(0, blocks.num_steps, step, zeros)
    dw1, dw3, dw2 = dw1.astype(w1_ELF.dtype), dw3.astype(w3_ELF.dtype), dw2.astype(w2_EFL.dtype)
    return dx.astype(dtype), dweights.reshape(weights_PK.shape).astype(weights_PK.dtype), None, dw1, dw3, dw2


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
