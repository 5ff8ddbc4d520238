"""How matrices are drawn (docs/k3.md section 2.1: std 0.02 is in the code, the rest is unpublished)."""

from math import sqrt

from k3train.config.schema import ModelConfig
from k3train.core.param import Initializer, Normal


def matrix(config: ModelConfig, fan_in: int) -> Initializer:
    """Normal with `init_std`, or 1/sqrt(fan_in) where the config asks for it."""
    return Normal(1 / sqrt(fan_in) if config.init_fan_in else config.init_std)
