"""Inputs and comparisons shared by the KDA tests."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DATA = Path(__file__).parents[1] / "data" / "kda"
INPUTS = ("q", "k", "v", "log_decay", "beta")


@functools.cache
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


class GoldenRow(NamedTuple):
    """One row of the batch that `run_golden_rows` builds: a document alone (0, 1, 2), or a whole row (None)."""

    name: str
    row: int
    document: int | None

    def ids(self) -> np.ndarray:
        """Segment ids of the positions taken."""
        file = golden(self.name)
        ids = file.get("segment_ids", np.ones(file["q"].shape[:2], np.int32))[self.row]
        return ids if self.document is None else np.where(ids == self.document + 1, ids, 0)

    def state(self, key: str) -> np.ndarray | None:
        """Stored state (or its gradient): of the document, or after the last one of the row."""
        file = golden(self.name)
        if "segment_ids" not in file:
            return file[key][self.row] if key in file else None
        key = key.replace("final_state", "segment_final_state")
        return file[key][self.row, -1 if self.document is None else self.document] if key in file else None

    def compared(self) -> np.ndarray:
        """Positions whose gradients are stored for this choice of cotangents: packed rows weigh only the last state."""
        ids = self.ids()
        return np.flatnonzero(ids[ids > 0] == ids.max())


def run_golden_rows(rows: list[GoldenRow], run) -> dict[GoldenRow, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Runs `run` (`value_and_gradients` of a form) on one padded batch; for each row {what: (got, wanted)}."""
    inputs = {"q": "q", "k": "k", "v": "v", "log_decay": "g", "beta": "beta", "d_out": "do"}
    states = {"initial_state": "initial_state", "d_state": "dfinal_state"}
    length, heads, size = 256, 3, 16
    batch = {n: np.zeros((len(rows), length, heads, *(() if n == "beta" else (size,))), np.float32) for n in inputs}
    batch |= {n: np.zeros((len(rows), heads, size, size), np.float32) for n in states}
    batch["segment_ids"] = np.zeros((len(rows), length), np.int32)
    for i, spec in enumerate(rows):
        ids, file = spec.ids(), golden(spec.name)
        where, H = np.flatnonzero(ids), file["q"].shape[2]
        batch["segment_ids"][i, : len(where)] = ids[where]
        for name, key in inputs.items():
            batch[name][i, : len(where), :H] = file[key][spec.row, where]
        for name, key in states.items():
            if (state := spec.state(key)) is not None:
                batch[name][i, :H] = state
    out, state, grads = run({name: jnp.asarray(x) for name, x in batch.items()})
    results = {}
    for i, spec in enumerate(rows):
        file, where, compared = golden(spec.name), np.flatnonzero(spec.ids()), spec.compared()
        H, n = file["q"].shape[2], len(where)
        found = {"o": (np.asarray(out)[i, :n, :H], file["o"][spec.row, where])}
        for name in INPUTS:
            key = f"d{inputs[name]}"
            found[key] = (np.asarray(grads[name])[i, compared, :H], file[key][spec.row, where[compared]])
        for key, got in {"final_state": state, "dinitial_state": grads["initial_state"]}.items():
            if (wanted := spec.state(key)) is not None:
                found[key] = (np.asarray(got)[i, :H], wanted)
        results[spec] = found
    return results
