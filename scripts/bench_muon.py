"""One Muon update against optax.contrib and torch.optim.Muon on the same matrices, float32.

    python scripts/bench_muon.py [--peer-python PATH] [--runs N]

24 matrices of 512 x 512, 8 of 512 x 2048, 8 of 2048 x 512, one leaf each, and one leaf of 64 matrices of 256 x 128; one
device. Then a stack of 16 matrices of 512 x 2048 whose rows are split over 8 simulated devices. Ratio: ours / peer,
below 1 is faster; median over interleaved runs. torch iterates in bfloat16 by itself; here its own code iterates in
float32, like the others, one parameter a matrix. `--peer-python`: an interpreter with torch.
"""

import argparse
from statistics import median

from peer import Peer, compare, milliseconds, serve

SQUARE, WIDE, TALL, HEADS = [(512, 512)] * 24, [(512, 2048)] * 8, [(2048, 512)] * 8, (64, 256, 128)
STACK = (16, 512, 2048)
LEARNING_RATE = 0.02


def peer(case: dict):
    del case
    import torch

    # the iteration of torch.optim.Muon casts its input with this method: stay in float32
    torch.Tensor.bfloat16 = lambda self: self.clone()
    shapes = SQUARE + WIDE + TALL + [HEADS[1:]] * HEADS[0]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Muon(parameters, lr=LEARNING_RATE, weight_decay=0.0).step


def transforms():
    """(name, transform for params) of ours and of optax, both from a function that says which axes are rows."""
    import jax
    from optax.contrib import MuonDimensionNumbers
    from optax.contrib import muon as optax_muon

    from k3train.optim import MatrixView, muon

    def ours(params, specs=None):
        views = jax.tree.map(lambda p: MatrixView((p.ndim - 2,), (p.ndim - 1,)), params)
        return muon(LEARNING_RATE, views, weight_decay=0.0, specs=specs)

    def theirs(params, specs=None):
        del specs
        axes = jax.tree.map(lambda p: MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)
        return optax_muon(LEARNING_RATE, muon_weight_dimension_numbers=axes)

    return ours, theirs


def compiled(transform, params, shardings=None):
    """An update as a function without arguments."""
    import jax

    state = jax.jit(transform.init)(params)
    update = jax.jit(transform.update, out_shardings=(shardings, None) if shardings else None)

    def run():
        return jax.block_until_ready(update(params, state, params))

    run()
    return run


def interleaved(runs: int, mine, theirs) -> tuple[float, float, float]:
    turns = [(milliseconds(mine), milliseconds(theirs)) for _ in range(runs)]
    first, second = zip(*turns, strict=True)
    return median(first), median(second), median(a / b for a, b in turns)


def line(where: str, peer_name: str, times: tuple[float, float, float]) -> str:
    mine, theirs, ratio = times
    return f"{where:20} ours {mine:6.0f} ms  {peer_name} {theirs:6.0f} ms  ratio {ratio:.2f}"


def one_device(runs: int, torch: Peer | None) -> None:
    import jax
    import jax.numpy as jnp

    shapes = [*SQUARE, *WIDE, *TALL, HEADS]
    params = {f"w{i:02}": jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)}
    params = jax.device_put(params, jax.devices()[0])
    ours, theirs = (compiled(make(params), params) for make in transforms())
    assert jnp.isfinite(ours()[0]["w00"]).all()
    print(line("one device", "optax", interleaved(runs, ours, theirs)), flush=True)
    if torch:
        print(line("one device", "torch", compare(ours, torch, {}, runs)), flush=True)


def eight_devices(runs: int) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from k3train.parallel.mesh import make_mesh, use_mesh

    mesh = make_mesh({"data": 8}, jax.devices())
    spec = {"w": PartitionSpec(None, "data", None)}
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    params = jax.device_put({"w": jax.random.normal(jax.random.key(0), STACK)}, shardings)
    with use_mesh(mesh):
        ours, theirs = (compiled(make(params, spec), params, shardings) for make in transforms())
        print(line("8 devices, sharded", "optax", interleaved(runs, ours, theirs)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with torch")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--serve-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        return serve(peer)

    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    torch = Peer(args.peer_python, __file__) if args.peer_python else None
    print(f"jax {jax.__version__} on {jax.default_backend()}, float32")
    one_device(args.runs, torch)
    eight_devices(args.runs)


if __name__ == "__main__":
    main()
