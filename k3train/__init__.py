"""Training framework for the Kimi K3 model family in JAX.

`load(workdir, step=None)` opens a trained or imported run, `PrefixCache` lets its answers reuse what prompts share;
importing the package itself loads nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3train.inference.run import PrefixCache, Run, load

__version__ = "0.1.0"
__all__ = ["PrefixCache", "Run", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name not in ("PrefixCache", "Run", "load"):
        raise AttributeError(f"module 'k3train' has no attribute {name!r}")
    from k3train.inference import run

    return getattr(run, name)
