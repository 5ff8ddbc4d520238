"""Tiny K3 fine-tuned on chat: questions about the standard library, in K3's template with think, response and tools.

Its routed experts are quantised in the loop, as the phase `sft` has it; --config.quant.experts=none leaves them alone.

Run:   k3train train --config configs/tiny_sft.py, after configs/tiny.py (./launch/laptop.sh)
Needs: two CPU cores, no network; the run that configs/tiny.py leaves in runs/tiny.
"""

from k3train.config.load import derive


def get_config():
    cfg = derive("tiny")
    cfg.phase = "sft"  # which sets quant.experts=mxfp4_mxfp8
    cfg.init_from = "runs/tiny"
    # Conversations in bytes are long. The effort message alone takes 290 of them, so it is left out.
    cfg.data.update(source="stdlib_chat", chat_effort="none", seq_len=1024, batch_size=8, eval_fraction=0.05)
    cfg.num_steps = 60
    cfg.eval.every = 30
    cfg.optim.update(peak_lr=3e-3)
    cfg.log.sample = ""  # a plain continuation says nothing about chat
    return cfg
