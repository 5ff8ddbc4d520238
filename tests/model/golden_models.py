"""Golden checkpoints through the real importer, and one decoder layer at a time."""

from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3train.checkpoint.hf_import import Imported, read_hf
from k3train.core.tree import Blueprint
from k3train.model.attn_res import Depth
from k3train.model.block import Layer
from k3train.model.layout import kinds, num_sources, slots
from k3train.model.moe import PLAIN_RUN
from k3train.parallel.mesh import make_mesh

DATA = Path(__file__).parents[1] / "data"


def io(name):
    """Arrays of a golden file."""
    with np.load(DATA / name / "io.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@cache
def imported(name) -> Imported:
    return read_hf(DATA / name, make_mesh({}, jax.devices()[:1]))


def compiled(function, *arguments):
    """The program for arguments like these. It runs once or twice, so its code is not optimised: that takes longer."""
    return jax.jit(function).lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})


class Seen(NamedTuple):
    """What one layer reads and writes."""

    attn_in: jax.Array
    attn_out: jax.Array
    mlp_in: jax.Array
    mlp_out: jax.Array
    layer_out: jax.Array  # the running prefix
    router_topk_idx: jax.Array | None  # sorted by expert
    router_topk_weight: jax.Array | None


def _read(layer, which, depth, valid):
    if layer.attn_res == "none":
        return depth.prefix
    if which == "mixer" and layer.kind.first:
        return depth.sources[0]
    return getattr(layer, f"{which}_reader")(depth, prefix_valid=valid)


def look_into(layer: Layer, depth: Depth, segment_ids, valid) -> tuple[Depth, Seen]:
    """One layer by its parts, as `Layer` puts them together; the logits of the whole model show that it does."""
    attn_in = _read(layer, "mixer", depth, valid)
    x, routes = layer.mixer_norm(attn_in), (None, None)
    attn_out = layer.mixer(x, segment_ids, *((None,) if layer.kind.mixer == "kda" else (None, None)))[0]
    after = depth.add(attn_out)
    mlp_in = _read(layer, "channel", after, True)
    x = layer.channel_norm(mlp_in)
    if layer.kind.channel == "moe":
        mlp_out, _ = layer.channel(x, segment_ids, collect=False)
        chosen, _ = layer.channel.router(x, segment_ids, collect=False)
        order = jnp.argsort(chosen.ids_PK, axis=-1)
        routes = tuple(jnp.take_along_axis(a, order, axis=-1) for a in (chosen.ids_PK, chosen.weights_PK))
    else:
        mlp_out = layer.channel(x)
    after = after.add(mlp_out)
    return after, Seen(attn_in, attn_out, mlp_in, mlp_out, after.prefix, *routes)


def every_layer(model: Imported, tokens) -> tuple[list[Seen], Depth]:
    """All layers of a model, one after the other; each kind of layer is compiled once."""
    config = model.config
    tokens = jnp.asarray(tokens)
    segment_ids = jnp.ones_like(tokens)
    embedded = jnp.where((tokens == config.pad_token_id)[..., None], 0, model.params["embed"]["table"][tokens])
    depth = Depth(jnp.zeros((num_sources(config), *embedded.shape)), jnp.int32(0), embedded)
    parts = {
        kind: Blueprint(lambda make, kind=kind: Layer(make.stacked(1), config, kind, PLAIN_RUN))
        for kind in kinds(config)
    }

    def look(kind, params, bias, depth, valid):
        return look_into(parts[kind].module(params, bias), depth, segment_ids, valid)

    programs, found = {}, []
    for number, (kind, slot) in enumerate(zip(kinds(config), slots(config), strict=True)):
        params, bias = (layer_arrays(tree, slot) for tree in (model.params, model.bias))
        starts = config.attn_res == "block" and number % config.attn_res_block_size == 0
        if starts:
            depth = jax.jit(Depth.push)(depth)
        args = params, bias, depth, jnp.asarray(not starts)
        programs[kind] = programs.get(kind) or compiled(partial(look, kind), *args)
        depth, seen = programs[kind](*args)
        found.append(seen)
    return found, depth


def layer_arrays(tree, slot):
    """Parameters of one layer, taken out of their stack."""
    for key in ("backbone", "runs", str(slot.run), str(slot.segment), str(slot.position)):
        tree = tree.get(key, {})
    return jax.tree.map(lambda x: x[slot.index], tree)
