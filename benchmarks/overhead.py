"""What a sweep costs beside its training: the share of core time inside training steps, empty trials, planning.

    python -m benchmarks.overhead [--parts share empty plan] [--trials 64] [--seconds 10]
        [--empty 1000] [--planned 10000]

`share`: a sweep of `--trials` trials of about `--seconds` seconds each, on all cores; a trial is timed first, so that
its number of steps fits the machine. Goal: 90 % of the core time inside training steps. `empty`: trials of one step, a
model of 3000 parameters and one validation window. Goal: 300 a minute. `plan`: what of a grid of `--planned` trials is
still to run, against a store that has half of them, a file each. Goal: 10 s and 1 GB, in a process of its own.

Wall time counts what others do on the machine: its load average at the end is printed too, and is the number of cores
or a little more where nothing else ran.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE = {
    "data": {"source": "pydoc", "vocab_size": 300},
    "shape_rule": "small",
    "max_epochs": 10_000,
    "loggers": [],
}
MODEL = {"seq_len": 64, "batch_tokens": 2048, "micro_batch_seqs": 32, "validation": {"times": 4, "windows": 32}}
EMPTY = {"seq_len": 32, "batch_tokens": 256, "micro_batch_seqs": 8, "validation": {"times": 1, "windows": 1}}


def load() -> float:
    """Processes that wanted to run, over the last minute."""
    return os.getloadavg()[0]


def run_sweep(raw: dict[str, Any], folder: Path) -> tuple[float, Any]:
    """Wall seconds of the whole command, and the store."""
    from depthlaw.platform.store import Store

    (folder / "sweep.yaml").write_text(json.dumps(raw))
    began = time.perf_counter()
    command = [sys.executable, "-m", "depthlaw", "sweep", "sweep.yaml", "--storage", "store"]
    environment = os.environ | {"DEPTHLAW_DATA": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
    return time.perf_counter() - began, Store(folder / "store")


def grid(trials: int, shape: list[int], ratio: float) -> tuple[list[dict[str, Any]], list[int]]:
    """One block and the seeds that make so many trials: up to 8 learning rates, all low enough to finish."""
    rates = next(lr for lr in range(8, 0, -1) if trials % lr == 0)
    block = {"topologies": ["pre_ln"], "shapes": [shape], "tokens_per_backbone_param": [ratio]}
    return [block | {"lr": [round(1e-3 + 1e-5 * k, 6) for k in range(rates)]}], list(range(trials // rates))


def share(folder: Path, trials: int, seconds: float) -> None:
    from depthlaw.platform.config import parse_config
    from depthlaw.platform.data_build import build
    from depthlaw.platform.plan import plan
    from depthlaw.platform.store import Store
    from depthlaw.platform.trial import run_trial

    def raw(trials: int, ratio: float) -> dict[str, Any]:
        blocks, seeds = grid(trials, [4, 64], ratio)
        return {"name": "share", **BASE, **MODEL, "grid": blocks, "seeds": seeds}

    config = parse_config(raw(1, 2))
    dataset = build(config.data, folder / "data")
    (spec,) = plan(config, dataset.fingerprint)
    timed = run_trial(spec, Store.create(folder / "timed"), dataset)
    ratio = spec.tokens / spec.costs.backbone_params * seconds / timed["train_s"]
    wall, store = run_sweep(raw(trials, float(ratio)), folder)
    rows, cores = store.trials(), len(os.sched_getaffinity(0))
    assert (rows["status"] == "finished").sum() == trials, rows["reason"].dropna().to_list()
    inside, own = float(rows["train_s"].sum()), float(rows["wall_s"].sum())
    busy = (rows["ended_at"].max() - rows["started_at"].min()).total_seconds()
    print(
        f"share: {trials} trials of {inside / trials:.1f} s on {cores} cores: {wall:.0f} s in all, {busy:.0f} s from "
        f"the first trial's begin to the last one's end; of the core time of all, {inside / cores / wall:.1%} inside "
        f"training steps and {own / cores / wall:.1%} inside trials; from first to last {inside / cores / busy:.1%} "
        f"inside training steps; load {load():.1f}"
    )


def empty(folder: Path, trials: int) -> None:
    blocks, seeds = grid(trials, [1, 16], 0.05)
    wall, store = run_sweep({"name": "empty", **BASE, **EMPTY, "grid": blocks, "seeds": seeds}, folder)
    rows = store.trials()
    assert rows["status"].isin(["finished", "diverged"]).sum() == trials  # a step may not be enough to learn anything
    busy = (rows["ended_at"].max() - rows["started_at"].min()).total_seconds()
    print(
        f"empty: {trials} trials of {int(rows['steps'].max())} step: {wall:.0f} s in all, {trials / wall * 60:.0f} a "
        f"minute; from the first to the last {trials / busy * 60:.0f} a minute; load {load():.1f}"
    )


def planning(folder: Path, trials: int) -> None:
    from depthlaw.platform.config import parse_config
    from depthlaw.platform.plan import plan
    from depthlaw.platform.store import Store
    from depthlaw.platform.trial_row import trial_row

    blocks, seeds = grid(trials, [2, 32], 4)
    raw = {"name": "plan", **BASE, **MODEL, "grid": blocks, "seeds": seeds}
    (folder / "plan.json").write_text(json.dumps(raw))
    store = Store.create(folder / "store")
    for spec in plan(parse_config(raw), "fingerprint")[::2]:
        store.write_trial(trial_row(spec, 0, "finished", None, val_loss=3.0))
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(folder / "plan.json"), str(folder / "store")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout, end="")


PLAN = """
import json, sys, time
began = time.perf_counter()
from benchmarks.overhead import plan_once
plan_once(sys.argv[1], sys.argv[2], began)
"""


def plan_once(config: str, folder: str, began: float) -> None:
    """What `sweep` does before it starts anything: what is wanted, what is there, the plan into the store."""
    from depthlaw.platform.config import parse_config
    from depthlaw.platform.lr_search import stored_outcomes
    from depthlaw.platform.plan import missing, wanted
    from depthlaw.platform.store import Store

    store = Store(folder)
    outcomes = stored_outcomes(store)
    asked = wanted(parse_config(json.loads(Path(config).read_text())), outcomes, "fingerprint")
    store.write_plan("plan", [spec.plan_row() for spec in asked.trials])
    todo = missing(asked.trials, {trial: outcome.status for trial, outcome in outcomes.items()})
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"plan: {len(asked.trials)} trials, {len(todo)} of them to run: {time.perf_counter() - began:.1f} s, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss / 1e6:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=["share", "empty", "plan"], default=["share", "empty", "plan"])
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--empty", type=int, default=1000)
    parser.add_argument("--planned", type=int, default=10_000)
    given = parser.parse_args()
    for name, run in (
        ("share", lambda folder: share(folder, given.trials, given.seconds)),
        ("empty", lambda folder: empty(folder, given.empty)),
        ("plan", lambda folder: planning(folder, given.planned)),
    ):
        if name in given.parts:
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder))


if __name__ == "__main__":
    main()
