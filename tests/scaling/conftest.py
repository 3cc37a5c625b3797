"""Sweeps with a known truth, and a lattice whose accounting is small enough to check by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

TRUTH = {"E": 1.8, "alpha": 0.30, "beta": 0.35, "rho1": 0.15, "B": 0.75, "N0": 8e6, "D0": 1.6e8}
# Per topology: size coefficient at N0, sharpness in shape, best ln(d / L) at N0.
OWN = {"pre_ln": (0.80, 0.05, 2.8), "hc": (0.72, 0.07, 2.5), "full_attnres": (0.68, 0.04, 3.1)}


def true_loss(topology: str, N: Any, D: Any, L: Any, d: Any) -> Any:
    """The `shape` law, written out in plain terms."""
    size, kappa, rho0 = OWN[topology]
    n = np.log(N / TRUTH["N0"])
    q = np.log(d / L) - rho0 - TRUTH["rho1"] * n
    bowl = np.exp(kappa * q**2)
    return (
        TRUTH["E"]
        + size * bowl * (N / TRUTH["N0"]) ** -TRUTH["alpha"]
        + TRUTH["B"] * (D / TRUTH["D0"]) ** -TRUTH["beta"]
    )


def simulate(
    topologies=("pre_ln", "hc", "full_attnres"),
    sizes=(1e6, 4e6, 16e6, 64e6),
    ratios=(4, 8, 16, 32, 64, 128),
    tokens_per_n=(5, 20, 80),
    noise=0.0,
    seed=0,
) -> pd.DataFrame:
    rows = []
    for t in topologies:
        for size in sizes:
            for ratio in ratios:
                L = max(2, round((size / 12 / ratio**2) ** (1 / 3)))
                d = max(8, 8 * round((size / 12 / L) ** 0.5 / 8))
                N = 12 * L * d * d
                rows += [(t, N, c * N, L, d, true_loss(t, N, c * N, L, d)) for c in tokens_per_n]
    frame = pd.DataFrame(rows, columns=["topology", "backbone_params", "tokens", "n_layers", "d_model", "val_loss"])
    frame["val_loss"] *= np.exp(noise * np.random.default_rng(seed).standard_normal(len(frame)))
    return frame


@dataclass(frozen=True)
class Lattice:
    """12 L d^2 backbone, vocabulary 1000, MHA."""

    label: str
    n_layers: Any
    d_model: Any
    extra: int = 0
    depth_reads: Any = 0

    @property
    def n_heads(self):
        return self.d_model // 32

    @property
    def n_sublayers(self):
        return 2 * self.n_layers

    @property
    def backbone_params(self):
        return 12 * self.n_layers * self.d_model**2 + self.extra * self.n_layers * self.d_model

    @property
    def params(self):
        return self.backbone_params + 2000 * self.d_model

    @property
    def decode_params(self):
        return self.params - 1000 * self.d_model

    def kv_elements(self, context):
        return 2 * context * self.n_layers * self.d_model

    def state_elements(self, batch):
        return batch * self.d_model

    def decode_flops(self, context):
        return 2 * self.decode_params + 4 * context * self.n_layers * self.d_model

    def forward_flops_per_token(self, seq_len, head):
        scores = 2 * (seq_len + 1) * self.n_layers * self.d_model
        return 2 * self.backbone_params + scores + (2 * 1000 * self.d_model if head else 0)

    def train_flops_per_token(self, seq_len):
        return 6 * self.decode_params + 6 * seq_len * self.n_layers * self.d_model


def lattice(label: str, depths, widths, extra: int = 0) -> Lattice:
    L, d = np.meshgrid(np.asarray(depths, dtype=np.int64), np.asarray(widths, dtype=np.int64), indexing="ij")
    return Lattice(label, L.ravel(), d.ravel(), extra)


@pytest.fixture(scope="session")
def simulated():
    return simulate


@pytest.fixture(scope="session")
def truth():
    return true_loss


@pytest.fixture(scope="session")
def make_lattice():
    return lattice


@pytest.fixture(scope="session")
def noisy_law():
    from depthlaw.scaling.fit import fit

    return fit(simulate(noise=0.003))
