"""The one training step: loss, gradients, optimizer, QK-clip, router bias. Everything compiled lives in `Program`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.config.schema import Config
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, map_leaves
from k3train.model.backbone import Nested
from k3train.model.block import LayerStats
from k3train.model.k3 import blueprint
from k3train.ops import quantile
from k3train.optim import build
from k3train.parallel.mesh import use_mesh
from k3train.parallel.rules import param_sharding, param_shardings, spec
from k3train.train.loss import Batch, Sums, token_loss
from k3train.train.state import TrainState

Metrics = dict[str, jax.Array]


class Program:
    """A config on a mesh: the compiled functions of a run and the shardings of its state.

    Args:
        config: the whole run.
        mesh: from `parallel.mesh.make_mesh`.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.blueprint = blueprint(config.model, config.optim.balance_bins)
        self.optimizer = build.build(config.optim, self.blueprint.infos, config.num_steps)
        self.batch_sharding = NamedSharding(mesh, spec(("act_batch", "act_seq")))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._shardings = self._state_shardings()
        self._init_optimizer = jax.jit(self.optimizer.init, out_shardings=self._shardings.opt_state)
        self._train = jax.jit(self._train_step, donate_argnums=0, out_shardings=(self._shardings, None))
        self._eval = jax.jit(self._eval_step)

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        params = self.blueprint.abstract_params
        zero: Any = jax.ShapeDtypeStruct((), jnp.int32)
        opt_state = jax.eval_shape(self.optimizer.init, params)
        shapes = TrainState(params, opt_state, self.blueprint.abstract_bias, zero, zero, zero)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, self._shardings
        )

    def init(self) -> TrainState:
        """Fresh state from `config.seed`, created on its devices."""
        with use_mesh(self.mesh):
            params, bias = self.blueprint.init(self.config.seed, lambda info: param_sharding(info, self.mesh))
            opt_state = self._init_optimizer(params)
            bias, zeros = jax.device_put((bias, [jnp.zeros((), jnp.int32)] * 3), self._everywhere)
            return TrainState(params, opt_state, bias, *map(jnp.copy, zeros))

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step; `state` is donated. Metrics are device scalars (names: train/metrics.py)."""
        with use_mesh(self.mesh):
            return self._train(state, batch)

    def eval_step(self, params: Tree, bias: Tree, batch: Batch) -> dict[str, jax.Array]:
        """Loss sum and token count of a held-out batch; changes nothing."""
        with use_mesh(self.mesh):
            return self._eval(params, bias, batch)

    def put_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """This process's rows in, global arrays out."""
        return {name: jax.make_array_from_process_local_data(self.batch_sharding, rows) for name, rows in batch.items()}

    # ---- traced from here on

    def _state_shardings(self) -> TrainState:
        everywhere: Any = self._everywhere
        params = param_shardings(self.blueprint.infos, self.mesh)
        opt_state = jax.eval_shape(self.optimizer.init, self.blueprint.abstract_params)
        opt_state = build.state_shardings(self.config.optim, self.blueprint.infos, opt_state, params, everywhere)
        bias = jax.tree.map(lambda _: everywhere, self.blueprint.abstract_bias)
        return TrainState(params, opt_state, bias, everywhere, everywhere, everywhere)

    def _train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums, stats = self._gradients(state, batch)
        # one mean over all trained tokens of the step, whatever the micro-batches and devices
        count = jnp.maximum(sums.tokens, 1.0)
        loss = sums.loss / count
        grads = jax.tree.map(lambda g: g / count, grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if self.config.optim.grad_clip:
            factor = jnp.minimum(1.0, self.config.optim.grad_clip / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor, grads)

        max_logits = _max_logits(self.blueprint.infos, stats)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, max_logits=max_logits)
        bias = state.bias
        if self.config.optim.balance == "quantile":
            bias = _balanced(state.bias, stats, self.config.model.num_experts_per_token)

        # a non-finite step is skipped as if it had not happened; only the batch is consumed
        kept = (state.params, state.opt_state, state.bias)
        moved = (optax.apply_updates(state.params, updates), opt_state, bias)
        params, opt_state, bias = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, kept)
        skipped = 1 - finite.astype(jnp.int32)
        state = TrainState(
            params, opt_state, bias, state.step + 1, state.nonfinite + skipped, (state.nonfinite_streak + 1) * skipped
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": build.learning_rate(self.config.optim, self.config.num_steps, opt_state),
            "qk_clip/num_clipped": build.num_clipped(opt_state),
            "nonfinite_steps": state.nonfinite,
            "nonfinite_streak": state.nonfinite_streak,
            "tokens": sums.tokens,
            **self._layer_metrics(stats, batch),
        }
        return state, metrics

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Tree, Sums, Nested]:
        """Gradient of the loss sum, sums and layer statistics over all micro-batches."""

        def loss(params, part):
            sums, stats = token_loss(self.blueprint, params, state.bias, part, collect=True)
            return sums.loss, (sums, stats)

        gradient = jax.grad(loss, has_aux=True)
        parts = self.config.data.micro_batches
        if parts == 1:
            grads, (sums, stats) = gradient(state.params, batch)
            return self._sharded_like_params(grads), sums, stats

        # row r goes to micro-batch r mod parts, so that every device keeps its own rows
        split = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)

        def accumulate(total, part):
            grads, (sums, stats) = gradient(state.params, part)
            added = jax.tree.map(jnp.add, total[:2], (self._sharded_like_params(grads), sums))
            return (*added, jax.tree.map(_merge_stats, total[2], stats, is_leaf=_is_stats)), None

        shapes = jax.eval_shape(gradient, state.params, jax.tree.map(lambda x: x[0], split))
        grads, (sums, stats) = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        stats = jax.tree.map(_empty_stats, stats, is_leaf=_is_stats)
        (grads, sums, stats), _ = jax.lax.scan(accumulate, (grads, sums, stats), split)
        return grads, sums, stats

    def _sharded_like_params(self, grads: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(grads, self._shardings.params)

    def _layer_metrics(self, stats: Nested, batch: Batch) -> Metrics:
        layers = [stat for run in stats for segment in run for stat in segment]
        metrics: Metrics = {}
        routers = [stat.router for stat in layers if stat.router is not None]
        if routers:
            loads = jnp.concatenate([router.load for router in routers])
            tokens = jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32)
            wanted = tokens * loads.shape[0] * self.config.model.num_experts_per_token
            worst = {name: jnp.max(value) for name, value in quantile.load_metrics(loads).items()}
            metrics["router/max_over_mean_load"] = worst["max_over_mean"]
            metrics["router/max_violation"] = worst["max_violation"]
            metrics["router/dropped_fraction"] = 1.0 - jnp.sum(loads, dtype=jnp.float32) / jnp.maximum(wanted, 1.0)
        logits = [jnp.max(stat.max_logit) for stat in layers if stat.max_logit is not None]
        if logits:
            metrics["mla/max_logit"] = jnp.max(jnp.stack(logits))
        return metrics

    def _eval_step(self, params: Tree, bias: Tree, batch: Batch) -> dict[str, jax.Array]:
        sums, _ = token_loss(self.blueprint, params, bias, batch, collect=False)
        return {"loss_sum": sums.loss, "tokens": sums.tokens}


