"""Routed experts on any mesh: which device computes which pair, and how tokens get there and back.

Tokens are split over `data` and `expert`, experts over `expert`, their inner width over `tensor` (parallel/rules.py).
Nothing is dropped, so every mesh computes what one device computes. Who computes a pair is the choice of `Sharing`:

* `equal`: every device computes as many pairs as any other, some with experts fetched from another (balanced.py).
* `none`: the tokens of the expert axis are gathered on each of its devices, every device computes the pairs of its own
  experts, however many these are, and the float32 sums are scattered back.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3train.ops.grouped_matmul import Activation, expert_mlp, plan_groups
from k3train.ops.mx import Rounding
from k3train.ops.routing import Routes, route
from k3train.parallel.balanced import balanced_experts
from k3train.parallel.exchange import TRANSPORTS, default_transport
from k3train.parallel.mesh import BATCH_AXES, axis_size, current_mesh
from k3train.parallel.rules import spec

Array = jax.Array
BALANCES = ("equal", "none")


class Sharing(NamedTuple):
    """How pairs are shared out over the expert axis (config `mesh.expert_balance`, `mesh.expert_transport`)."""

    balance: str = "none"
    transport: str = "auto"  # of exchange.TRANSPORTS, or by backend

    def chosen_transport(self) -> str:
        """The transport with `auto` decided."""
        return default_transport() if self.transport == "auto" else self.transport

    def described(self) -> str:
        """One line, to be printed."""
        if self.balance == "none":
            return "routed experts: every device computes the pairs of its own"
        how = "chosen by backend" if self.transport == "auto" else "as configured"
        transport = f"{self.chosen_transport()} exchange, {how}"
        return f"routed experts: every device computes as many pairs as any other ({transport})"


PLAIN = Sharing()


def routed_experts(
    x_BSL: Array,
    ids_BSK: Array,
    weights_BSK: Array,
    w1_ELF: Array,
    w3_ELF: Array,
    w2_EFL: Array,
    *,
    activation: Activation,
    implementation: str | None = None,
    rounding: Rounding | None = None,
    sharing: Sharing = PLAIN,
) -> Array:
    """Weighted sum of the chosen experts' outputs (docs/k3.md section 2.5, steps 3 and 4).

    Args:
        x_BSL: what the experts read (the latent), in the compute dtype.
        ids_BSK: int32 chosen experts; E or above computes nothing (padding).
        weights_BSK: float32 combine weights.
        w1_ELF, w3_ELF, w2_EFL: gate, up and down matrices of all experts, in the compute dtype.
        activation: function of (gate, up); hashable, no arrays inside.
        implementation: of ops/grouped_matmul.py; default by backend.
        rounding: of what the matrices are multiplied with, tokens and activated, each along its width; its blocks lie
            whole on one device.
        sharing: who computes what on a mesh.

    Returns:
        float32 [B, S, L], the same on any mesh up to rounding.

    Raises:
        ValueError: unknown balance or transport.
    """
    if sharing.balance not in BALANCES or sharing.chosen_transport() not in TRANSPORTS:
        raise ValueError(f"{sharing}: balance is one of {', '.join(BALANCES)}, transport of {', '.join(TRANSPORTS)}")
    if rounding is not None:  # tokens before they are sent around, each once
        x_BSL, activation = rounding(x_BSL), _rounded(activation, rounding)
    how = {"activation": activation, "implementation": implementation}
    compute = partial(_own_experts, **how)
    mesh = current_mesh()
    if mesh.size <= 1:
        return compute(x_BSL, ids_BSK, weights_BSK, w1_ELF, w3_ELF, w2_EFL)

    def equal(x, ids, weights, *matrices):
        flat = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
        return balanced_experts(*flat, *matrices, **how, transport=sharing.chosen_transport()).reshape(x.shape)

    def own(x, ids, weights, *matrices):
        held = matrices[0].shape[0]
        first = jax.lax.axis_index("expert") * held
        x, ids, weights = (_gather(a, "expert", axis=0) for a in (x, ids, weights))
        own_ids = jnp.where((ids >= first) & (ids < first + held), ids - first, held)
        out = compute(x, own_ids, weights, *matrices)
        return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)

    def on_device(x, ids, weights, w1, w3, w2):
        # Parameters arrive in their FSDP shards; gathering here makes the gradient a reduce-scatter.
        w1, w3 = (_gather(w, "data", axis=1) for w in (w1, w3))
        w2 = _gather(w2, "data", axis=2)
        here = compute if axis_size("expert") == 1 else equal if sharing.balance == "equal" else own
        out = here(x, ids, weights, w1, w3, w2)
        return jax.lax.psum(out, "tensor") if axis_size("tensor") > 1 else out

    num_rows = x_BSL.shape[0]
    tokens = [_pad_rows(a, fill) for a, fill in ((x_BSL, 0), (ids_BSK, w1_ELF.shape[0]), (weights_BSK, 0))]
    into, out_of = spec(("experts", "expert_in", "expert_mlp")), spec(("experts", "expert_mlp", "expert_in"))
    in_specs = (_ROWS, _ROWS, _ROWS, into, into, out_of)
    sharded = jax.shard_map(on_device, in_specs=in_specs, out_specs=_ROWS, check_vma=False)
    return sharded(*tokens, w1_ELF, w3_ELF, w2_EFL)[:num_rows]


def route_tokens(logits_BSE: Array, bias_E: Array, **kwargs: Any) -> Routes:
    """`ops.routing.route`, every device ranking its own tokens.

    Left to the partitioner, `lax.top_k` would gather the scores of all devices on each of them.
    """
    if current_mesh().size <= 1:
        return route(logits_BSE, bias_E, **kwargs)
    bias_E = jax.lax.stop_gradient(bias_E)
    sharded = jax.shard_map(partial(route, **kwargs), in_specs=(_ROWS, PartitionSpec()), out_specs=_ROWS)
    routes = sharded(_pad_rows(logits_BSE, 0), bias_E)
    return jax.tree.map(lambda a: a[: logits_BSE.shape[0]], routes)


def _rounded(activation: Activation, rounding: Rounding) -> Activation:
    return lambda gate, up: rounding(activation(gate, up))


_ROWS = PartitionSpec(BATCH_AXES)  # leading axis of everything that belongs to tokens


def _gather(x: Array, mesh_axis: str, axis: int) -> Array:
    """The pieces of all devices of a mesh axis; an axis of one device costs no exchange."""
    return jax.lax.all_gather(x, mesh_axis, axis=axis, tiled=True) if axis_size(mesh_axis) > 1 else x


def _own_experts(x_BSL, ids_BSK, weights_BSK, w1_ELF, w3_ELF, w2_EFL, *, activation, implementation):
    """The pairs whose experts are held here: one device's work."""
    num_experts, _, _ = w1_ELF.shape
    x_PL = x_BSL.reshape(-1, x_BSL.shape[-1])
    ids_PK, weights_PK = (a.reshape(-1, a.shape[-1]) for a in (ids_BSK, weights_BSK))
    plan = plan_groups(ids_PK, num_experts)
    y_PL = expert_mlp(
        x_PL,
        weights_PK,
        plan,
        w1_ELF,
        w3_ELF,
        w2_EFL,
        activation=activation,
        implementation=implementation,
        expected_pairs=ids_PK.size // axis_size("expert"),
    )
    return y_PL.reshape(*x_BSL.shape[:-1], y_PL.shape[-1])


def _pad_rows(x: Array, fill: int) -> Array:
    """Rows added until the batch axes divide them: a lone prompt on eight devices, say."""
    sizes = dict(current_mesh().shape)
    missing = -x.shape[0] % (sizes["data"] * sizes["expert"])
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill) if missing else x
