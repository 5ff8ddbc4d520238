"""The one legend: letters for array axes in code, and logical axis names of parameters and activations.

Letters (suffix of a local array, capital letters of an einsum):

    B batch rows      S query positions    T key positions       D embed (stream width)
    H heads           K key/query channel  V value channel       R low rank
    F inner width     E experts            L latent width        C chunk position
    N stack of layers Q micro-batches      X vocabulary          P flat tokens (B x S)

Logical names say what an axis *is*. `parallel/rules.py` says which mesh axis splits it, `optim/groups.py` reads the
optimizer's matrix views from them, `checkpoint/hf_names.py` the layout of released tensors.
"""

from typing import Final

#: Numbers that share one scale in the MX formats, along the input axis of a matrix (docs/k3.md section 3.7).
MX_BLOCK: Final = 32

#: Parameter axes. The value is what the axis counts.
PARAM_AXES: Final[dict[str, str]] = {
    "layers": "stacked layers of one kind (scanned)",
    "embed": "residual stream width",
    "vocab": "token ids",
    "heads": "attention heads",
    "qkv": "query, key, value: three projections of one shape side by side",
    "head_dim": "channels of one head",
    "rank": "low-rank bottleneck, as the output of a projection",
    "rank_in": "low-rank bottleneck, as the input of a projection",
    "mlp": "inner width of a dense or shared MLP",
    "latent": "latent width of LatentMoE, outside the experts",
    "experts": "routed experts",
    "expert_in": "input or output width of a routed expert (latent or stream)",
    "expert_mlp": "inner width of a routed expert",
    "router_experts": "one router score per routed expert",
    "conv_tap": "taps of the short convolution, last tap = current token",
    "norm": "gain of a normalisation, one per normalised channel",
}

#: Activation axes. Kept apart from parameter axes because they are split differently.
ACTIVATION_AXES: Final[dict[str, str]] = {
    "act_batch": "rows of the batch",
    "act_seq": "positions in a row",
    "act_embed": "residual stream width",
    "act_heads": "attention heads",
    "act_mlp": "inner width of an MLP",
    "act_vocab": "token ids",
}
