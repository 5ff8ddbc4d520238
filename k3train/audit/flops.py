"""Floating-point operations per token, by formula (docs/k3.md section 1.8).

The compiler's own count is no substitute: it counts the body of a scan once. Operations of the algorithm are counted,
a multiply-add as two; padding, recomputation and masked-out pairs are not.
"""

from dataclasses import asdict, dataclass

from k3train.audit.params import count
from k3train.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class Flops:
    """Forward operations of one token."""

    weights: float  # products with parameters: two per activated parameter
    mla: float  # scores and values over the visible keys
    kda: float  # the recurrence
    attn_res: float  # the readers over depth

    @property
    def forward(self) -> float:
        return self.weights + self.mla + self.kda + self.attn_res

    @property
    def training(self) -> float:
        """Forward and backward: a backward pass is two products for each one of the forward pass."""
        return 3 * self.forward


def per_token(config: Config) -> Flops:
    """Average over a row of `data.seq_len` tokens that is one document; shorter documents see fewer keys."""
    model = config.model
    return Flops(
        weights=2.0 * count(config).activated,
        mla=_mla_pair(model) * (config.data.seq_len + 1) / 2,
        kda=_kda_token(model),
        attn_res=_readers_token(model),
    )


def decode(config: Config, context: int) -> Flops:
    """One more token after `context` others: recurrent KDA, and MLA on the latents themselves."""
    model = config.model
    H, R, P = model.mla_num_heads, model.mla_kv_lora_rank, model.mla_qk_rope_head_dim
    # absorbed: whole cached rows are scored against, and mixed (ops/attention.py drops the extra key afterwards)
    pair = 2.0 * H * 2 * (R + P) * len(model.mla_layers)
    return Flops(
        weights=2.0 * count(config).activated,
        mla=pair * (context + 1),
        kda=_kda_recurrent_token(model),
        attn_res=_readers_token(model),
    )


def _mla_pair(model: ModelConfig) -> float:
    """Operations of one (query, visible key) in all MLA layers."""
    channels = model.mla_qk_nope_head_dim + model.mla_qk_rope_head_dim + model.mla_v_head_dim
    return 2.0 * model.mla_num_heads * channels * len(model.mla_layers)


def _kda_token(model: ModelConfig) -> float:
    """Chunked form: in the chunk three products over keys and two over values, with the state three."""
    K = V = model.kda_head_dim
    C = model.kda_chunk_size
    return 2.0 * model.kda_num_heads * (C * (3 * K + 2 * V) + 3 * K * V) * len(model.kda_layers)


def _kda_recurrent_token(model: ModelConfig) -> float:
    """Token by token: one product for the decay, one multiply-add each for recall, write and read."""
    return 7.0 * model.kda_num_heads * model.kda_head_dim**2 * len(model.kda_layers)


def _readers_token(model: ModelConfig) -> float:
    """Score, sum of squares and mix of every source that a reader sees, three multiply-adds a channel."""
    return 6.0 * model.hidden_size * source_reads(model)


def source_reads(model: ModelConfig) -> int:
    """Sources read per token by all attention-residual readers, the running sum included (docs/k3.md section 1.5)."""
    layers = range(model.num_layers)
    if model.attn_res == "none":
        return 0
    if model.attn_res == "full":  # reader j sees the embedding and j outputs; the first has nothing to choose from
        return sum(range(2, 2 * model.num_layers + 2))
    size = model.attn_res_block_size
    mixers = sum(1 + -(-layer // size) for layer in layers if layer)
    channels = sum(2 + layer // size for layer in layers)
    return mixers + channels + 1 + -(-model.num_layers // size)


def report(config: Config) -> dict[str, float]:
    """What `k3train plan --json` prints about operations."""
    flops = per_token(config)
    return {**asdict(flops), "forward": flops.forward, "training": flops.training}


def text(config: Config) -> str:
    """`per_token` for people."""
    flops = per_token(config)
    parts = ", ".join(f"{name} {value / 1e9:,.3g}" for name, value in asdict(flops).items() if value)
    return (
        f"GFLOP a token in rows of {config.data.seq_len:,}: forward {flops.forward / 1e9:,.4g} ({parts}), "
        f"training {flops.training / 1e9:,.4g}"
    )
