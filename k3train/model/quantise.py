"""Quantisation in the loop: which weights are rounded in the forward pass, and how (docs/k3.md section 3.7).

Rounded weights take the place of the parameters for a whole step; the parameters, their gradients and moments stay in
full precision. What the routed experts multiply them with is rounded inside (`parallel/expert.py`).
"""

from collections.abc import Mapping
from functools import partial

import jax

from k3train.config.schema import QuantConfig
from k3train.core.axes import MX_BLOCK
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, leaves, map_leaves
from k3train.ops.mx import E2M1, E4M3, Rounding
from k3train.parallel.rules import RULES


def weight_rounding(quant: QuantConfig) -> Rounding | None:
    """How routed experts' weights are rounded; None: not at all."""
    if quant.experts == "none":
        return None
    return Rounding(E2M1, quant.weight_scale, quant.saturated_grad)


def input_rounding(quant: QuantConfig) -> Rounding | None:
    """How what they are multiplied with is rounded; None: not at all."""
    if quant.experts != "mxfp4_mxfp8":
        return None
    return Rounding(E4M3, quant.input_scale, quant.saturated_grad)


def rounded_params(params: Tree, infos: Tree, quant: QuantConfig) -> Tree:
    """The parameters with which the forward pass computes; gradients go straight through to those given.

    Args:
        params: nested dict of float32 arrays.
        infos: nested dict of `ParamInfo`, same keys.
    """
    rounding = weight_rounding(quant)
    if rounding is None:
        return params
    return map_leaves(lambda p, info: _round(p, rounding, input_axis(info)) if info.quantised else p, params, infos)


@partial(jax.jit, static_argnums=(1, 2))
def _round(weights: jax.Array, rounding: Rounding, axis: int) -> jax.Array:
    return rounding(weights, axis)


def input_axis(info: ParamInfo) -> int:
    """Place of the axis that blocks of a quantised parameter run along."""
    return info.axes.index(info.quantised)


def straddling(infos: Tree, quant: QuantConfig, sizes: Mapping[str, int]) -> list[str]:
    """One message per axis whose blocks would not lie whole on one device of a mesh of these sizes."""
    if quant.experts == "none":
        return []
    messages = set()
    for _, info in leaves(infos):
        if info.quantised:
            size, mesh_axis = info.shape[input_axis(info)], RULES[info.quantised]
            parts = sizes.get(mesh_axis, 1) if isinstance(mesh_axis, str) else 1
            if size % (MX_BLOCK * parts):
                messages.add(
                    f"{info.component}: {info.quantised} has {size} entries, "
                    f"no whole blocks of {MX_BLOCK} on each of mesh.{mesh_axis}={parts} devices"
                )
    return sorted(messages)


def described(infos: Tree, quant: QuantConfig) -> list[str]:
    """Everything that is rounded, and what is not, one line for each stack of layers, to be printed."""
    if quant.experts == "none":
        return ["quantised: nothing"]
    stacks: dict[str, list[str]] = {}
    for path, info in leaves(infos):
        if info.quantised:
            stack, name = path.rsplit("/", 1)
            stacks.setdefault(stack, []).append(f"{name} {list(info.shape)} along {info.quantised}")
    plain = sorted({info.component for _, info in leaves(infos) if not info.quantised})
    inputs = "as they are"
    if quant.experts == "mxfp4_mxfp8":
        inputs = f"in MXFP8 (E4M3, scale rule {quant.input_scale})"
    return [
        f"quantised in the forward pass: weights in MXFP4 (E2M1, scale rule {quant.weight_scale}), "
        f"what they are multiplied with {inputs}; {MX_BLOCK} numbers to a scale",
        *(f"  {stack}: {', '.join(names)}" for stack, names in stacks.items()),
        f"  not quantised: {', '.join(plain)}; parameters, gradients and moments of all",
    ]
