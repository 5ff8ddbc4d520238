"""Checkpoints: complete or absent, strict, the same on any mesh."""

import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3train.checkpoint.orbax import Checkpoints, SaveError
from k3train.parallel.mesh import make_mesh


def model(fill=0.0, width=8, extra=False):
    params = {"embed": jnp.full((16, width), float(fill)), "layers": {"0": {"w": jnp.arange(4.0) + fill}}}
    return {"params": params | ({"head": jnp.zeros(3)} if extra else {}), "bias": {}}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_round_trip_of_an_optimizer_tree_and_its_record(tmp_path):
    """Named tuples, empty states and counters come back in place, equal to the last bit."""
    params = model(1.5)["params"]
    opt_state = optax.adam(1e-3).init(params)
    opt_state = jax.tree.map(lambda x: x + 3, opt_state)
    optimizer = {"opt_state": opt_state, "step": jnp.int32(7)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": {"params": params}, "optimizer": optimizer}, {"data": {"row": 3}})
    reader = Checkpoints(tmp_path)
    got = reader.restore(7, {"model": abstract({"params": params}), "optimizer": abstract(optimizer)})
    assert jax.tree.structure(got["optimizer"]) == jax.tree.structure(optimizer)
    for want, have in zip(jax.tree.leaves(optimizer), jax.tree.leaves(got["optimizer"]), strict=True):
        assert want.dtype == have.dtype
        np.testing.assert_array_equal(want, have)
    np.testing.assert_array_equal(got["model"]["params"]["embed"], params["embed"])
    assert reader.record(7) == {"data": {"row": 3}}
    assert reader.restore(7, {"model": abstract({"params": params})}).keys() == {"model"}


def test_saved_on_one_mesh_restored_on_others(tmp_path):
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    devices = jax.devices()

    def on(sizes, spec):
        count = int(np.prod(list(sizes.values())))
        return NamedSharding(make_mesh(sizes, devices[:count]), spec)

    with Checkpoints(tmp_path) as checkpoints:
        saved = jax.device_put(value, on({"data": 2, "expert": 4}, P("data", "expert")))
        checkpoints.save(1, {"model": {"w": saved}}, {})
    for sizes, spec in [({"data": 1}, P()), ({"data": 8}, P("data")), ({"data": 4, "tensor": 2}, P("tensor", "data"))]:
        sharding = on(sizes, spec)
        want = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}
        got = Checkpoints(tmp_path).restore(1, {"model": want})["model"]["w"]
        assert got.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(got, value)


def test_a_save_is_not_disturbed_by_donation(tmp_path):
    """The arrays may be overwritten as soon as `save` returns."""
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    mesh = make_mesh({"data": 8})
    split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    zeros = jnp.zeros((512, 1024))
    state = step({"split": jax.device_put(zeros, split), "everywhere": jax.device_put(zeros, everywhere)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": state}, {})
        for _ in range(5):
            state = step(state)
        checkpoints.save(6, {"model": state}, {})
    for number in (1, 6):
        got = Checkpoints(tmp_path).restore(number, {"model": abstract(state)})["model"]
        assert {name: np.unique(leaf).tolist() for name, leaf in got.items()} == dict.fromkeys(state, [number])


def test_retention_keeps_the_newest(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"model": model(step)}, {"step": step})
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.latest() == 3
    assert checkpoints.record(3) == {"step": 3}


def test_restore_lists_every_leaf_that_differs(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model(extra=True)}, {})
    other = abstract(model(width=4))
    other["params"]["layers"]["1"] = other["params"]["layers"]["0"]
    other["params"]["layers"]["0"] = {"w": jax.ShapeDtypeStruct((4,), jnp.int32)}
    with pytest.raises(ValueError) as error:
        Checkpoints(tmp_path).restore(1, {"model": other})
    lines = str(error.value).splitlines()
    assert "another model" in lines[0]
    assert [line.split() for line in lines[1:]] == [
        "missing params/layers/1/w: expected float32[4]".split(),
        "extra params/head: checkpoint has float32[3]".split(),
        "differs params/embed: checkpoint has float32[16, 8], expected float32[16, 4]".split(),
        "differs params/layers/0/w: checkpoint has float32[4], expected int32[4]".split(),
    ]
    with pytest.raises(ValueError, match="holds no optimizer"):
        Checkpoints(tmp_path).restore(1, {"optimizer": other})


def test_leaves_are_listed_from_metadata(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model()}, {})
    found = Checkpoints(tmp_path).leaves(1)
    assert [(leaf.path, str(leaf)) for leaf in found] == [
        ("params/embed", "float32[16, 8]"),
        ("params/layers/0/w", "float32[4]"),
    ]
    assert Checkpoints(tmp_path).leaves(1, "optimizer") == []


def test_partial_checkpoints_are_named_refused_and_replaced(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model(1)}, {})
    (tmp_path / "2.orbax-checkpoint-tmp" / "model").mkdir(parents=True)
    shutil.copytree(tmp_path / "1", tmp_path / "3")
    (tmp_path / "3" / "_CHECKPOINT_METADATA").unlink()  # a copy cut short
    (tmp_path / "notes").mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [1]
    assert checkpoints.resolve(None) == 1
    assert checkpoints.incomplete() == ["2.orbax-checkpoint-tmp", "3"]
    for step in (2, 3):
        with pytest.raises(ValueError, match=rf"{step} .*incomplete.*complete: 1"):
            checkpoints.restore(step, {"model": abstract(model())})
    with pytest.raises(ValueError, match="no checkpoint of step 5"):
        checkpoints.record(5)
    with checkpoints:
        for step in (2, 3):
            checkpoints.save(step, {"model": model(step)}, {})
    assert checkpoints.steps() == [1, 2, 3]
    assert checkpoints.incomplete() == []
    got = checkpoints.restore(3, {"model": abstract(model())})
    assert float(got["model"]["params"]["embed"][0, 0]) == 3


def test_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "absent")
    assert checkpoints.latest() is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        checkpoints.resolve(None)
    assert not (tmp_path / "absent").exists()


def test_a_failed_save_names_step_and_cause_and_keeps_the_former(tmp_path):
    """Files may not grow any more, as on a full disk: with keep=1 the former checkpoint stays."""
    big = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)), jnp.float32)}
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"model": {"w": big["w"] + 1}}, {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(SaveError, match=r"step 2 .*File too large; the newest complete checkpoint is step 1"):
            checkpoints.save(2, {"model": big}, {})
            while True:  # reported by asking, without waiting for it
                checkpoints.check()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoints.close()
    fresh = Checkpoints(tmp_path)
    assert fresh.steps() == [1]
    np.testing.assert_array_equal(fresh.restore(1, {"model": abstract(big)})["model"]["w"], big["w"] + 1)


_WRITER = """
import sys, jax.numpy as jnp
from k3train.checkpoint.orbax import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
for step in range(1, 1000):
    checkpoints.save(step, {"model": {"w": jnp.full((256, 1024), float(step))}}, {"step": step})
    print(step, flush=True)
"""


def test_killed_in_mid_save_leaves_one_to_restore(tmp_path):
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 4:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    checkpoints = Checkpoints(tmp_path)
    step = checkpoints.resolve(None)
    assert step >= 3
    want = {"w": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
    assert np.unique(checkpoints.restore(step, {"model": want})["model"]["w"]).tolist() == [step]
    assert checkpoints.record(step) == {"step": step}
