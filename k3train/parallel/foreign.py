"""Experts of other ranks: matrices fetched for a while, their gradients sent home and added there in float32.

Loops run over the experts that somebody needs, so the buffers hold J experts however uneven the loads are, and almost
nothing is sent when they are even.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from k3train.ops.expert_plan import ExpertPlan
from k3train.parallel.exchange import on_all_devices

Array = jax.Array
Matrices = tuple[Array, ...]  # of J experts each
Carry = TypeVar("Carry")


def for_each_expert(wanted_E: Array, body: Callable[[Array, Carry], Carry], start: Carry) -> Carry:
    """`body(expert, carry)` for every wanted expert; for some unwanted ones where another group of ranks wants more."""
    order_E = jnp.argsort(~wanted_E)
    return jax.lax.fori_loop(0, on_all_devices(jnp.sum(wanted_E)), lambda i, carry: body(order_E[i], carry), start)


def broadcast(weights: Matrices, expert: Array) -> Matrices:
    """The matrices of one expert, from the rank that holds it to all."""
    home, index = jnp.divmod(expert, weights[0].shape[0])
    here = jax.lax.axis_index("expert") == home
    return tuple(jax.lax.psum(jnp.where(here, w[index], 0), "expert") for w in weights)


def add_at_home(totals: Matrices, expert: Array, grads: Matrices) -> Matrices:
    """The gradients that all ranks have for one expert, added in float32 where it is held."""
    home, index = jnp.divmod(expert, totals[0].shape[0])
    here = jax.lax.axis_index("expert") == home
    summed = (jax.lax.psum(g.astype(jnp.float32), "expert") for g in grads)
    return tuple(t.at[index].add(jnp.where(here, s, 0)) for t, s in zip(totals, summed, strict=True))


def with_foreign(weights: Matrices, plan: ExpertPlan, transport: str) -> Matrices:
    """Own matrices and those of the donor's experts that the plan asks for, [2 J, ...] each; zeros where it asks not.

    Args:
        weights: matrices of the J experts held here.
        plan: the same on all ranks.
        transport: `ragged` sends an expert to those who need it, the others broadcast it.
    """
    return _with_foreign(weights, plan, transport)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_foreign(weights: Matrices, plan: ExpertPlan, transport: str) -> Matrices:
    empty = jax.tree.map(jnp.zeros_like, weights)
    foreign = (_fetch_ragged if transport == "ragged" else _fetch)(weights, plan, empty)
    return tuple(jnp.concatenate(pair) for pair in zip(weights, foreign, strict=True))


def _with_foreign_bwd(transport: str, plan: ExpertPlan, grads: Matrices) -> tuple[Matrices, None]:
    per_rank = plan.moved_RJ.shape[1]
    totals = tuple(g[:per_rank].astype(jnp.float32) for g in grads)
    foreign = tuple(g[per_rank:] for g in grads)
    totals = (_return_ragged if transport == "ragged" else _return)(totals, plan, foreign)
    return tuple(t.astype(g.dtype) for t, g in zip(totals, grads, strict=True)), None


_with_foreign.defvjp(
    lambda weights, plan, transport: (_with_foreign(weights, plan, transport), plan), _with_foreign_bwd
)


def _lent(plan: ExpertPlan) -> Array:
    """bool [R, E]: the foreign experts of each rank."""
    num_ranks, per_rank = plan.moved_RJ.shape
    home_E = jnp.arange(num_ranks * per_rank) // per_rank
    return (plan.donor_R[:, None] == home_E) & jnp.tile(plan.moved_RJ > 0, (1, num_ranks))


def _fetch(weights: Matrices, plan: ExpertPlan, empty: Matrices) -> Matrices:
    lent_RE = _lent(plan)
    mine_E = lent_RE[jax.lax.axis_index("expert")]

    def fetch(expert: Array, foreign: Matrices) -> Matrices:
        index = expert % plan.moved_RJ.shape[1]
        matrices = broadcast(weights, expert)
        return tuple(
            f.at[index].set(jnp.where(mine_E[expert], m, f[index])) for f, m in zip(foreign, matrices, strict=True)
        )

    return for_each_expert(jnp.any(lent_RE, axis=0), fetch, empty)


def _return(totals: Matrices, plan: ExpertPlan, foreign: Matrices) -> Matrices:
    lent_RE = _lent(plan)
    mine_E = lent_RE[jax.lax.axis_index("expert")]

    def give_back(expert: Array, totals: Matrices) -> Matrices:
        index = expert % plan.moved_RJ.shape[1]
        return add_at_home(totals, expert, tuple(jnp.where(mine_E[expert], f[index], 0) for f in foreign))

    return for_each_expert(jnp.any(lent_RE, axis=0), give_back, totals)


# ----------------------------------------------------------------------------------------------------------- ragged


def _fetch_ragged(weights: Matrices, plan: ExpertPlan, empty: Matrices) -> Matrices:
    """Every rank's n-th foreign expert in the n-th round."""
    me = jax.lax.axis_index("expert")
    order_RJ, count_R = _order(plan)

    def fetch(n: Array, foreign: Matrices) -> Matrices:
        index_R, given_R = order_RJ[:, n], n < count_R
        sent_R = (given_R & (plan.donor_R == me)).astype(jnp.int32)
        got_R = (given_R[me] & (jnp.arange(len(count_R)) == plan.donor_R[me])).astype(jnp.int32)
        return tuple(
            jax.lax.ragged_all_to_all(w, f, index_R, sent_R, index_R, got_R, axis_name="expert")
            for w, f in zip(weights, foreign, strict=True)
        )

    return jax.lax.fori_loop(0, on_all_devices(jnp.max(count_R)), fetch, empty)