def _is_stats(x: Any) -> bool:
    return isinstance(x, LayerStats)


def _merge_stats(a: LayerStats, b: LayerStats) -> LayerStats:
    """Counts add up, largest logits take the larger."""
    router = None if a.router is None or b.router is None else jax.tree.map(jnp.add, a.router, b.router)
    logit = None if a.max_logit is None or b.max_logit is None else jnp.maximum(a.max_logit, b.max_logit)
    return LayerStats(router, logit)


def _empty_stats(stats: LayerStats) -> LayerStats:
    """The neutral element of `_merge_stats`."""
    return stats._replace(max_logit=None if stats.max_logit is None else jnp.full_like(stats.max_logit, -jnp.inf))


def _layer_trees(tree: Tree, stats: Nested):
    """(subtree of `tree`, statistics) of every stack of layers."""
    for r, run in enumerate(stats):
        for s, segment in enumerate(run):
            for p, stat in enumerate(segment):
                layer = tree["backbone"]["runs"]
                for index in (r, s, p):  # the bias tree has no entry where no layer has a router
                    layer = layer.get(str(index), {})
                yield layer, stat


def _max_logits(infos: Tree, stats: Nested) -> Tree:
    """Tree like the parameters: [layers, heads] at every leaf that QK-clip acts on, None elsewhere."""
    tree = map_leaves(lambda _: None, infos)
    for (layer, stat), (known, _) in zip(_layer_trees(tree, stats), _layer_trees(infos, stats), strict=True):
        for name, info in known["mixer"].items():
            if isinstance(info, ParamInfo) and info.clip is not None:
                layer["mixer"][name] = stat.max_logit
    return tree


def _balanced(bias: Tree, stats: Nested, num_selected: int) -> Tree:
    """Next router biases from the pooled histograms (docs/k3.md section 3.1)."""
    new = map_leaves(lambda b: b, bias)
    if not new:  # no layer has a router
        return new
    update = jax.vmap(lambda counts, b: quantile.quantile_bias(counts, b, num_selected=num_selected))
    for layer, stat in _layer_trees(new, stats):
        if stat.router is not None:
            router = layer["channel"]["router"]
            router["bias"] = update(stat.router.histogram, router["bias"])
    return new
