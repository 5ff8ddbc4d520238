"""Balanced against plain expert parallelism: training steps of configs/tiny.py on 8 simulated devices, expert 8.

    python scripts/bench_expert.py [--rounds N]

Two routers, frozen: the fresh one, and one whose bias sends every token to both experts of device 0, which owns four
times the mean load. For each way of sharing: pairs that the busiest device computes (of the MoE layer where it has
most), bytes that a device receives for the tokens of an MoE layer, there and back in float32, and for fetched experts,
rows sent without content, and the time of the whole step (median, and the median ratio to the plain one, turn by turn).
Bytes follow from the plan of every layer for its measured loads, with the pairs in random order. Simulated devices
share the machine's cores, so the time shows what balancing costs, not what it saves.
"""

import argparse
from statistics import median
from typing import NamedTuple

from peer import milliseconds

RANKS = 8
SHARINGS = ("none", "equal ragged", "equal dense", "equal budgeted")
ROUTERS = ("even", "skewed")


class Cost(NamedTuple):
    """Of one MoE layer on the device where it is largest; bytes are received ones."""

    pairs: int
    tokens: int
    experts: int
    empty_rows: int


def cost(sharing: str, config, load_E) -> Cost:
    """What one layer costs under these loads."""
    import jax.numpy as jnp
    import numpy as np

    from k3train.ops.expert_plan import plan_ranks
    from k3train.parallel.exchange import BUDGET

    model = config.model
    tokens = config.data.batch_size * config.data.seq_len // RANKS
    row, expert = 4 * model.moe_latent_size, 4 * 3 * model.moe_latent_size * model.moe_intermediate_size
    others = RANKS - 1
    if sharing == "none":
        return Cost(int(load_E.reshape(RANKS, -1).sum(1).max()), 2 * others * tokens * row, 0, 0)
    sent_RR = exchanged(load_E)
    busiest, pairs = int(sent_RR.sum(0).max()), tokens * model.num_experts_per_token
    plan = plan_ranks(jnp.asarray(load_E), RANKS)
    foreign_RJ = np.asarray(plan.moved_RJ) > 0
    if sharing == "equal ragged":
        arrives = int((sent_RR.sum(0) - sent_RR.diagonal()).max())
        return Cost(busiest, 2 * arrives * row, int(foreign_RJ.sum(1).max()) * expert, 0)
    lent = {(int(d), int(j)) for d, row_J in zip(plan.donor_R, foreign_RJ, strict=True) for j in np.flatnonzero(row_J)}
    budget = -int(-BUDGET * pairs // RANKS)
    rounds = 1 if sharing == "equal budgeted" else -int(-sent_RR.max() // budget)
    return Cost(
        busiest, 2 * rounds * others * budget * row, 2 * others * len(lent) * expert // RANKS,
        rounds * RANKS * budget - pairs,
    )  # fmt: skip


def exchanged(load_E):
    """Pairs that each device sends each other one [from, to], under the plan."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from k3train.ops.expert_plan import deal, pairs_of_ranks, plan_ranks

    pairs = np.repeat(np.arange(load_E.size, dtype=np.int32), load_E)
    ids_RN = np.random.default_rng(0).permutation(pairs).reshape(RANKS, -1)
    counts_RE = jnp.asarray([np.bincount(ids_N, minlength=load_E.size) for ids_N in ids_RN], jnp.int32)
    allotted_ER = pairs_of_ranks(jnp.asarray(load_E), plan_ranks(jnp.asarray(load_E), RANKS))
    to_RN = jax.vmap(deal, in_axes=(0, None, None, 0))(jnp.asarray(ids_RN), counts_RE, allotted_ER, jnp.arange(RANKS))
    return np.asarray(jax.nn.one_hot(to_RN, RANKS, dtype=jnp.int32).sum(axis=1))


def stepper(sharing: str, router: str):
    """The configuration, and one optimizer step that returns every layer's loads."""
    from dataclasses import asdict

    import jax
    import numpy as np

    from k3train.config.load import load
    from k3train.parallel.mesh import make_mesh
    from k3train.train.step import Program

    balance, _, transport = sharing.partition(" ")
    settings = ["mesh.data=1", f"mesh.expert={RANKS}", "optim.balance=none", f"mesh.expert_balance={balance}"]
    settings += [f"mesh.expert_transport={transport}"] if transport else []
    config = load("tiny", [f"--config.{setting}" for setting in settings])[0]
    program = Program(config, make_mesh(asdict(config.mesh)))
    shape = (config.data.batch_size, config.data.seq_len)
    ids = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
    rows = {"tokens": ids, "segment_ids": np.ones_like(ids), "targets": np.roll(ids, -1, axis=1)}
    batch = program.put_batch(rows | {"loss_mask": np.ones(shape, np.float32)})
    state = program.init()
    if router == "skewed":
        held = config.model.num_experts // RANKS
        favour = lambda bias: jax.device_put(bias.at[..., :held].add(10.0), bias.sharding)  # noqa: E731
        state = state._replace(bias=jax.tree.map(favour, state.bias))
    held_state = [state]

    def run():
        held_state[0], metrics = program.train_step(held_state[0], batch)
        return np.asarray(metrics["expert_loads"])

    return config, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    import jax

    from k3train.parallel.devices import keep_compiled_programs, prepare_devices

    keep_compiled_programs()
    prepare_devices(RANKS)
    print(f"jax {jax.__version__} on {jax.default_backend()}, expert {RANKS}")
    timed = [s for s in SHARINGS if s != "equal ragged" or jax.default_backend() != "cpu"]
    heads = f"{'pairs':>8}{'token KB':>10}{'expert KB':>11}{'empty rows':>12}{'step ms':>9}{'ratio':>7}"
    print(f"{'router':8}{'sharing':16}{heads}")
    for router in ROUTERS:
        runs = {sharing: stepper(sharing, router) for sharing in timed}
        loads_LE = [run() for _, run in runs.values()][0]
        for _, run in runs.values():
            run()
        turns = [{sharing: milliseconds(run) for sharing, (_, run) in runs.items()} for _ in range(args.rounds)]
        for sharing in SHARINGS:
            config = runs["none"][0]
            worst = [
                max(column) for column in zip(*(cost(sharing, config, load_E) for load_E in loads_LE), strict=True)
            ]
            pairs, tokens, experts, empty = worst
            line = f"{router:8}{sharing:16}{pairs:8}{tokens / 1024:10.0f}{experts / 1024:11.0f}{empty:12}"
            if sharing in timed:
                ratio = median(turn[sharing] / turn["none"] for turn in turns)
                line += f"{median(turn[sharing] for turn in turns):9.0f}{ratio:7.2f}"
            print(line)


if __name__ == "__main__":
    main()
