"""Held-out loss: every batch once, averaged by token."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config.schema import DataConfig
from k3train.data.loader import make_eval_loader
from k3train.train.evaluate import evaluate


class Counting:
    """A program whose loss of a token is its id."""

    def __init__(self):
        self.seen = 0

    def put_batch(self, batch):
        return {name: jnp.asarray(rows) for name, rows in batch.items()}

    def eval_step(self, params, bias, batch):
        self.seen += 1
        return {"loss_sum": jnp.sum(batch["targets"] * batch["loss_mask"]), "tokens": jnp.sum(batch["loss_mask"])}


def batch(targets, mask):
    return {"targets": np.asarray([targets], np.int32), "loss_mask": np.asarray([mask], np.float32)}


def test_the_mean_is_over_tokens_not_over_batches():
    program = Counting()
    batches = [batch([1, 2, 3, 4], [1, 1, 1, 1]), batch([10, 0, 0, 0], [1, 0, 0, 0]), batch([9, 9, 9, 9], [0] * 4)]
    assert evaluate(program, {}, {}, batches) == {"eval/loss": 20 / 5, "eval/tokens": 5}
    assert program.seen == 3


@pytest.mark.parametrize("batches", [[], [batch([1, 2], [0, 0])]])
def test_nothing_to_average_is_an_error(batches):
    with pytest.raises(ValueError, match="no token that carries loss"):
        evaluate(Counting(), {}, {}, batches)


def test_the_batch_size_does_not_matter(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"held out {i} " * (3 + 2 * i))
    config = DataConfig(source="text", path=str(tmp_path), seq_len=16, eval_fraction=0.6, eval_batches=0)
    found = [evaluate(Counting(), {}, {}, make_eval_loader(replace(config, batch_size=size))) for size in (1, 3, 8, 64)]
    assert found[0]["eval/tokens"] > 100
    assert found == found[:1] * 4