def _return_ragged(totals: Matrices, plan: ExpertPlan, foreign: Matrices) -> Matrices:
    """As fetched, but the ranks with the same donor take turns: it has room for one expert's gradient."""
    me = jax.lax.axis_index("expert")
    order_RJ, count_R = _order(plan)
    same_RR = (plan.donor_R[:, None] == plan.donor_R) & (count_R > 0)
    turn_R = jnp.sum(jnp.tril(same_RR, -1), axis=1)
    most = jnp.maximum(jnp.max(count_R), 1)
    rank_R = jnp.arange(len(count_R))

    def give_back(i: Array, totals: Matrices) -> Matrices:
        turn, n = jnp.divmod(i, most)
        index_R, now_R = order_RJ[:, n], (n < count_R) & (turn_R == turn)
        sent_R = (now_R[me] & (rank_R == plan.donor_R[me])).astype(jnp.int32)
        got_R = now_R & (plan.donor_R == me)
        index = jnp.sum(jnp.where(got_R, index_R, 0))
        start_R, zero_R = jnp.full_like(sent_R, index_R[me]), jnp.zeros_like(sent_R)
        arrived = (
            jax.lax.ragged_all_to_all(
                f, jnp.zeros_like(f[:1]), start_R, sent_R, zero_R, got_R.astype(jnp.int32), axis_name="expert"
            )[0]
            for f in foreign
        )
        return tuple(t.at[index].add(a.astype(jnp.float32)) for t, a in zip(totals, arrived, strict=True))

    rounds = most * jnp.max(jnp.where(count_R > 0, turn_R + 1, 0))
    return jax.lax.fori_loop(0, on_all_devices(rounds), give_back, totals)


def _order(plan: ExpertPlan) -> tuple[Array, Array]:
    """Each rank's foreign experts first [R, J], as places in its donor's list, and how many they are [R]."""
    lent_RJ = plan.moved_RJ > 0
    return jnp.argsort(~lent_RJ, axis=1).astype(jnp.int32), jnp.sum(lent_RJ, axis=1, dtype=jnp.int32)
