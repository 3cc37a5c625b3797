"""What did not finish, and why."""

from __future__ import annotations

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing
from depthlaw.scaling.units import format_quantity

STATUSES = ("finished", "diverged", "pruned", "oom", "failed", "stopped")
MOST = 200  # rows of the table of reasons


def counts(m: Material) -> Drawing:
    caption = (
        "How the trials of each topology ended. Diverged and pruned trials are results: they bound the best learning "
        "rate and are not fitted. Those that ran out of memory (oom), failed or were stopped say nothing about the "
        "loss; the last two run again with the next sweep. Of a trial that ran more than once a finished attempt "
        "counts, else the last. "
    )
    if m.table is not None:
        return Drawing("How the trials ended", caption, lacks="a table does not have trials, only losses")
    if m.planned:
        caption += f"{m.planned} planned trials have no outcome yet. "
    if m.trials.empty:
        return Drawing("How the trials ended", caption, lacks="no trial has an outcome yet")
    rows = []
    for topology, of in m.trials.groupby("topology"):
        own = of["status"]
        rows.append([str(topology), str(len(own)), *(str(int((own == s).sum())) for s in STATUSES)])
    return Drawing("How the trials ended", caption, table=(["topology", "trials", *STATUSES], rows))


def reasons(m: Material) -> Drawing:
    caption = "Every trial that did not finish, with the reason that was stored when it ended. "
    if m.table is not None:
        return Drawing("What broke and why", caption, lacks="a table does not have the runs that diverged or failed")
    broken = m.trials[m.trials["status"] != "finished"]
    if broken.empty:
        return Drawing("What broke and why", caption, lacks="every trial with an outcome finished")
    broken = broken.sort_values(["status", "topology", "backbone_params", "n_layers", "lr", "seed"])
    if len(broken) > MOST:
        caption += f"The first {MOST} of {len(broken)}; `depthlaw store export` writes them all. "
    rows = [
        [str(t.topology), t.status, str(t.n_layers), str(t.d_model), format_quantity(t.tokens, "count"), f"{t.lr:g}",
         str(t.seed), "-" if t.reason is None or t.reason != t.reason else str(t.reason), str(t.experiment), t.trial]
        for t in broken.head(MOST).itertuples()
    ]  # fmt: skip
    columns = ["topology", "ended", "layers", "width", "tokens", "rate", "seed", "why", "experiment", "trial"]
    return Drawing("What broke and why", caption, table=(columns, rows))
