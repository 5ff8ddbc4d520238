"""Tiny K3 with every text mechanism, on the running Python's own sources, 8 simulated CPU devices.

Run:   ./launch/laptop.sh, or k3train train --config configs/tiny.py --workdir runs/tiny
Needs: two CPU cores, no network.
"""

from k3train.config.load import new_config


def get_config():
    cfg = new_config()  # every knob and its default: k3train/config/schema.py
    cfg.model.update(
        vocab_size=264,  # the ids of the byte tokenizer, those of the chat template included
        pad_token_id=257,
        # three blocks of two layers: KDA KDA, KDA MLA, KDA MLA, the last layer MLA as in K3
        num_layers=6,
        kda_layers=(0, 1, 2, 4),
        mla_layers=(3, 5),
        dense_layers=(0,),
        moe_layers=(1, 2, 3, 4, 5),
        attn_res_block_size=2,
        init_fan_in=True,
        embedding_init_std=1.0,
    )
    cfg.data.update(batch_size=16)
    cfg.optim.update(peak_lr=6e-3, final_lr=3e-4)
    cfg.num_steps = 120
    cfg.eval.every = 60
    cfg.mesh.update(data=2, expert=4)
    cfg.log.update(every=5, sample="class Reader:\n    def __init__(self, ")
    return cfg
