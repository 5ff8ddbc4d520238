"""Every knob: name, default, meaning, source. Nothing past `config/` sees anything but these frozen dataclasses.

Sources: `[config]`, `[report]`, `[official code]` are confirmed for K3; `[lineage]` comes from an ancestor;
`our choice` is ours because K3's value is undisclosed or does not exist. Sections refer to `docs/k3.md`.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

OURS = "our choice"


def knob(default: Any, doc: str, source: str = OURS, choices: tuple[str, ...] = ()) -> Any:
    """A field with its meaning, the source of its default and, for a kind, the closed set of values."""
    return field(default=default, metadata={"doc": doc, "source": source, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture. The defaults are the small model of configs/tiny.py; docs/k3.md section 1.2."""

    vocab_size: int = knob(256, "rows of the embedding table and of the output head")
    pad_token_id: int = knob(-1, "id whose embedding row stays zero and gets no gradient; -1: none")
    hidden_size: int = knob(128, "width of the residual stream")
    num_layers: int = knob(8, "decoder layers")
    kda_layers: tuple[int, ...] = knob((0, 1, 2, 4, 5, 6), "0-based layers whose token mixer is KDA")
    mla_layers: tuple[int, ...] = knob((3, 7), "0-based layers whose token mixer is MLA")
    dense_layers: tuple[int, ...] = knob((0,), "0-based layers whose channel mixer is a dense MLP")
    moe_layers: tuple[int, ...] = knob((1, 2, 3, 4, 5, 6, 7), "0-based layers whose channel mixer is a MoE")
    rms_norm_eps: float = knob(1e-5, "epsilon of every RMSNorm but MLA's latent norms", "[config]")
    activation: str = knob("situ", "gated activation of every MLP", "[config]", ("situ", "swiglu"))
    situ_beta: float = knob(4.0, "SiTU cap of the gate branch (beta1)", "[config]")
    situ_linear_beta: float = knob(25.0, "SiTU cap of the up branch (beta2)", "[config]")
    intermediate_size: int = knob(512, "inner width of the dense MLP")

    kda_num_heads: int = knob(4, "KDA heads")
    kda_head_dim: int = knob(32, "channels of a KDA head, keys and values alike")
    kda_conv_size: int = knob(4, "taps of the short convolution", "[config]")
    kda_gate: str = knob(
        "bounded", "decay: bounded is bound * sigmoid(exp(A) z), softplus is -exp(A) softplus(z)",
        "[report 2.1.1]", ("bounded", "softplus"),
    )  # fmt: skip
    kda_gate_lower_bound: float = knob(-5.0, "smallest log decay per token of the bounded gate", "[config]")
    kda_gate_rank: int = knob(32, "rank of the decay projection and of a low-rank output gate")
    kda_output_gate: str = knob("full", "output gate projection", "[config]", ("full", "low_rank"))
    kda_a_log_length: int = knob(
        0, "entries of A_log in a released file, zero-padded beyond the heads; 0: as many as heads", "[checkpoint]"
    )
    kda_chunk_size: int = knob(64, "tokens per chunk of the chunked form", "[lineage] FLA", ())

    mla_num_heads: int = knob(4, "MLA heads")
    mla_q_lora_rank: int = knob(64, "low rank of the queries; 0: full-rank queries")
    mla_kv_lora_rank: int = knob(48, "low rank of keys and values")
    mla_qk_nope_head_dim: int = knob(32, "per-head content channels of query and key")
    mla_qk_rope_head_dim: int = knob(16, "extra channels, key shared by all heads, never rotated")
    mla_v_head_dim: int = knob(32, "value channels of a head")
    mla_norm_eps: float = knob(1e-6, "epsilon of the two latent norms", "[official code]")
    mla_output_gate: bool = knob(True, "full-rank sigmoid gate on the attention output", "[config]")

    attn_res: str = knob("block", "attention residuals over depth", "[config]", ("none", "block", "full"))
    attn_res_block_size: int = knob(4, "decoder layers per attention-residual block")

    num_experts: int = knob(16, "routed experts")
    num_experts_per_token: int = knob(4, "experts chosen per token")
    num_shared_experts: int = knob(2, "shared experts, fused into one MLP of that multiple of the width; 0: none")
    moe_intermediate_size: int = knob(64, "inner width of one expert")
    moe_latent_size: int = knob(64, "latent width the experts work in; 0: plain MoE on the stream")
    moe_latent_norm: bool = knob(True, "RMSNorm before the latent up-projection", "[config]")
    moe_renormalize: bool = knob(True, "chosen scores are divided by their sum", "[config]")
    moe_routed_scaling_factor: float = knob(1.0, "factor on the combine weights", "[config]")

    init_std: float = knob(0.02, "standard deviation of matrices at init", "[config] initializer_range")
    embedding_init_std: float = knob(
        0.02, "standard deviation of the embedding at init; attention residuals mix it raw with sublayer outputs, so "
        "with init_fan_in about 1 learns much faster", "[config] initializer_range",
    )  # fmt: skip
    init_fan_in: bool = knob(
        False, "draw matrices with 1/sqrt(fan in) instead of init_std; undisclosed for K3, kinder to small widths"
    )
    compute_dtype: str = knob(
        "float32", "dtype of matmuls and of the stream; K3: bfloat16", OURS, ("float32", "bfloat16")
    )
    remat: str = knob(
        "none", "what the backward pass computes again instead of keeping: reads over depth; every sublayer with its "
        "read; every attention-residual block, sublayer by sublayer", OURS,
        ("none", "attention_residuals", "sublayer", "block"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision tower and projector: counted by the audits, not built yet. docs/k3.md sections 1.3 and 2.9."""

    num_layers: int = knob(0, "encoder blocks; 0: a text model without tower and projector")
    hidden_size: int = knob(1024, "width of the tower", "[config]")
    intermediate_size: int = knob(4096, "inner width of a block's MLP", "[config]")
    num_heads: int = knob(12, "attention heads", "[config]")
    qkv_size: int = knob(1536, "channels of query, key and value each, over all heads", "[config]")
    patch_size: int = knob(14, "pixels along the edge of a patch", "[config]")
    pos_emb_height: int = knob(64, "rows of the learned position table", "[config]")
    pos_emb_width: int = knob(64, "columns of the learned position table", "[config]")
    pos_emb_time: int = knob(4, "frames of the fixed temporal table", "[config]")
    merge_size: int = knob(2, "patches merged along each edge before the projector", "[config]")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Device mesh: five named axes, always all five; the product must equal the device count."""

    pipeline: int = knob(1, "pipeline stages (only 1 works today)")
    data: int = knob(1, "batch split; parameters and optimizer state are sharded over it (FSDP)")
    context: int = knob(1, "sequence split (only 1 works today)")
    expert: int = knob(1, "routed experts split; more data parallelism outside the MoE layers")
    tensor: int = knob(1, "heads, inner widths and vocabulary split")
    expert_balance: str = knob(
        "equal", "pairs of tokens and experts that a device computes: as many as any other, with experts fetched from "
        "other devices, or those of its own experts (none)", "[report 5.2.1]", ("equal", "none"),
    )  # fmt: skip
    expert_transport: str = knob(
        "auto", "exchange of tokens under equal work: auto is ragged on accelerators, dense on CPU; budgeted is one "
        "dense exchange, what exceeds it computed at home", OURS, ("auto", "ragged", "dense", "budgeted"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where rows come from. A row is `seq_len` tokens of packed documents or conversations."""

    source: str = knob(
        "stdlib", "kind of source: text is one document a file, jsonl and chat one a line, parquet one a row; stdlib "
        "and stdlib_chat are made from the running Python's standard library", OURS,
        ("stdlib", "text", "jsonl", "parquet", "stdlib_chat", "chat"),
    )  # fmt: skip
    path: str = knob("", "file, folder or glob of the source; empty for stdlib and stdlib_chat")
    eval_path: str = knob("", "the same of held-out documents; empty: eval_fraction of those at path are held out")
    text_field: str = knob("text", "field of a JSONL object or column of a parquet file that holds the text")
    chat_mode: str = knob(
        "thinking", "assistant turns with think channel, or without (a record may say otherwise)", "[official code]",
        ("thinking", "instruct"),
    )  # fmt: skip
    chat_effort: str = knob(
        "max", "thinking effort said at the start of a conversation; none: no such message", "[official code]",
        ("none", "low", "high", "max"),
    )  # fmt: skip
    chat_loss: str = knob(
        "assistant", "trained turns: every assistant turn, or the last of each conversation", "[report App. F]",
        ("assistant", "last"),
    )  # fmt: skip
    on_long: str = knob(
        "stop", "what a conversation longer than a row does: stop, be skipped, be cut to a row; all is counted", OURS,
        ("stop", "skip", "cut"),
    )  # fmt: skip
    tokenizer: str = knob("byte", "`byte`, a tokenizer.json file, or a tiktoken rank file (K3 special tokens)")
    seq_len: int = knob(256, "tokens in a row")
    batch_size: int = knob(32, "rows per optimizer step, over all devices and micro-batches")
    micro_batches: int = knob(1, "gradient accumulation: the batch is run in this many parts")
    eval_fraction: float = knob(0.02, "share of documents held out, chosen by hash of their name")
    eval_batches: int = knob(8, "held-out batches per evaluation; 0: all of them")
    shuffle: bool = knob(True, "shuffle documents, differently each epoch, by `seed`")
    on_bad_line: str = knob("stop", "what a malformed record does", OURS, ("stop", "skip"))

    @property
    def is_chat(self) -> bool:
        """The documents are conversations: rendered in the chat template, each whole in one row."""
        return self.source in ("chat", "stdlib_chat")

    @property
    def is_generated(self) -> bool:
        """The documents are made on the spot; there is no path to them."""
        return self.source in ("stdlib", "stdlib_chat")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Muon for matrices, AdamW for the rest (docs/k3.md section 3.2); one schedule for both."""

    peak_lr: float = knob(2e-3, "peak learning rate; undisclosed for K3")
    final_lr: float = knob(2e-4, "learning rate at the end of the cosine; undisclosed for K3")
    warmup_fraction: float = knob(0.01, "share of the steps that warm up linearly", "[report 3.3]")
    weight_decay: float = knob(0.1, "decoupled decay, multiplied by the learning rate", "[report 3.3]")
    grad_clip: float = knob(1.0, "global gradient norm above which gradients are scaled down; 0: off", "[lineage]")
    matrices: str = knob("muon", "optimizer of the matrices; the rest has AdamW", "[report 2.5]", ("muon", "adamw"))
    muon_heads: str = knob(
        "apart", "query, key and value projections: one matrix a head, or whole", "[report 2.5]", ("apart", "whole")
    )
    muon_kv_b: str = knob("apart", "key and value half of MLA's kv_b: a matrix each, or one", OURS, ("apart", "joint"))
    muon_momentum: float = knob(0.95, "momentum", "[lineage] Moonlight")
    muon_nesterov: bool = knob(True, "Nesterov form of the momentum", "[lineage] Moonlight code")
    muon_ns_steps: int = knob(5, "Newton-Schulz iterations", "[lineage] Moonlight")
    muon_coefficients: str = knob(
        "simple", "of the iteration: equal steps, or five different ones that end nearer to 1", "[lineage] Moonlight",
        ("simple", "quintic"),
    )  # fmt: skip
    muon_scale: float = knob(0.2, "update RMS: factor of sqrt(max(rows, columns))", "[lineage] Moonlight")
    adam_b1: float = knob(0.9, "AdamW first moment", "[lineage] Moonlight")
    adam_b2: float = knob(0.95, "AdamW second moment", "[lineage] Moonlight")
    adam_eps: float = knob(1e-8, "AdamW epsilon", "[lineage] Moonlight")
    qk_clip_threshold: float = knob(100.0, "largest attention logit allowed per MLA head; 0: off", "[lineage] K2 tau")
    balance: str = knob(
        "quantile",
        "router bias update: quantile by histogram, quantile_exact from every margin (small runs), sign rule of "
        "loss-free balancing, none (frozen)", "[report 2.3.3]",
        ("quantile", "quantile_exact", "sign", "none"),
    )  # fmt: skip
    balance_bins: int = knob(1000, "bins of the margin histogram", "[report App. D]")
    balance_ema: float = knob(0.0, "weight of the old bias in a moving average of the quantiles; 0: off")
    balance_sign_step: float = knob(1e-3, "step of the sign rule", "[lineage] loss-free balancing")
    max_consecutive_nonfinite: int = knob(5, "skipped non-finite steps in a row that stop the run with exit code 3")


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Quantisation in the loop (docs/k3.md section 3.7)."""

    experts: str = knob(
        "none", "routed experts in the forward pass: MXFP4 weights, or these and MXFP8 inputs; not said: by phase",
        "[report 4.1.4]", ("none", "mxfp4", "mxfp4_mxfp8"),
    )  # fmt: skip
    weight_scale: str = knob(
        "even", "how a scale follows from the largest of 32 weights, here and in exports: even is the rule of the "
        "release's tool chain, floor the MX standard's", "[lineage] compressed-tensors", ("even", "floor"),
    )  # fmt: skip
    input_scale: str = knob("floor", "the same for inputs", "[lineage] MX standard", ("even", "floor"))
    saturated_grad: str = knob(
        "pass", "gradient of a number beyond the largest of its format: passed on, or zero", OURS, ("pass", "zero")
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving. A run folder resumes by itself."""

    every: int = knob(100, "steps between checkpoints; the last step is always saved")
    keep: int = knob(2, "checkpoints kept; older ones go after a newer one is committed")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss during training."""

    every: int = knob(100, "steps between evaluations; 0: only at the end")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run prints and writes."""

    every: int = knob(10, "steps between logged lines")
    tensorboard: bool = knob(True, "write TensorBoard files")
    sample: str = knob("", "text that the trained model continues when the run is done; empty: nothing is generated")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    phase: str = knob(
        "pretrain", "row of the phase table in train/phases.py", "[report 3.4]",
        ("pretrain", "long_context", "cooldown", "sft"),
    )  # fmt: skip
    num_steps: int = knob(100, "optimizer steps of the run")
    seed: int = knob(0, "seed of initialisation and data order")
    init_from: str = knob("", "run folder whose weights this run starts from; empty: fresh weights")


#: What a phase sets where neither a config file nor the command line does (what else it means: train/phases.py).
PHASE_VALUES: dict[str, dict[str, Any]] = {
    "pretrain": {"quant.experts": "none"},
    "long_context": {"quant.experts": "none"},
    "cooldown": {"quant.experts": "none"},
    "sft": {"quant.experts": "mxfp4_mxfp8"},
}

SECTIONS = tuple(f.name for f in fields(Config) if f.default is MISSING)
