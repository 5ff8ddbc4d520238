"""Tensors of K3's vision tower and projector: known by name, carried along, not built (docs/k3.md 2.9 and 6.1)."""

from k3train.checkpoint.hf_names import Spec
from k3train.config.schema import VisionConfig


def vision_names(vision: VisionConfig, text_width: int) -> dict[str, Spec]:
    """Every tensor of the tower and the projector, bfloat16: name -> shape and dtype; none for a text model.

    Args:
        text_width: width of the text model's stream.
    """
    if not vision.num_layers:
        return {}
    width, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    block = {
        "norm0": (width,),
        "norm1": (width,),
        "wqkv": (3 * vision.qkv_size, width),
        "wo": (width, vision.qkv_size),
        "mlp.fc0": (inner, width),
        "mlp.fc1": (width, inner),
    }
    merged = width * vision.merge_size**2
    shapes = {
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (text_width, merged),
        "mm_projector.post_norm": (text_width,),
        "vision_tower.patch_embed.proj": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb": (vision.pos_emb_height, vision.pos_emb_width, width),
        **{
            f"vision_tower.encoder.blocks.{layer}.{name}": shape
            for layer in range(vision.num_layers)
            for name, shape in block.items()
        },
        "vision_tower.encoder.final_layernorm": (width,),
    }
    return {f"{name}.weight": Spec(shape, "BF16") for name, shape in shapes.items()}
