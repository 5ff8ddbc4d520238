"""Routed experts, forward and backward after routing, against Hugging Face's `grouped_mm` experts on torch CPU.

    python scripts/bench_moe.py [--peer-python PATH] [--rounds N]

`--peer-python` is an interpreter that has torch and transformers; jax and torch need not share an environment. The peer
runs as its own process that computes only when asked, turn by turn with ours, so both see the same machine. Without it
only our times are printed. Times are medians in milliseconds; `ratio` is the median of ours / peer per turn.
"""

import argparse
from types import SimpleNamespace

from peer import Peer, compare, serve

TOKENS = 2048
#: experts, chosen, width, inner width
CASES = {
    "896 experts top-16, 64 x 64": (896, 16, 64, 64),
    "64 experts top-8, 64 x 64": (64, 8, 64, 64),
    "16 experts top-4, 256 x 256": (16, 4, 256, 256),
}


def routing(experts: int, chosen: int, skewed: bool):
    """Ids and weights of all tokens, the same in both processes. Skewed: largest load about 8 times the mean."""
    import numpy as np

    rng = np.random.default_rng(0)
    scores = rng.random((TOKENS, experts))
    if skewed:
        scores = scores + 1.2 * rng.random(experts) ** 4
    ids = np.argsort(-scores, axis=1)[:, :chosen].astype(np.int32)
    weights = rng.random((TOKENS, chosen)).astype(np.float32)
    return ids, weights / weights.sum(axis=1, keepdims=True)


def ours(case: str, activation: str, skewed: bool):
    """A function that runs one forward and backward pass."""
    import jax
    import jax.numpy as jnp

    from k3train.ops.situ import situ_glu, swiglu
    from k3train.parallel.expert import routed_experts

    experts, chosen, width, inner = CASES[case]
    ids, weights = routing(experts, chosen, skewed)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (1, TOKENS, width))
    w1, w3 = (jax.random.normal(k, (experts, width, inner)) / width**0.5 for k in keys[1:3])
    w2 = jax.random.normal(keys[3], (experts, inner, width)) / inner**0.5
    function = {"situ": situ_glu, "swiglu": swiglu}[activation]

    def loss(x, weights, w1, w3, w2, ids):
        return jnp.sum(jnp.square(routed_experts(x, ids, weights, w1, w3, w2, activation=function)))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
    arguments = (x, jnp.asarray(weights)[None], w1, w3, w2, jnp.asarray(ids)[None])
    return lambda: jax.block_until_ready(step(*arguments))


def peer(asked: dict):
    """The same pass by Hugging Face's experts (silu gate)."""
    import torch
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts

    experts, chosen, width, inner = CASES[asked["case"]]
    ids, weights = routing(experts, chosen, asked["skewed"])
    config = SimpleNamespace(
        num_local_experts=experts,
        hidden_size=width,
        moe_intermediate_size=inner,
        hidden_act="silu",
        _experts_implementation="grouped_mm",
    )
    layer = KimiLinearExperts(config)
    torch.nn.init.normal_(layer.gate_up_proj, std=width**-0.5)
    torch.nn.init.normal_(layer.down_proj, std=inner**-0.5)
    x = torch.randn(TOKENS, width, requires_grad=True)
    ids, weights = torch.tensor(ids, dtype=torch.int64), torch.tensor(weights, requires_grad=True)

    def run():
        layer.zero_grad(set_to_none=True)
        x.grad = weights.grad = None
        layer(x, ids, weights).square().sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with torch and transformers")
    parser.add_argument("--rounds", type=int, default=15, help="turns per case")
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        return serve(peer)

    import jax

    other = Peer(args.peer_python, __file__) if args.peer_python else None
    print(f"jax {jax.__version__} on {jax.default_backend()}, {TOKENS} tokens, float32, forward + backward")
    for case in CASES:
        for skewed in (False, True):
            for activation in ("swiglu", "situ"):
                run = ours(case, activation, skewed)
                mine, theirs, ratio = compare(run, other, {"case": case, "skewed": skewed}, args.rounds)
                row = f"{case:28} {'skewed' if skewed else 'even':6} {activation:6}"
                print(f"{row}: ours {mine:7.1f}  peer {theirs:7.1f}  ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
