"""Plain nested dicts in and out of nnx modules. The rest of the program never touches nnx state."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from k3train.core.param import Maker, Place, RouterBias, infos

Tree = dict[str, Any]


def _with_string_keys(tree: Any) -> Any:
    return {str(k): _with_string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _like(template: Any, tree: Any) -> Any:
    """`tree` with the (integer) keys of `template`."""
    if not isinstance(template, dict):
        return tree
    return {k: _like(v, tree[str(k)]) for k, v in template.items()}


class Blueprint:
    """A module taken apart: how to build it, what its parameters are, how to put arrays back in.

    Args:
        build: makes the nnx module with a `Maker`. Nothing is allocated here.
    """

    def __init__(self, build: Callable[[Maker], nnx.Module]):
        self._build = build
        abstract = nnx.eval_shape(lambda: build(Maker()))
        self._graph, self._params, self._bias = nnx.split(abstract, nnx.Param, RouterBias)
        self.infos: Tree = _with_string_keys(infos(abstract))
        self.abstract_params: Tree = _with_string_keys(nnx.to_pure_dict(self._params))
        self.abstract_bias: Tree = _with_string_keys(nnx.to_pure_dict(self._bias))

    def init(self, seed: int, place: Place = None) -> tuple[Tree, Tree]:
        """Fresh (parameters, router bias), each parameter created with the sharding that `place` gives it."""
        _, params, bias = nnx.split(self._build(Maker(nnx.Rngs(seed), place)), nnx.Param, RouterBias)
        return _with_string_keys(nnx.to_pure_dict(params)), _with_string_keys(nnx.to_pure_dict(bias))

    def module(self, params: Tree, bias: Tree) -> Any:
        """The module holding these arrays (or tracers)."""

        def fill(state, tree):
            state = jax.tree.map(lambda leaf: leaf, state)  # a fresh copy: replace works in place
            nnx.replace_by_pure_dict(state, _like(nnx.to_pure_dict(state), tree))
            return state

        return nnx.merge(self._graph, fill(self._params, params), fill(self._bias, bias))


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path with slashes, leaf) in sorted order of the keys; a leaf is anything that is not a dict."""
    for key in sorted(tree, key=lambda k: (len(k), k) if k.isdigit() else (0, k)):
        path = f"{prefix}{key}"
        if isinstance(tree[key], dict):
            yield from leaves(tree[key], path + "/")
        else:
            yield path, tree[key]


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`function(leaf, *other leaves)` over nested dicts; leaves may be any object, `None` included."""
    return {
        key: map_leaves(function, value, *(r[key] for r in rest))
        if isinstance(value, dict)
        else function(value, *(r[key] for r in rest))
        for key, value in tree.items()
    }
