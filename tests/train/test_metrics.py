"""Names, files and lines of metrics."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from k3train.train import metrics
from k3train.train.metrics import METRICS, Clock, Writer, collapsed_routing, duration, progress

RECORD = {"loss": 2.5, "step": 20, "learning_rate": 1e-3, "router/max_over_mean_load": 1.25, "eval/loss": 2.25}


def test_the_table_holds_the_names_that_others_rely_on():
    promised = (
        "step loss grad_norm learning_rate tokens_per_second tokens_seen router/max_over_mean_load "
        "router/max_violation router/dropped_fraction mla/max_logit qk_clip/num_clipped nonfinite_steps eval/loss"
    )
    assert set(promised.split()) <= METRICS.keys()
    assert set(metrics.WALL_CLOCK) <= METRICS.keys()
    assert not set(metrics.INTERNAL) & METRICS.keys()


def test_records_are_appended_in_the_order_of_the_table(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with Writer(file, None, 0) as writer:
        writer.write(RECORD)
    with Writer(file, None, 20) as writer:
        writer.write({"step": 21, "loss": float("nan")})
        assert len(file.read_text().splitlines()) == 2  # there before the file is closed
        writer.sync()
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert first == RECORD
    assert list(first) == [name for name in METRICS if name in RECORD]
    assert second == {"step": 21, "loss": None}


def test_a_name_without_a_line_in_the_table_is_our_fault(tmp_path):
    with Writer(tmp_path / "m", None, 0) as writer, pytest.raises(AssertionError, match="losss"):
        writer.write({"step": 1, "losss": 1.0})


def events(folder):
    """What TensorBoard will read: a sequence of events, each framed by its length (8 bytes) and two checksums (4)."""
    data = next(folder.iterdir()).read_bytes()
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        yield from ((value.tag, event.step, value) for value in event.summary.value)
        at += 16 + length


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with Writer(tmp_path / "m", tmp_path / "tb", 0) as writer:
        writer.write(RECORD)
    seen = {(tag, step): value.simple_value for tag, step, value in events(tmp_path / "tb")}
    assert seen == {(name, 20): pytest.approx(value) for name, value in RECORD.items() if name != "step"}


def test_tensorboard_gets_a_histogram_of_loads_for_every_layer(tmp_path):
    loads = {1: np.asarray([10, 10, 20, 0]), 12: np.asarray([0, 0, 0, 0])}
    with Writer(tmp_path / "m", tmp_path / "tb", 0) as writer:
        writer.write(RECORD, loads)
        writer.write(RECORD | {"step": 30})
    drawn = {(tag, step): value.histo for tag, step, value in events(tmp_path / "tb") if value.HasField("histo")}
    assert drawn.keys() == {(f"router/load_over_mean/layer_{layer}", 20) for layer in ("01", "12")}
    first = drawn["router/load_over_mean/layer_01", 20]
    assert (first.min, first.max, first.num, first.sum) == (0, 2, 4, 4)
    at = {round(limit, 2): count for limit, count in zip(first.bucket_limit, first.bucket, strict=True) if count}
    assert at == {0.05: 1, 1.05: 2, 2.0: 1}  # right edges


def test_device_scalars_are_read_as_numbers():
    read = metrics.read({"loss": jnp.float32(0.1), "nonfinite_steps": jnp.int32(3)})
    assert read == {"loss": float(jnp.float32(0.1)), "nonfinite_steps": 3}
    assert isinstance(read["nonfinite_steps"], int)


def test_progress_line():
    line = "step  20/600  loss 2.5000  held-out 2.2500  lr 1.00e-03  load 1.25  ETA 1m05s"
    assert progress(RECORD, 600, 65.0) == line
    last = {"step": 600, "loss": 2.0, "learning_rate": 1e-3, "tokens_per_second": 31_234.5}
    assert progress(last, 600, 0.0) == "step 600/600  loss 2.0000  lr 1.00e-03  31,234 tokens/s"


def test_collapsed_routing_is_said():
    def said(worst, num_selected=2, loss=1.0):
        return collapsed_routing({"loss": loss, "router/max_over_mean_load": worst}, 8, num_selected)

    assert said(3.9) == "one expert is chosen by 98 % of the tokens, 2 of 8 experts a token"
    assert said(3.5) == said(4.0, loss=float("nan")) == said(1.0, num_selected=8) == ""
    assert collapsed_routing({"loss": 1.0}, 8, 2) == ""


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273_600, "3d04h")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_clock_leaves_out_the_first_step_and_evaluations(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    clock = Clock()

    def after(seconds, tokens=100):
        now[0] += seconds
        clock.arrived(tokens)

    after(60.0)  # compiles
    assert clock.rate() is None and clock.left(10) is None
    after(1.0)
    after(1.0)
    assert clock.rate() == 100.0
    now[0] += 30.0  # an evaluation
    clock.resume()
    after(2.0)
    assert clock.rate() == 50.0
    assert clock.left(3) == pytest.approx(3 * 4 / 3)
