"""Muon, Per-Head Muon, QK-clip and MuonClip as optax transforms for any pytree, and the optimizer of a run."""

from k3train.optim.muon import MatrixView, muon, per_head, per_head_muon, scale_by_muon
from k3train.optim.qk_clip import ClipView, muon_clip, qk_clip

__all__ = ["ClipView", "MatrixView", "muon", "muon_clip", "per_head", "per_head_muon", "qk_clip", "scale_by_muon"]
