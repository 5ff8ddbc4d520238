"""What a prefix cache saves, and what a token costs at short and at long context.

    python scripts/bench_prefix.py

Prefill: one prompt of a shared beginning and a suffix, cold and with the beginning in the cache, turn by turn; a third
row is the same prompt again. Decode: one sequence, the same tokens drawn after 128 and after 8,192 others, turn by
turn, for KDA layers alone, K3's three to one, and MLA layers alone. Programs are compiled before anything is timed.
"""

import argparse
import time
from dataclasses import replace
from statistics import median

import jax
import numpy as np

from k3train.audit.memory import sequence_state
from k3train.config.schema import ModelConfig
from k3train.inference.answer import answer
from k3train.inference.engine import Engine, Weights
from k3train.inference.prefix_cache import PrefixCache
from k3train.inference.sample import Sampling
from k3train.inference.state import HostArrays
from k3train.model.k3 import blueprint
from k3train.parallel.mesh import make_mesh

VOCAB = 8192
K3_LIKE = ModelConfig(
    vocab_size=VOCAB, hidden_size=256, num_layers=8, kda_layers=(0, 1, 2, 4, 5, 6), mla_layers=(3, 7),
    dense_layers=(0,), moe_layers=tuple(range(1, 8)), intermediate_size=1024, kda_num_heads=4, kda_head_dim=64,
    kda_gate_rank=64, mla_num_heads=4, mla_kv_lora_rank=64, mla_qk_nope_head_dim=64, mla_qk_rope_head_dim=32,
    mla_v_head_dim=64, num_experts=16, num_experts_per_token=4, moe_intermediate_size=128, moe_latent_size=128,
    init_fan_in=True,
)  # fmt: skip
STACKS = {
    "KDA alone": replace(K3_LIKE, kda_layers=tuple(range(8)), mla_layers=()),
    "KDA and MLA, 3 to 1": K3_LIKE,
    "MLA alone": replace(K3_LIKE, kda_layers=(), mla_layers=tuple(range(8))),
}
GREEDY = Sampling(0.0)
CONTEXTS = (128, 8192)


def make(model: ModelConfig) -> tuple[Engine, Weights]:
    """An engine on the first device and weights as at initialisation."""
    engine = Engine(model, make_mesh({}, jax.devices()[:1]))
    params, bias = blueprint(model).init(0)
    return engine, Weights(params, bias)


def prefill(shared: int, suffix: int, rounds: int) -> None:
    engine, weights = make(K3_LIKE)
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, VOCAB, shared)
    endings = iter(rng.integers(0, VOCAB, (2 * rounds + 2, suffix)))
    times: dict[str, list[float]] = {"cold": [], "shared beginning": [], "the same prompt": []}
    reused: dict[str, int] = {}
    held = 0
    for turn in range(rounds + 1):
        cache = PrefixCache()
        first, second = (np.concatenate([beginning, next(endings)]) for _ in range(2))
        for name, prompt in zip(times, (first, second, second), strict=True):
            found = answer(engine, weights, cache, prompt, 1, GREEDY)
            held, reused[name] = found.held_bytes, found.reused_tokens
            if turn:
                times[name].append(found.prefill_seconds)
    tokens = shared + suffix
    print(f"prefill of {tokens:,} tokens, {shared:,} of them shared, {held / 2**20:.0f} MiB held")
    for name, seconds in times.items():
        ratio = median(cold / own for cold, own in zip(times["cold"], seconds, strict=True))
        print(f"  {name:20} {reused[name]:6,} reused  {1e3 * median(seconds):9.1f} ms  {ratio:7.1f} x")


class Standing:
    """A sequence of `context` tokens whose decoding can be timed again and again."""

    def __init__(self, model: ModelConfig, context: int, new: int):
        self.engine, self.weights = make(model)
        self.context, self.new = context, new
        sequences = self.engine.start(1, context + new)
        prompt = np.random.default_rng(1).integers(0, VOCAB, context)
        sequences = self.engine.extend(self.weights, sequences, [prompt])
        self.fixed: HostArrays = self.engine.fixed_state(sequences)
        self.latents = self.engine.latents(sequences, 0, context)
        self.run()

    def run(self) -> float:
        """Milliseconds per token."""
        capacity = self.context + self.new
        sequences = self.engine.resume(self.context, self.fixed, [self.latents], capacity)
        jax.block_until_ready(sequences.state.hidden)
        start = time.perf_counter()
        self.engine.decode(self.weights, sequences, self.new, GREEDY)
        return 1e3 * (time.perf_counter() - start) / self.new


def decode(new: int, rounds: int) -> None:
    print(f"decode, {new} tokens after {' and '.join(f'{n:,}' for n in CONTEXTS)}")
    for name, model in STACKS.items():
        short, long = (Standing(model, context, new) for context in CONTEXTS)
        turns = [(short.run(), long.run()) for _ in range(rounds)]
        few, many = (median(x) for x in zip(*turns, strict=True))
        ratio = median(b / a for a, b in turns)
        state = sequence_state(model)
        print(
            f"  {name:20} {few:7.2f} ms  {many:7.2f} ms  ratio {ratio:5.2f}  "
            f"state {state.fixed:9,} bytes + {state.cache_per_token:5,} a token",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--suffix", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="tokens decoded per run")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.default_backend()}, float32, 8 layers of width {K3_LIKE.hidden_size}")
    prefill(args.shared, args.suffix, args.rounds)
    decode(args.new, args.rounds)


if __name__ == "__main__":
    main()
