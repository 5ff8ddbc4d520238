"""Which rank computes which token-expert pairs: integers only, the same on every rank (report section 5.2.1, App. E).

R ranks hold E experts, J = E / R each. Whatever the loads, every rank ends up with the same number of pairs: again and
again the most overloaded rank fills the least loaded one exactly. A rank is filled once and then left alone, so its
foreign pairs come from one donor and touch at most J experts (docs/k3.md section 4.2).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.ops.grouped_matmul import inverse, plan_groups

Array = jax.Array


class ExpertPlan(NamedTuple):
    """What each rank computes for one other rank."""

    donor_R: Array  # int32: whose experts; the rank itself where it computes its own pairs only
    moved_RJ: Array  # int32: pairs of each of the donor's experts


def plan_ranks(load_E: Array, num_ranks: int) -> ExpertPlan:
    """Move pairs until no rank has more than another.

    Args:
        load_E: integer pairs of each expert over all ranks; expert e lives on rank e // (E / R).
        num_ranks: R, a divisor of E.

    Returns:
        A plan under which rank r computes T // R pairs of the T in all, and one more where r < T mod R.
    """
    rank_R = jnp.arange(num_ranks, dtype=jnp.int32)
    left_RJ = load_E.astype(jnp.int32).reshape(num_ranks, -1)
    total = jnp.sum(left_RJ)
    share_R = total // num_ranks + (rank_R < total % num_ranks)

    def unfilled(state):
        _, _, need_R = state
        return jnp.any(need_R > 0)

    def fill(state):
        plan, left_RJ, need_R = state
        poor, rich = (f(need_R).astype(jnp.int32) for f in (jnp.argmax, jnp.argmin))
        taken_J = _largest_first(left_RJ[rich], need_R[poor])
        plan = ExpertPlan(plan.donor_R.at[poor].set(rich), plan.moved_RJ.at[poor].set(taken_J))
        need_R = need_R.at[rich].add(need_R[poor]).at[poor].set(0)
        return plan, left_RJ.at[rich].add(-taken_J), need_R

    start = ExpertPlan(rank_R, jnp.zeros_like(left_RJ))
    return jax.lax.while_loop(unfilled, fill, (start, left_RJ, share_R - jnp.sum(left_RJ, axis=1)))[0]


def pairs_of_ranks(load_E: Array, plan: ExpertPlan) -> Array:
    """int32 [E, R]: how many of each expert's pairs each rank computes."""
    num_ranks, per_rank = plan.moved_RJ.shape
    home_E = jnp.arange(load_E.shape[0], dtype=jnp.int32) // per_rank
    given_RE = jnp.where(plan.donor_R[:, None] == home_E, jnp.tile(plan.moved_RJ, (1, num_ranks)), 0)
    own_RE = jnp.where(jnp.arange(num_ranks)[:, None] == home_E, load_E - jnp.sum(given_RE, axis=0), 0)
    return (given_RE + own_RE).T


def deal(ids_N: Array, counts_RE: Array, allotted_ER: Array, rank: Array | int) -> Array:
    """Rank that computes each of this rank's pairs.

    The pairs of an expert are dealt in turn over the ranks they come from, so that what one rank computes comes from
    many, and no two ranks need to exchange much more than others.

    Args:
        ids_N: int32 experts of this rank's pairs; E or above computes nothing.
        counts_RE: int32 pairs of each expert on each rank.
        allotted_ER: of `pairs_of_ranks`.
        rank: this rank.

    Returns:
        int32 [N]; R where a pair computes nothing.
    """
    num_experts, num_ranks = allotted_ER.shape
    known_N = jnp.minimum(ids_N, num_experts - 1)
    turn_N = _position_in_group(ids_N, num_experts)
    ahead_R = (jnp.arange(num_ranks) < rank).astype(jnp.int32)
    place_N = jnp.sum(jnp.minimum(counts_RE.T[known_N], turn_N[:, None] + ahead_R), axis=1)
    rank_N = jnp.sum(jnp.cumsum(allotted_ER, axis=1)[known_N] <= place_N[:, None], axis=1, dtype=jnp.int32)
    return jnp.where(ids_N < num_experts, rank_N, num_ranks)


def _largest_first(load_J: Array, wanted: Array) -> Array:
    """How many pairs of each expert to take for `wanted` in all, from as few experts as can be."""
    order_J = jnp.argsort(-load_J)
    sorted_J = load_J[order_J]
    before_J = jnp.cumsum(sorted_J) - sorted_J
    return jnp.zeros_like(load_J).at[order_J].set(jnp.clip(wanted - before_J, 0, sorted_J))


def _position_in_group(ids_N: Array, num_groups: int) -> Array:
    """How many earlier pairs have the same expert."""
    groups = plan_groups(ids_N, num_groups)
    start_E = jnp.cumsum(groups.sizes_E) - groups.sizes_E
    return inverse(groups.order_N) - start_E[jnp.minimum(ids_N, num_groups - 1)]
