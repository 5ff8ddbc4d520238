"""Rows sent between the ranks of the expert axis, in buffers of fixed size; three transports of one contract.

* `ragged`: one ragged exchange, exactly the rows there are (`lax.ragged_all_to_all`; not on CPU).
* `dense`: all-to-alls with a fixed budget of rows for each pair of ranks, repeated until everything has arrived: once
  where no pair has more than `BUDGET` times an even share.
* `budgeted`: a single such all-to-all. Who sends keeps to the budget (`within_budget`); the rest needs another way.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.parallel.mesh import AXES, axis_size

Array = jax.Array

TRANSPORTS = ("ragged", "dense", "budgeted")
#: Rows that two ranks exchange at once, over an even share. Below 1.5 so that buffers stay so.
BUDGET = 1.25


class Lanes(NamedTuple):
    """What leaves for each of the R ranks and what arrives from each, as pieces of two buffers of equal size."""

    out_start_R: Array  # int32: first row for each rank
    out_size_R: Array
    in_start_R: Array  # int32: where the rows of each rank arrive
    in_size_R: Array
    there_R: Array  # int32: where my rows arrive in each rank's buffer
    back_R: Array  # int32: where the rows that arrive here lie in each rank's buffer

    def reverse(self) -> "Lanes":
        """The way back."""
        return Lanes(
            self.in_start_R, self.in_size_R, self.out_start_R, self.out_size_R, self.back_R, self.there_R
        )  # fmt: skip


def default_transport() -> str:
    """The transport for the default backend."""
    return "dense" if jax.default_backend() == "cpu" else "ragged"


def budget(num_rows: int) -> int:
    """Rows that one rank sends another at once, of a buffer of `num_rows`."""
    return -int(-BUDGET * num_rows // axis_size("expert"))


def within_budget(size_RW: Array, num_rows: int) -> Array:
    """What of each rank's groups of rows [R, W], in order, one dense exchange carries."""
    before_RW = jnp.cumsum(size_RW, axis=1) - size_RW
    return jnp.clip(budget(num_rows) - before_RW, 0, size_RW)


def lanes(out_start_R: Array, out_size_R: Array, in_size_R: Array) -> Lanes:
    """Lanes of rows that arrive without gaps, in the order of their ranks."""
    in_start_R = jnp.cumsum(in_size_R) - in_size_R
    return Lanes(out_start_R, out_size_R, in_start_R, in_size_R, to_ranks(in_start_R), to_ranks(out_start_R))


def to_ranks(x_R: Array) -> Array:
    """Entry r goes to rank r: what each rank said of this one comes back."""
    return jax.lax.all_to_all(x_R, "expert", 0, 0, tiled=True)


def on_all_devices(count: Array) -> Array:
    """Trip count of a loop that holds collectives: every device goes round as often."""
    return jax.lax.pmax(count, AXES)


def exchange(rows_NL: Array, lanes: Lanes, transport: str) -> Array:
    """Rows sent along their lanes; places where nothing arrives are zero. The gradient goes back the same way.

    Args:
        rows_NL: buffer of this rank.
        lanes: pieces of it and of the result, both of N rows.
        transport: one of TRANSPORTS.
    """
    return _exchange(rows_NL, lanes, transport)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchange(rows_NL: Array, lanes: Lanes, transport: str) -> Array:
    if transport == "ragged":
        arguments = (lanes.out_start_R, lanes.out_size_R, lanes.there_R, lanes.in_size_R)
        return jax.lax.ragged_all_to_all(rows_NL, jnp.zeros_like(rows_NL), *arguments, axis_name="expert")
    num_rows = rows_NL.shape[0]
    place_C = jnp.arange(budget(num_rows), dtype=jnp.int32)

    def once(i: Array | int, arrived_NL: Array) -> Array:
        place_1C = (i * place_C.shape[0] + place_C)[None]
        sent = _piece(lanes.out_start_R, lanes.out_size_R, place_1C, num_rows)
        landed = _piece(lanes.in_start_R, lanes.in_size_R, place_1C, num_rows)
        rows_RCL = rows_NL.at[sent].get(mode="fill", fill_value=0)
        rows_RCL = jax.lax.all_to_all(rows_RCL, "expert", 0, 0, tiled=True)
        return arrived_NL.at[landed].set(rows_RCL, mode="drop")

    empty = jnp.zeros_like(rows_NL)
    if transport == "budgeted":
        return once(0, empty)
    rounds = on_all_devices((jnp.max(lanes.out_size_R) + place_C.shape[0] - 1) // place_C.shape[0])
    return jax.lax.fori_loop(0, rounds, once, empty)


def _piece(start_R: Array, size_R: Array, place_1C: Array, num_rows: int) -> Array:
    """Rows [R, C] of a buffer that hold these places of each rank's piece; `num_rows` where the piece has ended."""
    return jnp.where(place_1C < size_R[:, None], start_R[:, None] + place_1C, num_rows)


_exchange.defvjp(
    lambda rows_NL, lanes, transport: (_exchange(rows_NL, lanes, transport), lanes),
    lambda transport, lanes, dy_NL: (_exchange(dy_NL, lanes.reverse(), transport), None),
)
