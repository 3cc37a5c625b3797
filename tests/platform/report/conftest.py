"""A store as others may fill it: a topology and an experiment whose names are markup, rates that broke, diagnostics."""

import json
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import pytest

from depthlaw.platform.config import parse_config
from depthlaw.platform.plan import plan
from depthlaw.platform.query import fit
from depthlaw.platform.report import Report, report
from depthlaw.platform.store import Store
from depthlaw.scaling.fitted import FittedLaw

SCRIPT = "<script>alert(1)</script>"
EXPERIMENT = '"><img src=x onerror=alert(2)>'
REASON = "loss 99 <b>was</b> above & beyond $\\frac{"
# Four shapes at each of three sizes, about 50k, 130k and 400k backbone parameters.
SHAPES = [[1, 64], [2, 48], [3, 40], [4, 32], [1, 104], [2, 72], [3, 64], [5, 48], [2, 128], [4, 96], [8, 64], [14, 48]]
NAMES = {"pre_ln": "pre_ln", "hc": "hc", "lns": SCRIPT}  # the third is trained as what this installation has not


@dataclass(frozen=True)
class Made:
    store: Store
    law: FittedLaw
    report: Report
    html: str


def ended(spec, truth):
    shape = (spec.n_layers, spec.d_model)
    if shape == (14, 48) and spec.topology == "pre_ln":
        return {"status": "diverged", "reason": "loss nan is not finite, at step 9"}
    if shape == (5, 48) and spec.lr > 6e-3:
        return {"status": "diverged", "reason": REASON}
    if shape == (2, 72) and spec.lr < 6e-3:
        return {"status": "pruned", "reason": "above 3 others at a quarter"}
    if shape == (8, 64) and spec.lr > 6e-3 and spec.topology == "hc":
        return {"status": "oom", "reason": "out of memory"}
    loss = truth(
        "hc" if spec.topology == "lns" else spec.topology, int(spec.costs.backbone_params), spec.tokens, *shape
    )
    loss *= 1 + 2e-3 * np.sin(7.0 * spec.n_layers + spec.d_model + spec.tokens / 1e5 + len(spec.topology))
    loss += 0.05 * abs(np.log2(spec.lr / 8e-3))
    return {"status": "finished", "val_loss": float(loss), "bits_per_byte": float(loss) / 2}


def row_of(spec, experiment, topology, outcome):
    same = ("seq_len", "lr", "tokens", "seed", "batch_tokens", "data_fingerprint")
    return {
        **{name: getattr(spec, name) for name in same}, **asdict(spec.shape),
        **{name: int(getattr(spec.costs, name)) for name in ("backbone_params", "params")},
        "trial": spec.hash, "recipe_hash": spec.recipe_hash, "attempt": 0, "experiment": experiment,
        "topology": topology, "train_flops": float(spec.train_flops), "tokens_done": spec.tokens,
        "versions": json.dumps({"torch": "2.13.0"}), "code_commit": "0123abc", "device": "cpu",
        "spec": json.dumps(spec.to_dict()), **outcome,
    }  # fmt: skip


def write_diagnostics(store, spec, topology):
    """Tables as `diagnose` writes them, with figures that are easy to recognise."""
    folder = store.path / "diagnostics" / spec.hash
    folder.mkdir(parents=True)
    identity = {"trial": spec.hash, "topology": topology, "n_layers": spec.n_layers, "d_model": spec.d_model}
    blocks = np.arange(spec.n_layers)
    tables = {
        "pruning": {"skipped": blocks, "loss_increase": 0.5 / (1 + blocks)},
        "curves": {"diagnostic": "causal", "threshold": np.linspace(0, 1, 5), "share_late": np.linspace(1, 0, 5)},
        "summary": {"diagnostic": ["model", "pruning"], "figure": ["loss", "least"], "value": [3.0, 0.0625]},
    }
    for name, columns in tables.items():
        pd.DataFrame({**identity, **columns}).to_parquet(folder / f"{name}.parquet")


@pytest.fixture(scope="session")
def hostile_store(tmp_path_factory, sweep_of, truth) -> Store:
    store = Store.create(tmp_path_factory.mktemp("hostile") / "store")
    grid = {"topologies": list(NAMES), "shapes": SHAPES, "tokens_per_backbone_param": [4, 12], "lr": [4e-3, 8e-3]}
    specs = plan(parse_config(sweep_of(grid=grid)), "fingerprint-0123")
    store.write_plan(EXPERIMENT, [spec.plan_row() for spec in specs])
    for spec in specs:
        store.write_trial(row_of(spec, EXPERIMENT, NAMES[spec.topology], ended(spec, truth)))
        if (spec.n_layers, spec.d_model, spec.lr) == (4, 96, 8e-3):
            write_diagnostics(store, spec, NAMES[spec.topology])
    return store


@pytest.fixture(scope="session")
def hostile_law(hostile_store) -> FittedLaw:
    return fit(hostile_store, "shape", draws=100)


@pytest.fixture(scope="session")
def made(hostile_store, hostile_law, tmp_path_factory) -> Made:
    written = report(hostile_store, hostile_law, tmp_path_factory.mktemp("made") / "page", hardware="cpu")
    return Made(hostile_store, hostile_law, written, written.page.read_text(encoding="utf-8"))
