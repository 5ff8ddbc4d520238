"""Inputs and comparisons shared by the KDA tests."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

DATA = Path(__file__).parents[1] / "data" / "kda"
INPUTS = ("q", "k", "v", "log_decay", "beta")


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def random_case(seed: int, B: int, S: int, H: int = 2, K: int = 16, V: int = 8, floor: float = -5.0) -> dict:
    """Normalised q and k, decays between `floor` and almost none, one initial state, cotangents."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    case = {
        "q": unit(B, S, H, K),
        "k": unit(B, S, H, K),
        "v": rng.normal(size=(B, S, H, V)),
        "log_decay": floor / (1 + np.exp(-rng.normal(-3, 3, size=(B, S, H, K)))),
        "beta": 1 / (1 + np.exp(-rng.normal(0, 2, size=(B, S, H)))),
        "initial_state": rng.normal(size=(B, H, K, V)),
        "d_out": rng.normal(size=(B, S, H, V)),
        "d_state": rng.normal(size=(B, H, K, V)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in case.items()}


def value_and_gradients(kda, case: dict, **options):
    """(out, final_state, {input: gradient}) of sum(out * d_out) + sum(final_state * d_state)."""
    names = [n for n in (*INPUTS, "initial_state") if n in case]

    def loss(*arrays):
        given = dict(zip(names, arrays, strict=True))
        out, state = kda(**given, segment_ids=case.get("segment_ids"), **options)
        total = jnp.sum(out * case["d_out"])
        return total + (jnp.sum(state * case["d_state"]) if "d_state" in case else 0.0), (out, state)

    arguments = [case[n] for n in names]
    grads, (out, state) = jax.grad(loss, argnums=range(len(names)), has_aux=True)(*arguments)
    return out, state, dict(zip(names, grads, strict=True))
