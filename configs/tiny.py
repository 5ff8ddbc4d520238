"""Tiny K3 with every text mechanism, on the running Python's own sources, 8 simulated CPU devices.

Run:   ./launch/laptop.sh, or k3train train --config configs/tiny.py --workdir runs/tiny
Needs: two CPU cores, no network.
"""

from k3train.config.load import new_config


def get_config():
    cfg = new_config()  # every knob and its default: k3train/config/schema.py
    cfg.model.update(vocab_size=258, pad_token_id=257)  # 256 bytes, end of document, padding
    cfg.mesh.update(data=2, expert=4)
    cfg.log.sample = "def "
    return cfg
