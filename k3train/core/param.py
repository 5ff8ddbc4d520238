"""Every parameter is made here: shape, logical axes, initialiser, optimizer route.

The metadata set here is all that the rest of the program knows about a parameter: sharding (`parallel/rules.py`),
optimizer group (`optim/groups.py`), released layout (`checkpoint/hf_names.py`), printed tables (`audit/params.py`).
No rule anywhere looks at a parameter's path, rank or size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.core.axes import PARAM_AXES

#: (key, shape) -> float32, every entry drawn alike; hashable, so that equal ones compile once
Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclass(frozen=True)
class Joint:
    """Part of what a release stores as one matrix: siblings of one `name` lie side by side along `axis`."""

    name: str
    axis: str


@dataclass(frozen=True)
class Muon:
    """Orthogonalise the matrix `rows` x `cols`; every axis not named is a batch of such matrices.

    `("embed",) x ("head_dim",)` on `[embed, heads, head_dim]` is Per-Head Muon (report section 2.5): one matrix a head.
    """

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    source: str  # where the assignment comes from: docs/k3.md section 3.2
    joint: Joint | None = None  # what it may be orthogonalised together with (`optim.muon_kv_b`)


@dataclass(frozen=True)
class AdamW:
    """AdamW; `decay` says whether decoupled weight decay applies."""

    decay: bool
    source: str


@dataclass(frozen=True)
class Frozen:
    """No optimizer touches it (reader of layer 0: docs/k3.md section 8, row 27)."""

    source: str


Route = Muon | AdamW | Frozen


@dataclass(frozen=True)
class Clip:
    """QK-clip (docs/k3.md section 3.3): rows of `axis` are scaled by gamma_head ** exponent after a step.

    `parts` are (length along `axis`, exponent) in order; they must add up to the axis.
    """

    axis: str
    parts: tuple[tuple[int, float], ...]
    head_axis: str = "heads"


@dataclass(frozen=True)
class ParamInfo:
    """What is known about one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    route: Route
    component: str  # row of the parameter table: "kda", "mla", "routed experts", ...
    clip: Clip | None = None
    quantised: str = ""  # of a routed-expert matrix, its input axis: MX blocks run along it (docs/k3.md section 3.7)

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)
        unknown = [a for a in self.axes if a not in PARAM_AXES]
        assert not unknown, f"unknown axis names {unknown}; known: {sorted(PARAM_AXES)}"
        assert len(set(self.axes)) == len(self.axes), f"axis named twice: {self.axes}"
        named = self.route.rows + self.route.cols if isinstance(self.route, Muon) else ()
        assert set(named) <= set(self.axes), f"route names {named} not among {self.axes}"
        assert not self.quantised or self.quantised in self.axes, (self.quantised, self.axes)
        if self.clip is not None:
            size = self.shape[self.axes.index(self.clip.axis)]
            assert sum(n for n, _ in self.clip.parts) == size, (self.clip, size)
            assert self.clip.head_axis in self.axes, (self.clip, self.axes)


#: sharding of a parameter by its metadata
Place = Callable[[ParamInfo], Any] | None


class RouterBias(nnx.Variable):
    """Selection bias of a router (float32 [layers, experts]): moved by quantile balancing, never by an optimizer."""


@dataclass(frozen=True)
class Maker:
    """Makes parameters; passed down the modules instead of a random key.

    Args:
        rngs: source of keys; None: only shapes and metadata matter, everything is zero.
        place: sharding of a parameter, by its metadata; None: wherever jax puts it.
        component: name under which the parameters are counted.
        stack: number of layers stacked on a leading axis `layers`; 0 for a parameter outside the layers.
    """

    rngs: nnx.Rngs | None = None
    place: Place = None
    component: str = ""
    stack: int = 0

    def at(self, component: str) -> "Maker":
        return replace(self, component=component)

    def stacked(self, num_layers: int) -> "Maker":
        return replace(self, stack=num_layers)

    def __call__(
        self,
        shape: Sequence[int],
        axes: Sequence[str],
        *,
        init: Initializer,
        route: Route,
        clip: Clip | None = None,
        quantised: str = "",
    ) -> nnx.Param:
        """A float32 parameter of `shape` (without the layer axis), drawn where it will live."""
        shape, axes = tuple(shape), tuple(axes)
        if self.stack:
            shape, axes = (self.stack, *shape), ("layers", *axes)
        info = ParamInfo(shape, axes, route, self.component, clip, quantised)
        if self.rngs is None:
            return nnx.Param(jnp.zeros(shape, jnp.float32), info=info)
        sharding = None if self.place is None else self.place(info)
        return nnx.Param(_draw(init, self.rngs.params(), shape, sharding), info=info)

    def router_bias(self, num_experts: int) -> RouterBias:
        return RouterBias(jnp.zeros((self.stack, num_experts), jnp.float32))


@dataclass(frozen=True)
class Normal:
    """Zero mean, standard deviation `std`."""

    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.std * jax.random.normal(key, shape, jnp.float32)


@dataclass(frozen=True)
class Uniform:
    """Between -bound and bound."""

    bound: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -self.bound, self.bound)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        del key
        return jnp.full(shape, self.value, jnp.float32)


#: Up to this many entries a parameter is drawn on the host's side and cut to shape; above, by a program of its own
#: straight into its shards.
_SMALL = 2**22


@cache
def _compiled(init: Initializer, shape: tuple[int, ...], sharding: Any) -> Callable[[jax.Array], jax.Array]:
    def draw(key):
        return init(key, shape).astype(jnp.float32)

    return jax.jit(draw) if sharding is None else jax.jit(draw, out_shardings=sharding)


def _draw(init: Initializer, key: jax.Array, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """The parameter, the same on every mesh.

    A program that draws random numbers compiles slowly, and a model has dozens of shapes. So small parameters share one
    program per power of two and are cut to shape as host arrays.
    """
    size = prod(shape)
    if size > _SMALL:
        return _compiled(init, shape, sharding)(key)
    if isinstance(init, Constant):
        host = np.full(shape, init.value, np.float32)
    else:
        unit, scale = init, 1.0
        if isinstance(init, Normal):
            unit, scale = Normal(1.0), init.std
        flat = _compiled(unit, (1 << max(10, (size - 1).bit_length()),), None)(key)
        host = np.float32(scale) * np.asarray(flat)[:size].reshape(shape)
    return jnp.asarray(host) if sharding is None else jax.make_array_from_callback(shape, sharding, lambda i: host[i])


def infos(model: Any) -> dict:
    """Nested dict of `ParamInfo`, same keys as the parameter tree of `model` (a module or its abstract form)."""
    state = nnx.state(model, nnx.Param)
    flat = {path: variable.get_metadata()["info"] for path, variable in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(flat)
