"""Balanced expert parallelism: every rank computes as many pairs as every other, whatever the router does.

After the report's section 5.2.1 and appendix E (docs/k3.md section 4.2): S tokens a rank with K experts each make S x K
pairs a rank computes, at most J = E / R foreign experts, nothing dropped, fixed shapes. What is sent is the row that
experts read (the latent), once for each pair and direction; combine weights travel along, so that the backward pass
needs no expert's output (section 5.2.2).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.ops.expert_plan import deal, pairs_of_ranks, plan_ranks
from k3train.ops.grouped_matmul import Activation, GroupPlan, expert_mlp, inverse, permute, plan_groups, take_pairs
from k3train.parallel.exchange import Lanes, exchange, lanes, to_ranks, within_budget
from k3train.parallel.foreign import Matrices, add_at_home, broadcast, for_each_expert, with_foreign
from k3train.parallel.mesh import axis_size

Array = jax.Array


class _Journey(NamedTuple):
    """Where this rank's pairs are computed, and what comes to this rank. A slot is an own or a foreign expert here."""

    groups: GroupPlan  # pairs in order of (rank, slot there)
    lanes: Lanes
    slot_N: Array  # int32 slot of every row that arrives; 2 J where none does
    left_N: Array  # bool: pairs beyond the budget, which are not sent


def balanced_experts(
    x_PL: Array,
    ids_PK: Array,
    weights_PK: Array,
    w1_JLF: Array,
    w3_JLF: Array,
    w2_JFL: Array,
    *,
    activation: Activation,
    implementation: str | None,
    transport: str,
) -> Array:
    """One rank's tokens through experts on all ranks; runs on every rank of the `expert` axis at once.

    Args:
        x_PL: this rank's tokens in the compute dtype.
        ids_PK: int32 experts of each; E or above computes nothing.
        weights_PK: float32 combine weights.
        w1_JLF, w3_JLF, w2_JFL: the experts held here.
        activation, implementation: of `expert_mlp`.
        transport: one of `exchange.TRANSPORTS`.

    Returns:
        float32 [P, L].
    """
    matrices = (w1_JLF, w3_JLF, w2_JFL)
    counts_RE = jax.lax.all_gather(_count(ids_PK.reshape(-1), len(w1_JLF) * axis_size("expert")), "expert")
    load_E = jnp.sum(counts_RE, axis=0)
    plan = plan_ranks(load_E, axis_size("expert"))
    journey = _journey(ids_PK.reshape(-1), counts_RE, pairs_of_ranks(load_E, plan), transport)
    order_N, place_N = journey.groups.order_N, inverse(journey.groups.order_N)

    rows_NL = exchange(take_pairs(x_PL, order_N, place_N.reshape(ids_PK.shape)), journey.lanes, transport)
    weights_N1 = permute(weights_PK.reshape(-1, 1), order_N, place_N)
    y_NL = expert_mlp(
        rows_NL,
        exchange(weights_N1, journey.lanes, transport),
        plan_groups(journey.slot_N, 2 * len(w1_JLF)),
        *with_foreign(matrices, plan, transport),
        activation=activation,
        implementation=implementation,
    )
    y_NL = permute(exchange(y_NL.astype(x_PL.dtype), journey.lanes.reverse(), transport), place_N, order_N)
    out_PL = jnp.sum(y_NL.reshape(*ids_PK.shape, -1).astype(jnp.float32), axis=1)
    if transport != "budgeted":
        return out_PL
    left_PK = jnp.where(journey.left_N.reshape(ids_PK.shape), ids_PK, load_E.shape[0])
    compute = partial(expert_mlp, activation=activation, implementation=implementation)
    rest_PL: Array = _at_home(x_PL, left_PK, weights_PK, matrices, compute)
    return out_PL + rest_PL


