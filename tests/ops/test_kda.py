"""KDA: golden files, chunked form against the recurrence, packing, padding, causality."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.kda_chunk import chunk_kda
from k3train.ops.kda_gate import bounded_log_decay, l2_normalise
from k3train.ops.kda_reference import kda_step, recurrent_kda
from tests.ops.kda_cases import DATA, INPUTS, golden, random_case, value_and_gradients
from tests.tolerances import TOLERANCES, assert_close

FORMS = pytest.mark.parametrize("kda", [recurrent_kda, chunk_kda])
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)


@functools.cache
def compiled(kda, **options):
    return jax.jit(lambda case: value_and_gradients(kda, case, **options))


def golden_case(file: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    names = {"g": "log_decay", "do": "d_out", "dfinal_state": "d_state"}
    wanted = {"q", "k", "v", "beta", "initial_state", *names}
    return {names.get(key, key): jnp.asarray(x) for key, x in file.items() if key in wanted}


def gradient_key(name: str) -> str:
    return "dg" if name == "log_decay" else f"d{name}"


def test_every_golden_is_here():
    assert len(list(DATA.glob("*.npz"))) == 13


@FORMS
@pytest.mark.parametrize("name", [
    "a_plain_T64", "b_T130", "c_initial_state", "e_strong_decay_T256", "e2_mixed_decay_T256", "f_repeated_keys_T128",
    "k_headdim128_T70",
])  # fmt: skip
def test_golden(kda, name):
    file = golden(name)
    out, state, grads = compiled(kda)(golden_case(file))
    assert_close(out, file["o"], "op", "out")
    assert_close(state, file["final_state"], "op", "final_state")
    for grad_name, grad in grads.items():
        assert_close(grad, file[gradient_key(grad_name)], "op gradient", f"gradient of {grad_name}")


@FORMS
def test_golden_packed(kda):
    """Packed rows give the outputs and, once the last document's state is weighed in alone, the gradients."""
    file = golden("d_packed3")
    case = golden_case(file) | {"d_state": jnp.asarray(file["dsegment_final_state"][:, -1])}
    out, state, grads = compiled(kda)(case | {"segment_ids": jnp.asarray(file["segment_ids"])})
    assert_close(out, file["o"], "op", "out")
    assert_close(state, file["segment_final_state"][:, -1], "op", "state after the last document")
    last = file["segment_ids"] == file["segment_ids"][:, -1:]
    for name, grad in grads.items():
        wanted = file[gradient_key(name)]
        scale = np.abs(wanted).max()
        error = np.abs(np.asarray(grad) - wanted)[last].max() / scale
        assert error < TOLERANCES["op gradient"].bound, (name, error)


@FORMS
@pytest.mark.parametrize("name", ["d_packed3", "d2_packed3_initial_state"])
def test_golden_documents_apart(kda, name):
    """Every document alone, with its own initial state; all rows padded to one length."""
    file = golden(name)
    rows = []
    for b, ids in enumerate(file["segment_ids"]):
        for n, segment in enumerate(np.unique(ids[ids > 0])):
            rows.append((b, n, np.flatnonzero(ids == segment)))
    length = max(len(where) for _, _, where in rows)
    case = {key: np.zeros((len(rows), length, *x.shape[2:]), np.float32) for key, x in golden_case(file).items()
            if key != "initial_state"}  # fmt: skip
    case["segment_ids"] = np.zeros((len(rows), length), np.int32)
    for i, (b, _, where) in enumerate(rows):
        case["segment_ids"][i, : len(where)] = 7
        for key, x in golden_case(file).items():
            if key != "initial_state":
                case[key][i, : len(where)] = x[b, where]
    states = [file["segment_final_state"][b, n] for b, n, _ in rows]
    case["d_state"] = np.stack([file["dsegment_final_state"][b, n] for b, n, _ in rows])
    initial = file.get("initial_state", np.zeros_like(file["segment_final_state"]))
    case["initial_state"] = np.stack([initial[b, n] for b, n, _ in rows]).astype(np.float32)
    out, state, grads = compiled(kda)({key: jnp.asarray(x) for key, x in case.items()})
    assert_close(state, np.stack(states), "op", "final states")
    if "dinitial_state" in file:
        wanted = np.stack([file["dinitial_state"][b, n] for b, n, _ in rows])
        assert_close(grads["initial_state"], wanted, "op gradient", "gradient of initial_state")
    for key, got in [("o", out), *((gradient_key(n), grads[n]) for n in INPUTS)]:
        wanted = np.zeros(got.shape)
        for i, (b, _, where) in enumerate(rows):
            wanted[i, : len(where)] = file[key][b, where]
        assert_close(got, wanted, "op", key)


