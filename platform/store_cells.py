"""From trials to cells: one row per point of the grid, at the best of its learning rates."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Trials that differ only in learning rate and seed are one cell, whichever experiments asked for them.
SHAPE = ["n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff"]
CELL = ["recipe_hash", "topology", *SHAPE, "tokens", "seq_len", "vocab_size"]
COUNTS = ["n_trials", "n_finished", "n_diverged", "n_pruned", "n_oom", "n_failed"]
ACCOUNT = ["backbone_params", "embedding_params", "params", "tokens_per_param", "train_flops"]
VERTEX = ["lr_found", "vertex_lr", "vertex_ln_lr_sd", "vertex_loss", "vertex_loss_sd"]


def best_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Of each cell the finished trial of lowest val_loss, whatever the other seeds of its rate gave."""
    return trials[trials["status"] == "finished"].sort_values(["val_loss", "trial"]).drop_duplicates(CELL)


def cells(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per cell of `trials` (see `Store.trials`), sorted by the cell's own columns.

    * val_loss (nats per token), bits_per_byte: means over the finished seeds at the best lr, which is the one with the
      lowest mean val_loss (the smaller at a tie). seeds: how many they are. seed_sd: the sd of their val_loss (ddof 1;
      NaN for one seed).
    * n_lrs: learning rates with an outcome, finished, diverged or pruned. lr_at_edge: the best is the smallest or the
      largest of them; None if they are fewer than two, for then it is not known. A rate at which training breaks
      bounds the best from that side as well as a worse loss does.
    * lr_found: how the best rate is known, `vertex` where three or more finished rates bracket it; then vertex_lr with
      the error vertex_ln_lr_sd of its logarithm, and vertex_loss with its own, else NaN: see
      `depthlaw.scaling.best_rate`. val_loss and lr stay those of the best rate that was run.
    * n_trials = n_finished + n_diverged + n_pruned + n_oom + n_failed; failed counts failed and stopped.

    A cell where nothing finished has val_loss NaN and is still a row: that training breaks there is a result.
    """
    import numpy as np
    import pandas as pd

    counts = pd.DataFrame(
        {
            "n_trials": np.ones(len(trials), dtype=np.int64),
            "n_finished": trials["status"].eq("finished").to_numpy(np.int64),
            "n_diverged": trials["status"].eq("diverged").to_numpy(np.int64),
            "n_pruned": trials["status"].eq("pruned").to_numpy(np.int64),
            "n_oom": trials["status"].eq("oom").to_numpy(np.int64),
            "n_failed": trials["status"].isin(["failed", "stopped"]).to_numpy(np.int64),
        }
    )
    counts = pd.concat([trials[CELL].reset_index(drop=True), counts], axis=1).groupby(CELL).sum()
    account = trials.groupby(CELL)[ACCOUNT].first()

    finished = trials[trials["status"] == "finished"]
    by_lr = finished.groupby([*CELL, "lr"], as_index=False).agg(
        val_loss=("val_loss", "mean"),
        seed_sd=("val_loss", "std"),
        seeds=("seed", "nunique"),
        bits_per_byte=("bits_per_byte", "mean"),
    )
    best = by_lr.sort_values(["val_loss", "lr"]).drop_duplicates(CELL).set_index(CELL)
    tried = trials[trials["status"].isin(["finished", "diverged", "pruned"])]
    lrs = tried.groupby(CELL)["lr"].agg(n_lrs="nunique", lowest="min", highest="max")

    table = counts.join(best).join(lrs).join(account).join(_vertices(tried))
    table[["seeds", "n_lrs"]] = table[["seeds", "n_lrs"]].fillna(0).astype(np.int64)
    edge = (table["lr"] == table["lowest"]) | (table["lr"] == table["highest"])
    table["lr_at_edge"] = edge.astype(object).where((table["n_lrs"] >= 2) & table["lr"].notna(), None)
    table["lr_found"] = table["lr_found"].astype(object).fillna("none")  # where every trial failed, none was tried
    outcome = ["val_loss", "lr", "seeds", "seed_sd", "bits_per_byte", "n_lrs", "lr_at_edge", *VERTEX]
    return table[[*outcome, *COUNTS, *ACCOUNT]].sort_index().reset_index()


def _vertices(tried: pd.DataFrame) -> pd.DataFrame:
    """The columns VERTEX of each cell, from its trials that finished, diverged or were pruned."""
    import numpy as np
    import pandas as pd

    from depthlaw.scaling.best_rate import best_rate

    found = {}
    losses = tried["val_loss"].where(tried["status"] == "finished").to_numpy(np.float64)
    rates = tried["lr"].to_numpy(np.float64)
    for cell, rows in tried.groupby(CELL).indices.items():
        by_rate: dict[float, list[float]] = {}
        for i in rows:
            by_rate.setdefault(float(rates[i]), []).append(float(losses[i]))
        found[cell] = astuple(best_rate(by_rate))
    index = pd.MultiIndex.from_tuples(list(found), names=CELL)
    return pd.DataFrame(list(found.values()), index=index, columns=VERTEX)
