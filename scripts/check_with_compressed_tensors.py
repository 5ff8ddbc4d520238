"""An export with packed experts, read by the library whose format it is.

    python scripts/check_with_compressed_tensors.py EXPORT [--workdir RUN]

compressed-tensors makes a scheme of the export's own `quantization_config` and decodes every packed tensor; all bytes
are compared with what k3train decodes. With the run that was exported, it also packs the run's full-precision weights:
packed bytes and scales must be those of the export, and decoding must give the weights of the run's forward pass.
Needs the extra `hf`. Exit code 1 if anything differs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from k3train.checkpoint.safetensors_reader import SafetensorsReader
from k3train.ops.mx import BLOCK, decode_mxfp4

Packed = tuple[np.ndarray, np.ndarray]


def library(config: dict) -> tuple[Callable[[Packed], np.ndarray], Callable[[np.ndarray], Packed]]:
    """(decode, pack) of compressed-tensors for the scheme of a `config.json`."""
    import torch
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor as Compressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    said = (config.get("text_config") or config)["quantization_config"]
    scheme = QuantizationConfig.model_validate(said).config_groups["group_0"]
    assert scheme.weights is not None and Compressor.can_compress(torch.nn.Linear, scheme)

    def decode(packed: Packed) -> np.ndarray:
        state = {
            name: torch.from_numpy(a.copy()) for name, a in zip(("weight_packed", "weight_scale"), packed, strict=True)
        }
        return Compressor.decompress(state, scheme)["weight"].float().numpy()

    def pack(weights: np.ndarray) -> Packed:
        blocks = weights.reshape(len(weights), -1, BLOCK)
        smallest, largest = (torch.from_numpy(x) for x in (blocks.min(axis=-1), blocks.max(axis=-1)))
        scale, _ = calculate_qparams(smallest, largest, scheme.weights)
        done = Compressor.compress({"weight": torch.from_numpy(weights), "weight_scale": scale}, scheme)
        return done["weight_packed"].numpy(), done["weight_scale"].numpy()

    return decode, pack


def forward_weights(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Routed experts as the forward pass of a run multiplies with them, by released name."""
    import k3train
    from k3train.checkpoint.hf_export import layout_of
    from k3train.checkpoint.hf_names import entries
    from k3train.core.tree import leaves

    run = k3train.load(workdir, step)
    arrays = {path: np.asarray(array) for path, array in leaves(run.weights.params)}
    return {
        name: entry.to_released([arrays[path][entry.where(i, e)] for i, path in enumerate(entry.paths)])
        for entry in entries(run.config.model, layout_of(run.config.model))
        if entry.num_experts
        for e, name in enumerate(entry.names())
    }


def masters(workdir: Path) -> tuple[dict[str, np.ndarray], int]:
    """Routed experts in full precision, by released name; the step they are of."""
    from k3train.checkpoint.hf_export import export_hf

    with tempfile.TemporaryDirectory() as folder:
        exported = export_hf(workdir, Path(folder) / "masters", experts="f32")
        with SafetensorsReader(exported.folder) as reader:
            return {name: reader.read(name) for name in reader.headers if ".experts." in name}, exported.step


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--workdir", type=Path, help="the run that was exported, at its newest step")
    args = parser.parse_args()

    import compressed_tensors

    decode, pack = library(json.loads((args.export / "config.json").read_text()))
    full, step = masters(args.workdir) if args.workdir else ({}, 0)
    forward = forward_weights(args.workdir, step) if args.workdir else {}
    faults: list[str] = []
    with SafetensorsReader(args.export) as reader:
        names = [name.removesuffix("_packed") for name in reader.headers if name.endswith(".weight_packed")]
        faults += [f"{name}: not in the export" for name in full.keys() - set(names)]
        size = 0
        for name in names:
            packed = reader.read(f"{name}_packed"), reader.read(f"{name}_scale")
            weights = decode(packed)
            size += sum(array.nbytes for array in packed)
            checks = {"decoded otherwise by k3train": same(weights, decode_mxfp4(*packed))}
            if args.workdir:
                again = pack(full[name])
                checks["packed otherwise from the run"] = all(map(same, again, packed))
                checks["not the weights of the forward pass"] = same(weights, forward[name])
            faults += [f"{name}: {what}" for what, right in checks.items() if not right]
    print(
        f"compressed-tensors {compressed_tensors.__version__}: {len(names)} packed tensors, {size:,} bytes, "
        f"{len(faults)} differences{'' if args.workdir else ' (decoding only)'}"
    )
    for fault in faults[:20]:
        print(f"  {fault}")
    sys.exit(bool(faults or not names))


if __name__ == "__main__":
    main()