def _journey(ids_N: Array, counts_RE: Array, allotted_ER: Array, transport: str) -> _Journey:
    num_pairs = ids_N.shape[0]
    num_experts, num_ranks = allotted_ER.shape
    per_rank = num_experts // num_ranks
    rank_N = deal(ids_N, counts_RE, allotted_ER, jax.lax.axis_index("expert"))
    slot_N = ids_N % per_rank + jnp.where(rank_N == ids_N // per_rank, 0, per_rank)
    slots = 2 * per_rank
    groups = plan_groups(jnp.where(rank_N < num_ranks, rank_N * slots + slot_N, num_ranks * slots), num_ranks * slots)

    size_RW = groups.sizes_E.reshape(num_ranks, slots)
    start_R = jnp.cumsum(jnp.sum(size_RW, axis=1)) - jnp.sum(size_RW, axis=1)
    left_N = jnp.zeros((num_pairs,), bool)
    if transport == "budgeted":
        sent_RW = within_budget(size_RW, num_pairs)
        last_R = jnp.append(start_R + jnp.sum(sent_RW, axis=1), num_pairs)
        left_N = inverse(groups.order_N) >= last_R[rank_N]
        size_RW = sent_RW
    arrives_RW = to_ranks(size_RW)
    arrived = jnp.repeat(
        jnp.tile(jnp.arange(slots, dtype=jnp.int32), num_ranks), arrives_RW.reshape(-1), total_repeat_length=num_pairs
    )
    total = jnp.sum(arrives_RW)
    return _Journey(
        groups,
        lanes(start_R, jnp.sum(size_RW, axis=1), jnp.sum(arrives_RW, axis=1)),
        jnp.where(jnp.arange(num_pairs) < total, arrived, slots),
        left_N,
    )


def _count(ids_N: Array, num_experts: int) -> Array:
    return jnp.zeros((num_experts,), jnp.int32).at[ids_N].add(1, mode="drop")


# ------------------------------------------------------------------------------------------------ beyond the budget


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _at_home(x_PL, ids_PK, weights_PK, matrices: Matrices, compute) -> Array:
    """Pairs computed where their tokens are, one expert fetched after the other."""

    def add(expert: Array, out_PL: Array) -> Array:
        return out_PL + _one_expert(x_PL, ids_PK, weights_PK, expert, broadcast(matrices, expert), compute)

    return for_each_expert(_needed(ids_PK, matrices), add, jnp.zeros(x_PL.shape, jnp.float32))


def _at_home_bwd(compute, saved: tuple, dout_PL: Array) -> tuple:
    x_PL, ids_PK, weights_PK, matrices = saved

    def add(expert: Array, totals: tuple) -> tuple:
        dx_PL, dweights_PK, dmatrices = totals
        _, pull = jax.vjp(
            lambda x, weights, fetched: _one_expert(x, ids_PK, weights, expert, fetched, compute),
            x_PL, weights_PK, broadcast(matrices, expert),
        )  # fmt: skip
        dx, dweights, dfetched = pull(dout_PL)
        return dx_PL + dx.astype(jnp.float32), dweights_PK + dweights, add_at_home(dmatrices, expert, dfetched)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (x_PL, weights_PK, matrices))
    dx_PL, dweights_PK, dmatrices = for_each_expert(_needed(ids_PK, matrices), add, zeros)
    dmatrices = tuple(d.astype(w.dtype) for d, w in zip(dmatrices, matrices, strict=True))
    return dx_PL.astype(x_PL.dtype), None, dweights_PK, dmatrices


_at_home.defvjp(lambda *arguments: (_at_home(*arguments), arguments[:4]), _at_home_bwd)


def _one_expert(x_PL, ids_PK, weights_PK, expert, fetched: Matrices, compute) -> Array:
    own = plan_groups(jnp.where(ids_PK == expert, 0, 1), 1)
    return compute(x_PL, weights_PK, own, *(w[None] for w in fetched))


def _needed(ids_PK: Array, matrices: Matrices) -> Array:
    """bool [E]: experts that some rank of the group has pairs of."""
    return jax.lax.psum(_count(ids_PK.reshape(-1), len(matrices[0]) * axis_size("expert")), "expert") > 0
