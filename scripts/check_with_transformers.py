"""Hugging Face transformers reads what k3train writes, computes the same, and k3train reads what transformers writes.

A randomly initialised Kimi-Linear is exported in Moonshot's and in transformers' naming, loaded by
`AutoModelForCausalLM`, and compared: logits within 1e-4, 20 greedy tokens. Then transformers saves it, in float32 and
in bfloat16; both are imported and exported again, to the same bytes.

Run:   pip install -e '.[hf]' && python scripts/check_with_transformers.py
Needs: torch (CPU will do) and transformers 5.24 or newer; a minute. Ends with 1 if anything differs.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from safetensors import safe_open

import k3train
from k3train.checkpoint.hf_export import export_hf
from k3train.checkpoint.hf_import import import_hf
from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import Config, ModelConfig
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint

MODEL = ModelConfig(
    vocab_size=512,
    pad_token_id=511,
    hidden_size=128,
    num_layers=5,
    kda_layers=(0, 1, 2, 4),
    mla_layers=(3,),
    dense_layers=(0,),
    moe_layers=(1, 2, 3, 4),
    activation="swiglu",
    intermediate_size=192,
    kda_gate="softplus",
    kda_output_gate="low_rank",
    mla_q_lora_rank=0,
    mla_output_gate=False,
    attn_res="none",
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=1,
    moe_intermediate_size=64,
    moe_latent_size=0,
    moe_routed_scaling_factor=2.446,
    init_std=0.08,
    embedding_init_std=1.0,
)
LOGITS = 1e-4
GREEDY = 20
_failed: list[str] = []


def say(what: str, good: bool, figures: str = "") -> None:
    print(f"{'ok  ' if good else 'FAIL'} {what}{': ' if figures else ''}{figures}", flush=True)
    if not good:
        _failed.append(what)


def make_run(folder: Path, seed: int) -> None:
    """Fresh weights, every number moved a little: a bias of zero or a gain of one would hide a mistake."""
    draw = np.random.default_rng(seed)
    plan = blueprint(MODEL)
    params, bias = jax.tree.map(
        lambda x: (np.asarray(x) + 0.05 * draw.normal(size=x.shape)).astype(np.float32), plan.init(seed)
    )
    params["embed"]["table"][MODEL.pad_token_id] = 0
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, {"model": {"params": params, "bias": bias}}, {})
    (folder / "config.json").write_text(to_json(Config(model=MODEL)))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    weights = k3train.load(folder).weights
    return {path: np.asarray(x) for tree in weights for path, x in leaves(tree)}


def load_in_transformers(folder: Path) -> torch.nn.Module:
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    wrong = {key: names for key, names in about.items() if names}
    say(f"transformers loads {folder.name}, no name missing or left over", not wrong, str(wrong or ""))
    return model.eval()


def compare(run: k3train.Run, model: torch.nn.Module, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed + 1)
    tokens = draw.integers(0, MODEL.vocab_size - 1, (2, 70))
    ours = run.logits(tokens)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    worst = float(np.abs(ours - theirs).max())
    say(f"{name}: logits", worst <= LOGITS, f"largest difference {worst:.1e}, standard deviation {theirs.std():.2f}")
    for length in (1, 9, 64):
        prompt = tokens[0, :length].tolist()
        mine = run.generate([prompt], max_tokens=GREEDY, temperature=0, stop=())[0]
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=GREEDY, do_sample=False, eos_token_id=None, pad_token_id=511
            )
        same = mine == out[0, length:].tolist()
        say(f"{name}: {GREEDY} greedy tokens after {length}", same, " ".join(map(str, mine[:6])) + " ...")


def raw(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(name, dtype, bytes) of every tensor, by torch."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor = tensors.get_tensor(name)
                yield name, str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read_back(model: torch.nn.Module, saved: Path, dtype: torch.dtype, wanted: dict[str, np.ndarray]) -> None:
    """Import what transformers saves, export it, and compare with the start of it all."""
    model.to(dtype).save_pretrained(saved)
    run, out = saved.with_name(f"{saved.name}_run"), saved.with_name(f"{saved.name}_again")
    import_hf(saved, run)
    got = weights_of(run)
    if dtype == torch.float32:
        apart = [path for path, x in wanted.items() if not np.array_equal(got[path], x)]
        say(f"{saved.name}: every parameter comes back", got.keys() == wanted.keys() and not apart, ", ".join(apart))
    export_hf(run, out)
    before, after = sorted(raw(saved)), sorted(raw(out))
    dtypes = sorted({dtype for _, dtype, _ in after})
    say(
        f"{saved.name}: exported again to the same bytes", before == after, f"{len(after)} tensors, {', '.join(dtypes)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, jax {jax.__version__}, seed {seed}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_run(folder / "run", seed)
        run, wanted = k3train.load(folder / "run"), weights_of(folder / "run")
        for layout in ("kimi_linear", "transformers"):
            export_hf(folder / "run", folder / layout, layout=layout)
            compare(run, load_in_transformers(folder / layout), layout, seed)
        model = load_in_transformers(folder / "kimi_linear")
        read_back(model, folder / "saved_float32", torch.float32, wanted)
        read_back(model, folder / "saved_bfloat16", torch.bfloat16, wanted)
    print("all the same" if not _failed else f"{len(_failed)} differ")
    return 1 if _failed else 0


if __name__ == "__main__":
    sys.exit(main())
