"""Muon, Per-Head Muon, QK-clip and MuonClip as optax transforms, and the optimizer of a run."""
