"""The devices of a process, decided before jax first looks for them."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import jax

_LOG = logging.getLogger(__name__)
_FORCED = "xla_force_host_platform_device_count"


def prepare_devices(
    need: int, asked: int | None = None, *, processes: int = 1, join: Callable[[], None] | None = None
) -> int:
    """Make the devices there; where there is no accelerator, simulate as many CPU devices as the mesh needs.

    Args:
        need: devices of the mesh.
        asked: devices to simulate instead (`--devices`).
        processes: how many share the devices; each simulates its part.
        join: brings the processes together, before jax looks for devices.

    Returns:
        The number of devices there are.

    Raises:
        ValueError: `asked` is not positive, or not what an accelerator machine has.
    """
    count = need if asked is None else asked
    if count < 1:
        raise ValueError(f"--devices {count}: must be at least 1")
    if count % processes:
        raise ValueError(f"{count} devices cannot be shared out evenly to {processes} processes")
    simulated = _simulate(count // processes)
    if join is not None:
        join()
    there, platform = len(jax.devices()), jax.default_backend()
    if platform != "cpu" and asked not in (None, there):
        raise ValueError(
            f"--devices {asked}: only CPU devices can be simulated, and this machine has {there} {platform}"
        )
    if platform == "cpu" and simulated and there > 1:
        _LOG.info("no accelerator found: simulating %d devices on the CPU", there)
    return there


def _simulate(count: int) -> bool:
    """Ask jax for this many CPU devices; False if it is too late or the environment has asked already."""
    if _FORCED in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the devices exist already
        return False
    return True


def keep_compiled_programs() -> None:
    """Keep compiled programs between starts, in the user's cache folder unless jax has been given one."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "k3train" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
