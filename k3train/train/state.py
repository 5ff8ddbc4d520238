"""Everything a run is, apart from its data position: what is saved, restored and donated to the step."""

from typing import NamedTuple

import jax
import optax

from k3train.core.tree import Tree


class TrainState(NamedTuple):
    """Parameters, optimizer state and router bias are float32; the counters int32 scalars."""

    params: Tree
    opt_state: optax.OptState
    bias: Tree  # router biases [layers, experts]
    step: jax.Array  # batches consumed
    nonfinite: jax.Array  # steps skipped so far because something was not finite
    nonfinite_streak: jax.Array  # skipped steps in a row, up to now