@FORMS
def test_golden_front_end(kda):
    """Normalisation, gate and sigmoid in front of the recurrence."""
    file = golden("h_fused_frontend")
    names = ("q_raw", "k_raw", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")

    def loss(inputs):
        z = inputs["raw_gate"] + inputs["dt_bias"].reshape(inputs["raw_gate"].shape[-2:])
        log_decay = bounded_log_decay(z, inputs["A_log"], float(file["lower_bound"]))
        beta = jax.nn.sigmoid(inputs["beta_logits"])
        out, state = kda(l2_normalise(inputs["q_raw"]), l2_normalise(inputs["k_raw"]), inputs["v"], log_decay, beta)
        return jnp.sum(out * file["do"]) + jnp.sum(state * file["dfinal_state"]), (out, state)

    inputs = {name: jnp.asarray(file[name]) for name in names}
    grads, (out, state) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    assert_close(out, file["o"], "op", "out")
    assert_close(state, file["final_state"], "op", "final_state")
    for name in names:
        assert_close(grads[name], file[f"d{name}"], "op gradient", f"gradient of {name}")


def assert_forms_agree(case):
    wanted_out, wanted_state, wanted_grads = compiled(recurrent_kda)(case)
    out, state, grads = compiled(chunk_kda)(case)
    assert_close(out, wanted_out, "op", "out")
    assert_close(state, wanted_state, "op", "final_state")
    for name, grad in grads.items():
        assert_close(grad, wanted_grads[name], "op gradient", f"gradient of {name}")


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_equals_the_recurrence(length):
    assert_forms_agree(random_case(length, B=1, S=length))


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_size_changes_nothing(chunk_size):
    case = random_case(3, B=1, S=65)
    wanted, got = compiled(chunk_kda)(case), compiled(chunk_kda, chunk_size=chunk_size)(case)
    jax.tree.map(lambda a, b: assert_close(a, b, "op", f"chunk size {chunk_size}"), got, wanted)


PACKED = np.array(
    [
        [0] * 3 + [4] * 20 + [0] * 2 + [4] * 5 + [2] + [4] * 40 + [9] * 45 + [0] * 14,
        [1] * 64 + [2] * 64 + [3] * 2,
        [0] * 130,
    ],
    np.int32,
)


def packed_case():
    return random_case(11, B=3, S=130) | {"segment_ids": jnp.asarray(PACKED)}


def test_packed_rows_with_padding_anywhere_equal_the_recurrence():
    assert_forms_agree(packed_case())


@FORMS
def test_packed_documents_equal_documents_apart(kda):
    case = packed_case()
    out, state, _ = compiled(kda)(case)
    alone = {n: jnp.zeros_like(case[n][:1]) for n in INPUTS}
    for b, documents in ((0, [(3, 30, True), (30, 31, False), (31, 71, False), (71, 116, False)]),
                         (1, [(0, 64, True), (64, 128, False), (128, 130, False)])):  # fmt: skip
        for start, stop, first in documents:
            row = {n: x.at[0, : stop - start].set(case[n][b, start:stop]) for n, x in alone.items()}
            ids = np.zeros((1, 130), np.int32)
            ids[0, : stop - start] = PACKED[b, start:stop]
            row |= {"initial_state": case["initial_state"][b : b + 1] * first, "segment_ids": jnp.asarray(ids)}
            wanted, last, _ = compiled(kda)(row | {"d_out": case["d_out"][:1], "d_state": case["d_state"][:1]})
            assert_close(out[b, start:stop], wanted[0, : stop - start], "op", f"row {b} at {start}")
        assert_close(state[b], last[0], "op", f"state of row {b}")
    np.testing.assert_array_equal(state[2], case["initial_state"][2])  # a row of padding


@FORMS
def test_padding_is_inert(kda):
    """Whatever stands at padding, NaN included, changes nothing; its output and gradients are zero."""
    case = packed_case()
    pad = PACKED == 0
    dirty = case | {n: jnp.where(pad.reshape(pad.shape + (1,) * (case[n].ndim - 2)), jnp.nan, case[n]) for n in INPUTS}
    jax.tree.map(np.testing.assert_array_equal, compiled(kda)(dirty), compiled(kda)(case))
    out, _, grads = compiled(kda)(dirty)
    for array in (out, *(grads[n] for n in INPUTS)):
        assert not np.asarray(array)[pad].any()


@FORMS
@pytest.mark.parametrize("position", [0, 15, 16, 40, 63, 64, 129])
def test_future_cannot_change_the_past(kda, position):
    """The output at a position has no gradient with respect to anything later, decays included."""
    case = random_case(5, B=1, S=130) | {"d_state": jnp.zeros((1, 2, 16, 8))}
    here = (jnp.arange(130) == position)[None, :, None, None]
    _, _, grads = compiled(kda)(case | {"d_out": case["d_out"] * here})
    for name in INPUTS:
        assert not np.asarray(grads[name])[:, position + 1 :].any(), name
        if name not in ("log_decay", "beta") or position:
            assert np.asarray(grads[name])[:, position].any(), name


@FORMS
@pytest.mark.parametrize("decay", [-5.0, -20.0, -1600.0, 0.0])
def test_decay_extremes(kda, decay):
    """Pinned at the bound, far below it (softplus gate) and absent: against float64."""
    case = random_case(6, B=1, S=130) | {"log_decay": jnp.full((1, 130, 2, 16), decay)}
    case["log_decay"] = case["log_decay"].at[:, 70:75, :, ::2].set(-1e-3)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in case.items()}
        wanted = jax.tree.map(np.asarray, jax.jit(lambda c: value_and_gradients(recurrence_float64, c))(exact))
    jax.tree.map(lambda a, b: assert_close(a, b, "op", f"decay {decay}"), compiled(kda)(case), wanted)


