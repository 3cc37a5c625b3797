"""What a store says to a law: its cells, as long as they were all trained by one recipe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from depthlaw.archs.errors import ShapeError
from depthlaw.archs.shape import shape_rule
from depthlaw.platform.store import Store, StoreError

if TYPE_CHECKING:
    import pandas as pd


def law_rows(store: Store, experiment: str | None = None) -> pd.DataFrame:
    """One row per cell, at its best learning rate; cells where nothing finished have val_loss NaN.

    Raises StoreError if the store has no cells, or holds several recipes (data, batch, optimiser, schedule), whose
    losses do not compare, and `experiment` does not choose one.
    """
    cells = store.cells(experiment)
    if cells.empty:
        known = ", ".join(store.experiments()) or "none"
        wanted = f"experiment {experiment!r} has" if experiment else "it has"
        raise StoreError(f"store {store.path}: {wanted} no trials to fit; experiments here: {known}")
    recipes = cells["recipe_hash"].nunique()
    if recipes > 1:
        raise StoreError(
            f"store {store.path} holds {recipes} recipes (data, batch, optimiser or schedule differ), whose losses do "
            f"not compare: choose one of the experiments {', '.join(store.experiments())}"
        )
    return cells


def _off_rule(cells: pd.DataFrame, name: str) -> int:
    """How many cells have heads or a feed-forward width other than the rule gives to their (n_layers, d_model)."""
    rule, off = shape_rule(name), 0
    for cell in cells.itertuples():
        try:
            shape = rule.shape(int(cell.n_layers), int(cell.d_model), int(cell.vocab_size))
        except ShapeError:
            off += 1
            continue
        off += (shape.n_heads, shape.n_kv_heads, shape.d_ff) != (cell.n_heads, cell.n_kv_heads, cell.d_ff)
    return off


def _best_lr(cells: pd.DataFrame) -> dict[str, list[list[float]]]:
    """{topology: [[N, best learning rate] of each cell that finished]}, from the smallest.

    The rate is that of the vertex where there is one, else the best that was run.
    """
    done = cells[cells["val_loss"].notna()]
    done = done.assign(lr=done["vertex_lr"].fillna(done["lr"])).sort_values(["backbone_params", "lr"])
    return {
        str(label): of[["backbone_params", "lr"]].astype(float).drop_duplicates().values.tolist()
        for label, of in done.groupby("topology")
    }


def at_rate_of_base_shape(store: Store, trials: pd.DataFrame, cells: pd.DataFrame) -> int:
    """How many of these cells run at the rate that was found at a base shape.

    Trials say so themselves, also after another plan of their experiment took the place of theirs; a plan says so of
    trials that were there already, from a sweep that listed their rate.
    """
    from depthlaw.platform.store_cells import CELL

    planned = [row for name in store.experiments() for row in store.plan(name) if row.get("lr_searched_at")]
    specs = trials["spec"].fillna("{}").map(json.loads)  # rows that others wrote may have none
    searched = trials[specs.map(lambda spec: bool(spec.get("lr_searched_at"))).astype(bool)]
    found = {tuple(row[name] for name in CELL) for row in planned}
    found |= set(searched[CELL].itertuples(index=False, name=None))
    return sum(cell in found for cell in cells[CELL].itertuples(index=False, name=None))


def _corpus_tokens(trials: pd.DataFrame) -> int | None:
    """Training tokens of the text that all of these trials read; None where no row says how often it did."""
    told = trials[trials["epochs"] > 0]
    if told.empty:
        return None
    longest = told.loc[told["tokens"].idxmax()]
    return round(float(longest["tokens"]) / float(longest["epochs"]))


def context(store: Store, cells: pd.DataFrame) -> dict[str, Any]:
    """What a law fitted on these cells needs to know of its sweep, for later questions.

    lr_found: how many cells know their best rate in which way, see `depthlaw.scaling.best_rate`; vertex_ln_lr_sd: the
    median error of ln lr of those with a parabola, None where nothing tells the noise.
    """
    import numpy as np

    trials = store.trials()
    trials = trials[trials["recipe_hash"] == cells["recipe_hash"].iloc[0]]
    specs = [json.loads(text) for text in trials["spec"]]
    spec = specs[0]
    # Experiments of one recipe may name different rules: the one that most of these cells follow is theirs.
    off_rule = {rule: _off_rule(cells, rule) for rule in sorted({spec["shape_rule"] for spec in specs})}
    rule = min(off_rule, key=lambda name: off_rule[name])
    one_lr = cells["n_lrs"] == 1
    shared = at_rate_of_base_shape(store, trials, cells[one_lr])
    keep = ("data", "vocab_size", "seq_len", "batch_tokens", "data_fingerprint", "precision")
    counted = ("n_trials", "n_finished", "n_diverged", "n_pruned")
    return {
        **{name: spec[name] for name in keep},
        **{name: int(cells[name].sum()) for name in counted},
        "shape_rule": rule,
        "corpus_tokens": _corpus_tokens(trials),
        "best_lr": _best_lr(cells),
        "lr_found": {str(how): int(n) for how, n in cells["lr_found"].value_counts().items()},
        "vertex_ln_lr_sd": None if np.isnan(error := float(cells["vertex_ln_lr_sd"].median())) else error,
        "cells": len(cells),
        "cells_off_the_shape_rule": off_rule[rule],
        "cells_without_a_finished_trial": int(cells["val_loss"].isna().sum()),
        "cells_best_lr_at_edge": int((cells["lr_at_edge"] == True).sum()),  # noqa: E712  None means not known
        "cells_with_one_lr": int(one_lr.sum() - shared),
        "cells_with_lr_of_base_shape": shared,  # one rate here too, but one that a search at another shape found
    }
