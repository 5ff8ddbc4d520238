"""The one training step: loss, gradients, optimizer, QK-clip, router bias. Everything compiled lives in `Program`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.config.schema import Config
from k3train.core.tree import Tree
from k3train.model.backbone import Nested
from k3train.model.k3 import blueprint
from k3train.model.moe import MoERun
from k3train.model.quantise import input_rounding, rounded_params
from k3train.optim import build
from k3train.parallel.expert import Sharing
from k3train.parallel.hosts import Together
from k3train.parallel.mesh import use_mesh
from k3train.parallel.rules import param_sharding, param_shardings, spec
from k3train.train import balance, layer_stats
from k3train.train.layer_stats import Metrics
from k3train.train.loss import Batch, Sums, token_loss
from k3train.train.state import TrainState


class Program:
    """A config on a mesh: the compiled functions of a run and the shardings of its state.

    Args:
        config: the whole run.
        mesh: from `parallel.mesh.make_mesh`.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.sharing = Sharing(config.mesh.expert_balance, config.mesh.expert_transport)
        moe = MoERun(balance.margins(config.optim), input_rounding(config.quant), self.sharing)
        self.blueprint = blueprint(config.model, moe)
        self.optimizer = build.build(config.optim, self.blueprint.infos, config.num_steps)
        self.batch_sharding = NamedSharding(mesh, spec(("act_batch", "act_seq")))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._shardings = self._state_shardings()
        self._init_optimizer = jax.jit(self.optimizer.init, out_shardings=self._shardings.opt_state)
        self._train = jax.jit(self._train_step, donate_argnums=0, out_shardings=(self._shardings, self._everywhere))
        self._run_train = Together(self._train, "training step")
        self._run_eval = Together(jax.jit(self._eval_step, out_shardings=self._everywhere), "evaluation step")

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
        """One optimizer step; `state` is donated. Metrics stay on the device (names: train/metrics.py)."""
        with use_mesh(self.mesh):
            return self._run_train(state, batch)

    def lower(self, batch: Tree) -> jax.stages.Lowered:
        """The training step for batches of these shapes (ShapeDtypeStruct), lowered; nothing is allocated."""
        with use_mesh(self.mesh):
            return self._train.lower(self.abstract_state, batch)

    def eval_step(self, params: Tree, bias: Tree, batch: Batch) -> dict[str, jax.Array]:
        """Loss sum and token count of a held-out batch; changes nothing."""
        with use_mesh(self.mesh):
            return self._run_eval(params, bias, batch)

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
        batch = dict(batch)
        asked = batch.pop("stop", None)  # rows of 1 from a process that was asked to stop: all stop at the same step
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

        max_logits = layer_stats.max_logits(self.blueprint.infos, stats)
        updates, new_opt_state = self.optimizer.update(grads, state.opt_state, state.params, max_logits=max_logits)
        bias = balance.balanced(self.config.optim, state.bias, stats, self.config.model.num_experts_per_token)

        # a non-finite step is skipped as if it had not happened; only the batch is consumed
        kept = (state.params, state.opt_state, state.bias)
        moved = (optax.apply_updates(state.params, updates), new_opt_state, bias)
        params, opt_state, bias = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, kept)
        skipped = 1 - finite.astype(jnp.int32)
        state = TrainState(
            params, opt_state, bias, state.step + 1, state.nonfinite + skipped, (state.nonfinite_streak + 1) * skipped
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": build.learning_rate(self.config.optim, self.config.num_steps, new_opt_state),
            "qk_clip/num_clipped": build.num_clipped(new_opt_state) * finite,
            "nonfinite_steps": state.nonfinite,
            "nonfinite_streak": state.nonfinite_streak,
            "tokens": sums.tokens,
            **({} if asked is None else {"stop": jnp.max(asked)}),
            **layer_stats.metrics(self.config.model, stats, jnp.sum(batch["segment_ids"] > 0)),
        }
        return state, metrics

    def _gradients(self, state: TrainState, batch: Batch) -> tuple[Tree, Sums, Nested]:
        """Gradient of the loss sum, sums and layer statistics over all micro-batches."""

        def loss(params, part):
            sums, stats = token_loss(self.blueprint, params, state.bias, part, collect=True)
            return sums.loss, (sums, stats)

        # rounded once for the whole step; the rounding's gradient comes last, in full precision
        weights, pull = jax.vjp(self._rounded, state.params)
        gradient = jax.grad(loss, has_aux=True)
        parts = self.config.data.micro_batches
        if parts == 1:
            grads, (sums, stats) = gradient(weights, batch)
            return pull(self._sharded_like_params(grads))[0], sums, stats

        # row r goes to micro-batch r mod parts, so that every device keeps its own rows
        split = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)

        def accumulate(total, part):
            grads, (sums, stats) = gradient(weights, part)
            added = jax.tree.map(jnp.add, total[:2], (self._sharded_like_params(grads), sums))
            return (*added, layer_stats.add(total[2], stats)), layer_stats.margins(stats)

        grads, (sums, stats) = jax.eval_shape(gradient, weights, jax.tree.map(lambda x: x[0], split))
        grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, sums))
        (grads, sums, stats), margins = jax.lax.scan(accumulate, (grads, sums, layer_stats.empty(stats)), split)
        return pull(grads)[0], sums, layer_stats.with_margins(stats, margins)

    def _rounded(self, params: Tree) -> Tree:
        """Parameters as the forward pass sees them."""
        if self.config.quant.experts == "none":
            return params
        return self._sharded_like_params(rounded_params(params, self.blueprint.infos, self.config.quant))

    def _sharded_like_params(self, grads: Tree) -> Tree:
        return jax.lax.with_sharding_constraint(grads, self._shardings.params)

    def _eval_step(self, params: Tree, bias: Tree, batch: Batch) -> dict[str, jax.Array]:
        sums, _ = token_loss(self.blueprint, self._rounded(params), bias, batch, collect=False)
        return {"loss_sum": sums.loss, "tokens": sums.tokens}