def recurrence_float64(q, k, v, log_decay, beta, initial_state, segment_ids):
    """The recurrence as written in the report, equation 1, with the matrix spelled out; one document."""
    assert segment_ids is None

    def token(state, xs):
        q, k, v, log_decay, beta = xs
        forget = jnp.eye(k.shape[-1]) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        write = beta[..., None, None] * k[..., None] * v[..., None, :]
        state = forget @ (jnp.exp(log_decay)[..., None] * state) + write
        return state, q.shape[-1] ** -0.5 * jnp.einsum("BHKV,BHK->BHV", state, q)

    state, out = jax.lax.scan(token, initial_state, [jnp.swapaxes(x, 0, 1) for x in (q, k, v, log_decay, beta)])
    return jnp.swapaxes(out, 0, 1), state


@FORMS
def test_split_with_carried_state_equals_one_shot(kda):
    case = random_case(7, B=2, S=130)
    inputs = [case[n] for n in INPUTS]
    run = jax.jit(kda)
    whole, final = run(*inputs, initial_state=case["initial_state"])
    first, state = run(*(x[:, :65] for x in inputs), initial_state=case["initial_state"])
    second, state = run(*(x[:, 65:] for x in inputs), initial_state=state)
    assert_close(jnp.concatenate([first, second], axis=1), whole, "op", "out")
    assert_close(state, final, "op", "final_state")


def test_decode_step_equals_the_recurrence():
    case = random_case(8, B=2, S=3)
    wanted, final = recurrent_kda(*(case[n] for n in INPUTS), initial_state=case["initial_state"])
    state = case["initial_state"]
    for t in range(3):
        out, state = kda_step(*(case[n][:, t] for n in INPUTS), state)
        assert_close(out, wanted[:, t], "op", f"token {t}")
    assert_close(state, final, "op", "final_state")


@FORMS
def test_bfloat16_is_computed_in_float32(kda):
    case = {name: x.astype(jnp.bfloat16) for name, x in random_case(9, B=1, S=65).items()}
    inputs = [case[n] for n in INPUTS]
    out, state = jax.jit(kda)(*inputs)
    wanted, wanted_state = jax.jit(kda)(*(x.astype(jnp.float32) for x in inputs))
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    np.testing.assert_array_equal(out, wanted.astype(jnp.bfloat16))
    np.testing.assert_array_equal(state, wanted_state)


@FORMS
@pytest.mark.parametrize("name", ["k", "v", "log_decay", "beta", "initial_state", "segment_ids"])
def test_wrong_shapes_are_refused(kda, name):
    case = random_case(1, B=1, S=4) | {"segment_ids": jnp.ones((1, 4), jnp.int32)}
    arguments = {n: case[n] for n in (*INPUTS, "initial_state", "segment_ids")}
    arguments[name] = arguments[name][:, :-1]
    with pytest.raises(ValueError, match=name):
        kda(**arguments)


def test_chunk_size_must_be_a_power_of_two():
    case = random_case(1, B=1, S=4)
    with pytest.raises(ValueError, match="48"):
        chunk_kda(*(case[n] for n in INPUTS), chunk_size=48)
