"""What pruning inside a cell saves and costs: the rule replayed over the curves of an exhaustive search.

    python -m benchmarks.pruning STORE [--data FOLDER]

trains 8 cells x 8 learning rates to their end, then the best rate of each cell at three more seeds for the noise of a
seed, and replays the rule over the stored validation losses: what it would have stopped, and where. That is exact, as a
trial's losses do not depend on the others; only the order in which they reach a rung does, so it is replayed for one
worker and for four. Interrupted, it goes on where it was. The table goes to benchmarks/pruning.csv, the curves behind
it to benchmarks/pruning_curves.csv: a test replays them.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from depthlaw.platform.config import SweepConfig, parse_config
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.pruning import Rungs, cell_of, middle_out, rung_steps
from depthlaw.platform.store import Store
from depthlaw.platform.sweep import sweep

TABLE = Path(__file__).with_suffix(".csv")
RATES = [1e-3 * 2**k for k in range(8)]  # 0.001 to 0.128; the best is at 0.004 to 0.032
SEEDS = [1, 2, 3]
AT, KEEP, VALIDATIONS = [0.25, 0.5], 3, 10


def config(
    name: str, topologies: list[str], shapes: list[list[int]], rates: list[float], seeds: list[int]
) -> SweepConfig:
    block = {"topologies": topologies, "shapes": shapes, "tokens_per_backbone_param": [10], "lr": rates}
    return parse_config(
        {
            "name": name,
            "data": {"source": "offline", "tokenizer": "bpe", "vocab_size": 512},
            "seq_len": 128,
            "batch_tokens": 1024,
            "micro_batch_seqs": 8,
            "shape_rule": "small",
            "validation": {"times": VALIDATIONS, "windows": 128},
            "grid": [block],
            "seeds": seeds,
        }
    )


def train(store: Store, data: Path | None) -> None:
    def run(one: SweepConfig) -> list[TrialSpec]:
        return sweep(one, store, data_folder=data, concurrent=1, listener=lambda p: print(p.done, p.planned, p.message))

    run(config("pruning", ["pre_ln", "hc", "full_attnres", "deepnorm"], [[1, 32], [4, 16]], RATES, [0]))
    for k, best in enumerate(store.cells("pruning").itertuples()):
        shape = [int(best.n_layers), int(best.d_model)]
        run(config(f"noise{k}", [best.topology], [shape], [best.lr], SEEDS))


class Curve:
    """One finished or diverged trial of the exhaustive search."""

    def __init__(self, spec: TrialSpec, row: Any, val_losses: dict[int, float]) -> None:
        self.spec, self.val_losses = spec, val_losses
        self.steps_done, self.final = int(row.steps_done), float(row.val_loss)
        self.diverged = row.status == "diverged"


def replay(curves: list[Curve], workers: int) -> dict[float, int]:
    """Steps that each rate of a cell is trained for under the rule, with so many workers that take a step a second."""
    by_rate = {curve.spec.lr: curve for curve in curves}
    rungs, waiting = Rungs(KEEP), [spec.lr for spec in middle_out([c.spec for c in curves])]
    steps: dict[float, int] = {}
    events: list[tuple[int, float, int]] = []  # (time, rate, step of the trial)

    def start(now: int) -> None:
        if waiting:
            lr = waiting.pop(0)
            curve = by_rate[lr]
            at = [s for s in rung_steps(AT, curve.spec.steps, VALIDATIONS) if s in curve.val_losses]
            for step in [*at, curve.steps_done]:
                heapq.heappush(events, (now + step, lr, step))

    for _ in range(workers):
        start(0)
    while events:
        now, lr, step = heapq.heappop(events)
        curve = by_rate[lr]
        if lr in steps:
            continue  # it was pruned at an earlier rung
        at_end = step == curve.steps_done
        if at_end or rungs.verdict("cell", step, lr, curve.val_losses[step]):
            steps[lr] = step
            if at_end and curve.diverged:
                rungs.forget("cell", lr)
            start(now)
    return steps


def cells(store: Store) -> list[list[Curve]]:
    """The exhaustive search, cell by cell."""
    losses = store.steps(names="val_loss")
    by_trial = {t: dict(zip(g["step"], g["value"], strict=True)) for t, g in losses.groupby("trial")}
    searched = {row["trial"] for row in store.plan("pruning")}
    found: dict[Any, list[Curve]] = defaultdict(list)
    for row in store.trials().itertuples():
        if row.trial in searched:
            spec = TrialSpec.from_dict(json.loads(row.spec))
            found[cell_of(spec)].append(Curve(spec, row, by_trial.get(row.trial, {})))
    ordered = sorted(found.values(), key=lambda curves: (curves[0].spec.topology, curves[0].spec.n_layers))
    return [sorted(curves, key=lambda curve: curve.spec.lr) for curves in ordered]


def table(store: Store) -> list[dict[str, Any]]:
    noise: dict[Any, list[float]] = defaultdict(list)
    for row in store.trials().query("status == 'finished'").itertuples():
        noise[row.topology, row.n_layers, row.d_model, row.lr].append(float(row.val_loss))
    rows = []
    for curves in cells(store):
        spec, best = curves[0].spec, min((c for c in curves if not c.diverged), key=lambda c: c.final)
        seeds = noise[spec.topology, spec.n_layers, spec.d_model, best.spec.lr]
        row: dict[str, Any] = {
            "topology": spec.topology,
            "n_layers": spec.n_layers,
            "d_model": spec.d_model,
            "tokens": spec.tokens,
            "rates": len(curves),
            "diverged": sum(c.diverged for c in curves),
            "best_lr": best.spec.lr,
            "best_loss": round(best.final, 5),
            "seed_sd": round(statistics.stdev(seeds), 5),
            "n_seeds": len(seeds),
        }
        full = sum(c.steps_done for c in curves)
        row["train_flops"] = float(spec.flops_of(full))
        for workers in (1, 4):
            steps = replay(curves, workers)
            kept = [c for c in curves if not c.diverged and steps[c.spec.lr] == c.steps_done]
            winner = min(kept, key=lambda c: c.final)
            row[f"lost_nats_{workers}"] = round(winner.final - best.final, 5)
            row[f"pruned_{workers}"] = sum(steps[c.spec.lr] < c.steps_done for c in curves)
            row[f"flops_saved_{workers}"] = round(1 - sum(steps.values()) / full, 4)
        rows.append(row)
    return rows


def curve_rows(store: Store) -> list[dict[str, Any]]:
    return [
        {
            "topology": curve.spec.topology,
            "n_layers": curve.spec.n_layers,
            "d_model": curve.spec.d_model,
            "lr": curve.spec.lr,
            "step": step,
            "val_loss": round(loss, 5),
        }
        for curves in cells(store)
        for curve in curves
        for step, loss in sorted(curve.val_losses.items())
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--data", type=Path, default=None, help="folder of data builds; default as for a sweep")
    given = parser.parse_args()
    store = Store.create(given.store)
    train(store, given.data)
    rows = table(store)
    write(TABLE, rows)
    write(TABLE.with_name("pruning_curves.csv"), curve_rows(store))
    for row in rows:
        print(row)
    for workers in (1, 4):
        saved = sum(row[f"flops_saved_{workers}"] * row["train_flops"] for row in rows)
        print(f"{workers} workers: {saved / sum(row['train_flops'] for row in rows):.1%} of the FLOPs saved")


if __name__ == "__main__":
    main()
