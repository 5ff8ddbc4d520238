"""A whole training step against transformers' KimiLinearForCausalLM with AdamW on torch CPU.

    python scripts/bench_step.py [--peer-python PATH] [--rounds N]

Eight layers, KDA KDA KDA MLA twice, width 256, 16 experts top-4, first layer dense, about 31 M parameters, 4 rows of
512 tokens, float32, one device. Ours runs three times: with the peer's architecture (plain MoE, SwiGLU, softplus gate,
no attention residuals) and its optimizer, AdamW; with the peer's architecture and K3's optimizer (Muon, QK-clip); and
with K3's own architecture and optimizer. Quantile balancing is always on. `ratio` is ours / peer in tokens per second,
the median over turns taken one after the other. `--peer-python`: an interpreter with torch and transformers.
"""

import argparse
import sys
import time

from peer import Peer, compare, serve

ROWS, SEQ, VOCAB, WIDTH = 4, 512, 8192, 256
KDA, MLA = (0, 1, 2, 4, 5, 6), (3, 7)

PEER_SWITCHES = {
    "activation": "swiglu",
    "kda_gate": "softplus",
    "kda_output_gate": "low_rank",
    "mla_q_lora_rank": 0,
    "mla_output_gate": False,
    "attn_res": "none",
    "moe_latent_size": 0,
    "moe_routed_scaling_factor": 2.446,
    "num_shared_experts": 1,
}
K3_SWITCHES = {"mla_q_lora_rank": 128, "attn_res_block_size": 4, "moe_latent_size": 256, "num_shared_experts": 2}
CASES = (
    ("peer's architecture, AdamW", PEER_SWITCHES, "adamw"),
    ("peer's architecture, Muon", PEER_SWITCHES, "muon"),
    ("K3's architecture, Muon", K3_SWITCHES, "muon"),
)


def tokens():
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ))


def ours(switches: dict, matrices: str):
    """One optimizer step as a function, and the number of parameters."""
    import jax
    import numpy as np

    from k3train.config.schema import Config, DataConfig, ModelConfig, OptimConfig
    from k3train.core.tree import leaves
    from k3train.parallel.mesh import make_mesh
    from k3train.train.step import Program

    model = ModelConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_layers=8, kda_layers=KDA, mla_layers=MLA, dense_layers=(0,),
        moe_layers=tuple(range(1, 8)), intermediate_size=1024, kda_num_heads=4, kda_head_dim=64, kda_gate_rank=64,
        mla_num_heads=4, mla_kv_lora_rank=64, mla_qk_nope_head_dim=64, mla_qk_rope_head_dim=32, mla_v_head_dim=64,
        num_experts=16, num_experts_per_token=4, moe_intermediate_size=256, **switches,
    )  # fmt: skip
    optim = OptimConfig(matrices=matrices)
    config = Config(model=model, data=DataConfig(seq_len=SEQ, batch_size=ROWS), optim=optim, num_steps=1000)
    program = Program(config, make_mesh({}, jax.devices()[:1]))
    ids = tokens().astype(np.int32)
    rows = {
        "tokens": ids,
        "segment_ids": np.ones_like(ids),
        "targets": np.roll(ids, -1, axis=1),
        "loss_mask": np.ones(ids.shape, np.float32),
    }
    held = [program.init()]
    batch = program.put_batch(rows)

    def run():
        held[0], metrics = program.train_step(held[0], batch)
        return float(metrics["loss"])

    return run, sum(info.shape and int(np.prod(info.shape)) for _, info in leaves(program.blueprint.infos))


def peer(case: dict):
    import torch
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=8, intermediate_size=1024, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, num_experts=16, num_experts_per_token=4, num_shared_experts=1, moe_intermediate_size=256,
        routed_scaling_factor=2.446, first_k_dense_replace=1, linear_conv_kernel_dim=4, linear_head_dim=64,
        linear_num_heads=4, pad_token_id=0,
        linear_attn_config={"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4,
                            "kda_layers": [i + 1 for i in KDA], "full_attn_layers": [i + 1 for i in MLA]},
    )  # fmt: skip
    model = KimiLinearForCausalLM(config).train()
    print(f"peer: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", file=sys.stderr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    ids = torch.tensor(tokens())

    def run():
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        return serve(peer)

    import jax

    other = Peer(args.peer_python, __file__) if args.peer_python else None
    print(f"jax {jax.__version__} on {jax.default_backend()}, {ROWS} x {SEQ} tokens, float32")
    for name, switches, matrices in CASES:
        start = time.perf_counter()
        run, parameters = ours(switches, matrices)
        run()
        first = time.perf_counter() - start
        mine, theirs, ratio = compare(run, other, {}, args.rounds)
        rate = 1e3 * ROWS * SEQ / mine
        print(
            f"{name:30} {parameters / 1e6:5.1f} M parameters  first step {first:5.1f} s  step {mine:7.0f} ms"
            f"  peer {theirs:7.0f} ms  {rate:6.0f} tokens/s  ratio {1 / ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
