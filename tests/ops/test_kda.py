"""KDA: golden files, chunked form against the recurrence, packing, padding, causality, sharding.

Golden cases of one head size are stacked into one padded batch, so that each form compiles once for all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.ops import kda_chunk
from k3train.ops.kda_chunk import chunk_kda
from k3train.ops.kda_gate import bounded_log_decay, l2_normalise
from k3train.ops.kda_reference import kda_step, recurrent_kda
from tests.ops.kda_cases import DATA, INPUTS, GoldenRow, golden, random_case, run_golden_rows, value_and_gradients
from tests.tolerances import assert_close

FORMS = {
    "recurrent": recurrent_kda,
    "chunk": chunk_kda,
    "chunk, bounded": functools.partial(chunk_kda, min_log_decay=-5.0),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
ONE_DOCUMENT = ["a_plain_T64", "b_T130", "c_initial_state", "e_strong_decay_T256", "e2_mixed_decay_T256",
                "f_repeated_keys_T128"]  # fmt: skip
PACKED_GOLDEN = ["d_packed3", "d2_packed3_initial_state"]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)


@functools.cache
def compiled(form: str):
    """Value and gradients of a form, compiled once per set of shapes."""
    return jax.jit(lambda case: value_and_gradients(FORMS[form], case))


def test_every_golden_is_here():
    assert len(list(DATA.glob("*.npz"))) == 13


@functools.cache
def golden_results(form: str):
    rows = [GoldenRow(name, b, None) for name in [*ONE_DOCUMENT, "d_packed3"] for b in range(len(golden(name)["q"]))]
    rows += [GoldenRow(name, b, n) for name in PACKED_GOLDEN for b in range(len(golden(name)["q"])) for n in range(3)]
    return run_golden_rows(rows, compiled(form))


@EVERY_FORM
@pytest.mark.parametrize("name", ONE_DOCUMENT + PACKED_GOLDEN)
def test_golden(form, name):
    """Outputs, final states and gradients; packed rows as they are, and every document alone."""
    found = [arrays for row, arrays in golden_results(form).items() if row.name == name]
    for what in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"):
        pairs = [arrays[what] for arrays in found if what in arrays]
        assert pairs or what in ("final_state", "dinitial_state")
        if pairs:
            got, wanted = (np.concatenate([np.ravel(pair[side]) for pair in pairs]) for side in (0, 1))
            assert_close(got, wanted, "op" if what in ("o", "final_state") else "op gradient", f"{name} {what}")


@pytest.mark.parametrize("form", ["recurrent", "chunk, bounded"])
def test_golden_head_size_of_the_release(form):
    file = golden("k_headdim128_T70")
    names = {"q": "q", "k": "k", "v": "v", "log_decay": "g", "beta": "beta", "d_out": "do", "d_state": "dfinal_state"}
    out, state, grads = compiled(form)({name: jnp.asarray(file[key]) for name, key in names.items()})
    assert_close(out, file["o"], "op", "out")
    assert_close(state, file["final_state"], "op", "final_state")
    for name, grad in grads.items():
        assert_close(grad, file[f"d{names[name]}"], "op gradient", name)


def test_golden_front_end():
    """Normalisation, gate and sigmoid in front of the chunked form."""
    file = golden("h_fused_frontend")
    names = ("q_raw", "k_raw", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")
    bound = float(file["lower_bound"])

    def loss(inputs):
        z = inputs["raw_gate"] + inputs["dt_bias"].reshape(inputs["raw_gate"].shape[-2:])
        log_decay = bounded_log_decay(z, inputs["A_log"], bound)
        q, k, beta = l2_normalise(inputs["q_raw"]), l2_normalise(inputs["k_raw"]), jax.nn.sigmoid(inputs["beta_logits"])
        out, state = chunk_kda(q, k, inputs["v"], log_decay, beta, min_log_decay=bound)
        return jnp.sum(out * file["do"]) + jnp.sum(state * file["dfinal_state"]), (out, state)

    inputs = {name: jnp.asarray(file[name]) for name in names}
    grads, (out, state) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    assert_close(out, file["o"], "op", "out")
    assert_close(state, file["final_state"], "op", "final_state")
    for name in names:
        assert_close(grads[name], file[f"d{name}"], "op gradient", name)


def assert_forms_agree(case, form):
    wanted_out, wanted_state, wanted_grads = compiled("recurrent")(case)
    out, state, grads = compiled(form)(case)
    assert_close(out, wanted_out, "op", "out")
    assert_close(state, wanted_state, "op", "final_state")
    for name, grad in grads.items():
        assert_close(grad, wanted_grads[name], "op gradient", name)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_equals_the_recurrence(length):
    assert_forms_agree(random_case(length, B=1, S=length), "chunk, bounded")


PACKED = np.array(
    [
        [0] * 3 + [4] * 20 + [0] * 2 + [4] * 5 + [2] + [4] * 40 + [9] * 45 + [0] * 14,
        [1] * 64 + [2] * 64 + [3] * 2,
        [0] * 130,
    ],
    np.int32,
)
DOCUMENTS = {0: [(3, 30), (30, 31), (31, 71), (71, 116)], 1: [(0, 64), (64, 128), (128, 130)]}  # borders, row by row


def packed_case():
    return random_case(11, B=3, S=130) | {"segment_ids": jnp.asarray(PACKED)}


@pytest.mark.parametrize("form", ["chunk", "chunk, bounded"])
def test_packed_rows_with_padding_anywhere_equal_the_recurrence(form):
    assert_forms_agree(packed_case(), form)


@EVERY_FORM
def test_packed_documents_equal_documents_apart(form):
    """The first document of a row continues the initial state, an id that comes back starts afresh."""
    case = packed_case()
    out, state, _ = compiled(form)(case)
    for row, documents in DOCUMENTS.items():
        alone = {n: np.zeros_like(case[n]) for n in (*INPUTS, "segment_ids", "initial_state")}
        for i, (start, stop) in enumerate(documents[-3:]):
            for n in (*INPUTS, "segment_ids"):
                alone[n][i, : stop - start] = case[n][row, start:stop]
        if len(documents) == 3:
            alone["initial_state"][0] = case["initial_state"][row]
        wanted, last, _ = compiled(form)(case | {n: jnp.asarray(x) for n, x in alone.items()})
        for i, (start, stop) in enumerate(documents[-3:]):
            assert_close(out[row, start:stop], wanted[i, : stop - start], "op", f"row {row} from {start}")
        assert_close(state[row], last[2], "op", f"state of row {row}")
    np.testing.assert_array_equal(state[2], case["initial_state"][2])  # a row of padding


@EVERY_FORM
def test_padding_is_inert(form):
    """Whatever stands at padding, NaN included, changes nothing; its output and gradients are zero."""
    case = packed_case()
    pad = PACKED == 0
    dirty = case | {
        n: jnp.where(pad.reshape(pad.shape + (1,) * (case[n].ndim - 2)), jnp.nan, case[n]) for n in (*INPUTS, "d_out")
    }
    clean_out, clean_state, clean_grads = compiled(form)(case)
    undifferentiated = jax.jit(FORMS[form])(*(dirty[n] for n in INPUTS), segment_ids=dirty["segment_ids"])[0]
    assert not np.asarray(undifferentiated)[pad].any()
    out, state, grads = compiled(form)(dirty | {"d_out": case["d_out"]})
    np.testing.assert_array_equal(out, clean_out)
    np.testing.assert_array_equal(state, clean_state)
    jax.tree.map(np.testing.assert_array_equal, grads, clean_grads)
    for array in (out, *(grads[n] for n in INPUTS)):
        assert not np.asarray(array)[pad].any()


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("position", [0, 15, 16, 40, 63, 64, 129])
def test_future_cannot_change_the_past(form, position):
    """The output at a position has no gradient with respect to anything later, decays included."""
    case = random_case(5, B=1, S=130) | {"d_state": jnp.zeros((1, 2, 16, 8))}
    here = (jnp.arange(130) == position)[None, :, None, None]
    _, _, grads = compiled(form)(case | {"d_out": case["d_out"] * here})
    for name in INPUTS:
        assert not np.asarray(grads[name])[:, position + 1 :].any(), name
        assert np.asarray(grads[name])[:, position].any(), name


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


@functools.cache
def compiled_float64():
    return jax.jit(lambda case: value_and_gradients(recurrence_float64, case))


def decay_case(decay: float, exception: float):
    """One decay for all tokens but five, which take another in every other channel."""
    case = random_case(6, B=1, S=130)
    log_decay = jnp.full_like(case["log_decay"], decay)
    return case | {"log_decay": log_decay.at[:, 70:75, :, ::2].set(exception)}


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("decay, exception", [(-5, -5), (-20, -20), (-1600, -1e-3), (-1e-3, -60), (0, 0)])
def test_any_decay(form, decay, exception):
    """Pinned at the bound, far below it (softplus gate), mixed and absent: finite and right against float64."""
    case = decay_case(decay, exception)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in case.items()}
        wanted = jax.tree.map(np.asarray, compiled_float64()(exact))
    jax.tree.map(lambda got, want: assert_close(got, want, "op gradient", f"{decay}"), compiled(form)(case), wanted)


def test_a_broken_promise_about_decays_is_not_silent():
    case = decay_case(-12.0, -12.0)
    out, _, _ = compiled("chunk, bounded")(case)
    assert not np.isfinite(out).all()


@pytest.mark.parametrize("form", ["recurrent", "chunk, bounded"])
def test_split_with_carried_state_equals_one_shot(form):
    case = random_case(7, B=1, S=130)
    parts = [
        {n: x[:, part] if n in (*INPUTS, "d_out") else x for n, x in case.items()}
        for part in (slice(0, 65), slice(65, 130))
    ]
    whole, final, _ = compiled(form)(case)
    first, state, _ = compiled(form)(parts[0])
    second, state, _ = compiled(form)(parts[1] | {"initial_state": state})
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


def test_several_chunks_at_once_change_nothing(monkeypatch):
    """As on accelerators, and with short chunks: five steps of two chunks, the last one padded."""
    monkeypatch.setattr(kda_chunk, "CPU_CHUNKS_AT_ONCE", 2)
    case = packed_case()
    kda = functools.partial(chunk_kda, chunk_size=16, min_log_decay=-5.0)
    got = jax.jit(lambda case: value_and_gradients(kda, case))(case)
    jax.tree.map(lambda a, b: assert_close(a, b, "op gradient"), got, compiled("recurrent")(case))


@pytest.mark.parametrize("largest_state", [0, 4096])
def test_undifferentiated_chunked_and_recurrent_on_a_cpu(monkeypatch, largest_state):
    monkeypatch.setattr(kda_chunk, "CPU_RECURRENCE_STATE", largest_state)
    case = packed_case()
    got = jax.jit(lambda **inputs: chunk_kda(**inputs))(
        **{n: case[n] for n in (*INPUTS, "initial_state", "segment_ids")}
    )
    jax.tree.map(lambda a, b: assert_close(a, b, "op"), got, compiled("recurrent")(case)[:2])


def test_bfloat16_is_computed_in_float32():
    case = {name: x.astype(jnp.bfloat16) for name, x in random_case(9, B=1, S=65).items() if name != "initial_state"}
    exact = {name: x.astype(jnp.float32) for name, x in case.items()} | {"initial_state": jnp.zeros((1, 2, 16, 8))}
    wanted_out, wanted_state, wanted_grads = compiled("chunk, bounded")(exact)
    out, state, grads = compiled("chunk, bounded")(case)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    np.testing.assert_array_equal(state, wanted_state)
    np.testing.assert_array_equal(out, wanted_out.astype(jnp.bfloat16))
    for name, grad in grads.items():
        assert grad.dtype == jnp.bfloat16
        error = np.abs(np.asarray(grad, np.float32) - wanted_grads[name]).max() / np.abs(wanted_grads[name]).max()
        assert error < 2**-7, (name, error)


def test_sharded_over_rows_and_heads_without_communication():
    """Values and gradients of one device, and no collective in the program."""
    case = random_case(10, B=2, S=80, H=4) | {"segment_ids": jnp.asarray([[1] * 30 + [2] * 40 + [0] * 10] * 2)}
    wanted = compiled("recurrent")(case)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "heads"))
    heads_at = {"initial_state": 1, "d_state": 1, "segment_ids": None}

    def place(name, x):
        axes = ["rows"] + [None] * (x.ndim - 1)
        if heads_at.get(name, 2) is not None:
            axes[heads_at.get(name, 2)] = "heads"
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    placed = {name: place(name, x) for name, x in case.items()}
    program = jax.jit(lambda case: value_and_gradients(FORMS["chunk, bounded"], case)).lower(placed).compile()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in program.as_text()
    jax.tree.map(lambda got, want: assert_close(got, want, "op gradient"), program(placed), wanted)


def test_inside_scan_and_checkpoint():
    """Two layers, each reading the other's output: scanned with rematerialisation equals a Python loop."""
    case = random_case(12, B=1, S=40, V=16)
    v_scales = jnp.asarray([1.0, 0.5])

    def layer(v, scale):
        out, _ = chunk_kda(case["q"], case["k"], v * scale, case["log_decay"], case["beta"], min_log_decay=-5.0)
        return v + out, None

    def scanned(v):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), v, v_scales)[0] * case["d_out"])

    def looped(v):
        def plain(v, scale):
            return v + recurrent_kda(case["q"], case["k"], v * scale, case["log_decay"], case["beta"])[0]

        return jnp.sum(plain(plain(v, 1.0), 0.5) * case["d_out"])

    assert_close(jax.jit(jax.grad(scanned))(case["v"]), jax.jit(jax.grad(looped))(case["v"]), "op gradient")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("name", ["k", "v", "log_decay", "beta", "initial_state", "segment_ids"])
def test_wrong_shapes_are_refused(form, name):
    case = random_case(1, B=1, S=4) | {"segment_ids": jnp.ones((1, 4), jnp.int32)}
    arguments = {n: case[n] for n in (*INPUTS, "initial_state", "segment_ids")}
    arguments[name] = arguments[name][:, :-1]
    with pytest.raises(ValueError, match=name):
        FORMS[form](**arguments)


@pytest.mark.parametrize("chunk_size", [48, 8, 0])
def test_chunk_size_must_be_a_power_of_two(chunk_size):
    case = random_case(1, B=1, S=4)
    with pytest.raises(ValueError, match=f"got {chunk_size}"):
        chunk_kda(*(case[n] for n in INPUTS), chunk_size=chunk_size)
