"""As tiny.py, but with 896 experts of which 16 are chosen, as in K3, on 64 devices: data 4 x expert 16.

Run:   ./launch/laptop.sh --devices 64
Needs: two CPU cores, no network, patience: each of the simulated devices is a thread.
"""

from k3train.config.load import derive


def get_config():
    cfg = derive("tiny")
    cfg.model.update(num_experts=896, num_experts_per_token=16, moe_intermediate_size=32, moe_latent_size=32)
    cfg.data.update(seq_len=64, batch_size=64)
    cfg.mesh.update(data=4, expert=16)
    cfg.num_steps = 10
    cfg.eval.every = 0
    cfg.log.every = 1
    return cfg
