"""Bytes that training takes on one device, by kind and by formula, for accelerators.

Kinds: `master` float32 parameters; `momentum` optimizer moments; `gradients` float32, of the step and, with several
micro-batches, of the one under way; `weights` of one layer in the compute dtype, brought together from their shards;
`activations` kept for the backward pass; `buffers`: what lives for the length of one sublayer, of the loss or of an
update, largest first.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import ceil

import jax
import jax.numpy as jnp

from k3train.audit.params import bytes_per_device, local_size
from k3train.config.schema import Config
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.ops.attention import QUERY_BLOCK
from k3train.train.loss import token_loss

POLICIES = ("none", "attention_residuals", "sublayer", "block")
#: Positions of a chunk of the loss (ops/cross_entropy.py).
LOSS_CHUNK = 256


@dataclass(frozen=True)
class Budget:
    """Bytes of one device; `working` is the buffers one by one."""

    master: int
    momentum: int
    gradients: int
    weights: int
    activations: int
    working: dict[str, int]

    @property
    def buffers(self) -> int:
        """The update comes after the backward pass, and the loss lies between: they share their room."""
        return max(self.working.values(), default=0)

    @property
    def kinds(self) -> dict[str, int]:
        names = ("master", "momentum", "gradients", "weights", "activations", "buffers")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def budget(config: Config, activations: int = 0) -> Budget:
    """By formula, on the configured mesh.

    Args:
        activations: from `kept_bytes`; they do not depend on how a micro-batch is shared out, only on its rows.
    """
    held = bytes_per_device(config)
    return Budget(
        master=held["parameters"],
        momentum=held["optimizer"],
        gradients=held["gradients"] * (1 if config.data.micro_batches == 1 else 2),
        weights=_item(config) * max(_layers(config, whole=True).values(), default=0),
        activations=activations,
        working=working(config),
    )


def rows_per_device(config: Config) -> int:
    """Rows of a micro-batch on one device."""
    return max(1, config.data.batch_size // (config.mesh.data * config.mesh.expert * config.data.micro_batches))


def working(config: Config) -> dict[str, int]:
    """Bytes of what lives for a while, by what needs it."""
    model, mesh, item = config.model, config.mesh, _item(config)
    tokens, D = rows_per_device(config) * config.data.seq_len, model.hidden_size
    inner = model.kda_num_heads * model.kda_head_dim // mesh.tensor
    # queries, keys, values before and after the convolution, gate; decay, output and its gradient in float32
    kda = tokens * inner * (7 * item + 3 * 4) if model.kda_layers else 0
    heads = model.mla_num_heads // mesh.tensor
    channels = 2 * (model.mla_qk_nope_head_dim + model.mla_qk_rope_head_dim) + 2 * model.mla_v_head_dim
    block = min(QUERY_BLOCK, config.data.seq_len)
    mla = tokens * heads * (channels * item + model.mla_v_head_dim * 4) + 3 * 4 * heads * block * tokens
    vocab = ceil(model.vocab_size / mesh.tensor)
    largest = max((4 * local_size(info, mesh) for _, info in leaves(blueprint(model).infos)), default=0)
    return {
        "a KDA sublayer": kda,
        "an MLA sublayer": mla if model.mla_layers else 0,
        "routed experts: tokens, pairs, gradients of a layer's weights": _experts(config, tokens) + _gradients(config),
        # both come whole to every device in float32, and so do their gradients before they are added up
        "embedding and head": 4 * 4 * vocab * D,
        "loss: logits of a chunk and their gradient": rows_per_device(config) * LOSS_CHUNK * vocab * (4 + 4 + item),
        # momentum direction, two iterates and the update of the largest stack of matrices
        "update of the largest stack": 4 * largest,
    }


def _experts(config: Config, tokens: int) -> int:
    """Rows that one device computes, in the latent width and the inner width, forward and backward."""
    model, mesh, item = config.model, config.mesh, _item(config)
    if not model.moe_layers:
        return 0
    width, inner = model.moe_latent_size or model.hidden_size, model.moe_intermediate_size // mesh.tensor
    balanced = mesh.expert_balance != "none"
    pairs = tokens * model.num_experts_per_token * (1 if balanced else mesh.expert)
    gathered = 0 if balanced else mesh.expert * tokens * width * (item + 4)
    # own and fetched experts side by side, and the gradients of the fetched ones in float32
    matrices = 3 * width * inner * (model.num_experts // mesh.expert)
    foreign = matrices * (2 * item + 4) if balanced and mesh.expert > 1 else 0
    return pairs * item * (2 * width + 3 * inner) + gathered + foreign


def _gradients(config: Config) -> int:
    """Gradients of one layer's weights as long as they are not shared out again."""
    return _item(config) * max(_layers(config, whole=True).values(), default=0)


def _layers(config: Config, *, whole: bool) -> dict[str, int]:
    """Parameters of one layer of every stack on a device; `whole`: not split over data."""
    mesh = replace(config.mesh, data=1) if whole else config.mesh
    found: dict[str, int] = defaultdict(int)
    for path, info in leaves(blueprint(config.model).infos):
        if "layers" in info.axes:
            stack = "/".join(path.split("/")[:5])
            found[stack] += local_size(info, mesh) // info.shape[info.axes.index("layers")]
    return dict(found)


def kept_bytes(config: Config, policy: str) -> int:
    """Bytes per device that the forward pass of one micro-batch keeps for the backward pass under a remat policy.

    Counted from the model itself, traced with abstract values on one device: what `jax.vjp` keeps and grows with the
    length of the rows, so weights in the compute dtype are left out. Tensor parallelism is not subtracted. Where a
    policy keeps the inside of routed experts, their rows are added by formula, because the CPU's implementation keeps
    none of them.
    """
    rows, length = rows_per_device(config), config.data.seq_len
    half = max(length // 2, 1)
    slope = (_residuals(config, policy, rows, length) - _residuals(config, policy, rows, half)) / (length - half)
    inside = 0
    if policy in ("none", "attention_residuals"):
        model, item = config.model, _item(config)
        width, pairs = model.moe_latent_size or model.hidden_size, rows * length * model.num_experts_per_token
        row = (2 * width + 3 * model.moe_intermediate_size) * item
        inside = len(model.moe_layers) * pairs * row
    return int(slope * length) + inside


def _residuals(config: Config, policy: str, rows: int, length: int) -> int:
    plan = blueprint(replace(config.model, remat=policy))
    row = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    weights = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    batch = {"tokens": row, "segment_ids": row, "targets": row, "loss_mask": weights}

    def pull(params, bias, batch):
        return jax.vjp(lambda p: token_loss(plan, p, bias, batch, collect=True)[0].loss, params)[1]

    kept = jax.eval_shape(pull, plan.abstract_params, plan.abstract_bias, batch)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def _item(config: Config) -> int:
    return jnp.dtype(config.model.compute_dtype).itemsize
