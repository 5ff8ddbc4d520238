"""Eight simulated CPU devices, float32 matmuls, compiled programs kept between runs."""

import os
from importlib.metadata import version
from pathlib import Path

# Both also for the processes that tests start. The tests run many programs once each: compiling them without LLVM's
# optimisations and by the older of XLA's two emitters takes a quarter of the time and changes none of their operations.
# Later versions than 0.10 have a single emitter, and end at a flag that they do not know.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    f"{' --xla_cpu_use_fusion_emitters=false' if version('jaxlib').startswith('0.10.') else ''}"
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "float32")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first, everything else in the order it came: no worker ends alone with a file that takes a minute."""
    items.sort(key=lambda item: "end_to_end" not in item.path.parts)
