"""What a store says to a law: its cells, as long as they were all trained by one recipe."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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


def context(store: Store, cells: pd.DataFrame) -> dict[str, Any]:
    """What a law fitted on these cells needs to know of its sweep, for later questions."""
    specs = store.trials()
    spec = json.loads(specs.loc[specs["recipe_hash"] == cells["recipe_hash"].iloc[0], "spec"].iloc[0])
    keep = ("data", "shape_rule", "vocab_size", "seq_len", "batch_tokens", "data_fingerprint", "precision")
    counted = ("n_trials", "n_finished", "n_diverged", "n_pruned", "n_failed")
    return {
        **{name: spec[name] for name in keep},
        **{name: int(cells[name].sum()) for name in counted},
        "cells": len(cells),
        "cells_without_a_finished_trial": int(cells["val_loss"].isna().sum()),
        "cells_best_lr_at_edge": int((cells["lr_at_edge"] == True).sum()),  # noqa: E712  None means not known
        "cells_with_one_lr": int((cells["n_lrs"] == 1).sum()),
    }
