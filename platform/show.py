"""Tables and progress for people. Everything here only reads."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from depthlaw.platform.config import SweepConfig
from depthlaw.platform.lr_search import SETTLED, stored_outcomes
from depthlaw.platform.plan import wanted
from depthlaw.platform.store import Store
from depthlaw.platform.trunk import spent_flops
from depthlaw.scaling.units import counted, format_quantity

if TYPE_CHECKING:
    from depthlaw.platform.dataset import Dataset
    from depthlaw.platform.sweep import Listener, Progress
    from depthlaw.scaling.fitted import FittedLaw


def out(*what: Any) -> None:
    """Prints tables and texts; tables take the columns that they need, so that no figure is cut."""
    # Never narrower than the widest table: a terminal may wrap a line, but no figure is cut from it.
    console = Console(width=1000, highlight=False, markup=False)
    widest = max((console.measure(item).maximum for item in what if not isinstance(item, str)), default=0)
    console.width = max(widest, Console().width if sys.stdout.isatty() else 200)
    for item in what:
        if isinstance(item, str):
            print(item)
            continue
        with console.capture() as held:
            console.print(item)
        print("\n".join(line.rstrip() for line in held.get().splitlines()))


def _count(value: float) -> str:
    return format_quantity(value, "count")


def _table(title: str, columns: list[str], left: int) -> Table:
    """A table whose first `left` columns are text and the others numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k < left else "right", no_wrap=True)
    return table


# ---- plan


def dry_run_rows(config: SweepConfig, store: str | Path) -> list[dict[str, Any]]:
    """One row per trial of the round that is next: exact counts, FLOPs, hours, and the status in the store.

    Those that wait for a search are at the end, without the rate that it is to find.
    """
    from depthlaw.platform.data_build import open_built
    from depthlaw.platform.data_config import data_root
    from depthlaw.scaling.hardware import hardware

    dataset = open_built(config.data, data_root())
    known = stored_outcomes(found) if (found := Store.find(store)) else {}
    asked = wanted(config, known, dataset.fingerprint) if dataset else wanted(config, {})
    flops = spent_flops([*asked.trials, *asked.later])
    rate = hardware(config.estimate_hardware).peak_flops * config.estimate_mfu
    return [
        {
            "trial": spec.hash if dataset else None,
            "topology": spec.topology,
            "n_layers": spec.n_layers,
            "d_model": spec.d_model,
            "lr": None if later else spec.lr,
            "seed": spec.seed,
            "backbone_params": int(spec.costs.backbone_params),
            "params": int(spec.costs.params),
            "tokens": spec.tokens,
            "steps": spec.steps,
            "train_flops": flops[spec.hash],
            "device_hours": flops[spec.hash] / rate / 3600,
            "epochs": dataset.epochs(spec.tokens, spec.seq_len) if dataset else None,
            "status": "after the search" if later else known[spec.hash].status if spec.hash in known else "to run",
        }
        for later, specs in ((False, asked.trials), (True, asked.later))
        for spec in specs
    ]


def plan_table(config: SweepConfig, rows: list[dict[str, Any]]) -> Table:
    columns = [
        "topology",
        "L",
        "d",
        "lr",
        "seed",
        "backbone",
        "parameters",
        "tokens",
        "steps",
        "FLOPs",
        "time",
        "status",
    ]
    table = _table(f"{config.name}: {counted(len(rows), 'trial')}", columns, 1)
    for r in rows:
        table.add_row(
            r["topology"], str(r["n_layers"]), str(r["d_model"]),
            "-" if r["lr"] is None else f"{r['lr']:g}", str(r["seed"]),
            f"{r['backbone_params']:,}", f"{r['params']:,}", f"{r['tokens']:,}", f"{r['steps']:,}",
            f"{r['train_flops']:.3e}", duration(3600 * r["device_hours"]), r["status"],
        )  # fmt: skip
    todo = [r for r in rows if r["status"] not in SETTLED]
    table.caption_justify = "left"
    table.caption = (
        f"{len(todo)} to run: {sum(r['train_flops'] for r in todo):.3e} FLOPs, about "
        f"{duration(3600 * sum(r['device_hours'] for r in todo))} on one {config.estimate_hardware} at "
        f"{config.estimate_mfu:.0%} of its peak (an assumption)" + _about_the_data(config, rows)
    )
    if any(block.lr_search for block in config.grid):
        table.caption += "\nwhat later rounds run depends on these results: searches may go beyond their lists of rates"
    return table


def _about_the_data(config: SweepConfig, rows: list[dict[str, Any]]) -> str:
    if not rows[0]["trial"]:
        return "; the data is not built yet, so stored trials are not recognised"
    epochs = max(r["epochs"] for r in rows)
    if epochs <= config.max_epochs:
        return ""
    return f"\nwill be refused: the longest trial makes {epochs:.3g} epochs and max_epochs is {config.max_epochs:g}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:,.1f} h"


# ---- data


def data_lines(dataset: Dataset, seq_len: int) -> str:
    """Where the data is and what models that know little score on it."""
    from depthlaw.platform.baselines import baselines

    scores = baselines(dataset, seq_len, 256)
    known = ", ".join(f"{name} {nats:.3f}" for name, nats in scores.items())
    return (
        f"data          {dataset.path}\n"
        f"              {_count(dataset.n_tokens('train'))} training and {_count(dataset.n_tokens('validation'))} "
        f"validation tokens, vocabulary {dataset.vocab_size}\n"
        f"              nats a token on the validation windows: {known}"
    )


# ---- law


def law_lines(law: FittedLaw) -> str:
    """The fitted law: parameters by topology, what each topology is worth, and what the data could not tell."""
    ranges = law.ranges[""]
    lines = [
        f"law           {law.law}, terms {law.pooling}; {len(law.rows_used)} cells, objective {law.objective:.4g}, "
        f"scatter {100 * law.log_rms:.2g} % of the loss; status {law.status}",
        f"fitted on     N {_count(ranges['N'][0])} to {_count(ranges['N'][1])}, D {_count(ranges['D'][0])} to "
        f"{_count(ranges['D'][1])}, d/L {ranges['R'][0]:.3g} to {ranges['R'][1]:.3g}",
        f"counted       {law.counting}",
    ]
    if law.shared:
        lines.append("shared        " + ", ".join(f"{k} {v:.4g}" for k, v in law.shared.items()))
    largest = ranges["N"][1]
    for k, topology in enumerate(law.topologies):
        own = {name: v for name, v in law.parameters(topology).items() if name not in law.shared}
        words = ", ".join(f"{name} {value:.4g}" for name, value in own.items())
        ratio = law.best_ratio(topology, largest)
        best = "" if ratio is None else f"; best d/L at the largest N {float(ratio):.3g}"
        if ends := law.profiles.get(f"best d/L[{topology}]"):
            best += f" ({ends[0]:.3g} to {ends[1]:.3g})"
        if ratio is not None and not ranges["R"][0] <= float(ratio) <= ranges["R"][1]:
            best += " (beyond what was fitted)"
        lines.append(f"{'by topology' if k == 0 else '':14}{topology}: {words}{best}{_worth(law, topology)}")
    lines += [*_certainty(law), *_chosen_from(law), *_best_rates(law.context)]
    doubts = [*law.doubts(), *law.notes]
    doubts += [f"row left out ({x.topology}): {x.reason}" for x in law.left_out]
    c = law.context
    if c.get("cells_with_one_lr"):
        doubts.append(f"learning rate not searched, one tried: {c['cells_with_one_lr']} of {c['cells']} cells")
    if c.get("cells_with_lr_of_base_shape"):
        found = f"{c['cells_with_lr_of_base_shape']} of {c['cells']} cells"
        doubts.append(f"learning rate searched at the base shape of its topology only: {found}")
    if c.get("cells_best_lr_at_edge"):
        doubts.append(
            f"best learning rate at the edge of those tried: {c['cells_best_lr_at_edge']} of {c['cells']} cells"
        )
    for status in ("diverged", "pruned"):
        if c.get(f"n_{status}"):
            doubts.append(f"{status}, so censored and not fitted: {c[f'n_{status}']} of {c['n_trials']} trials")
    lines += [f"{'doubts' if k == 0 else '':14}{doubt}" for k, doubt in enumerate(doubts)]
    return "\n".join(lines)


def _certainty(law: FittedLaw) -> list[str]:
    """Profile intervals, errors on held-out sizes, and by how much intervals are widened for them."""
    lines = []
    if law.profiles:
        exponents = {name: ends for name, ends in law.profiles.items() if not name.startswith("best ")}
        words = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in exponents.items()]
        words += ["of the best d/L in brackets"] * (len(law.profiles) > len(exponents))
        lines.append(f"95 % ranges   {', '.join(words)} (profile likelihood)")
    for k, size in enumerate(law.held_out):
        lines.append(
            f"{'held out' if k == 0 else '':14}N {_count(size['N'])} predicted from smaller sizes: off by "
            f"{100 * size['error']:.2g} % of the loss in {counted(int(size['rows']), 'cell')}, "
            f"{100 * size['expected']:.2g} % expected"
        )
    if law.held_out:
        lines.append(
            f"              so intervals of predictions are {law.inflation:.2f} times as wide as the bootstrap's"
        )
    elif law.draws is not None:
        lines.append(
            "held out      no size: intervals take the form of the law as true; run three sizes or more, the smaller "
            "of them a factor 3 apart or more"
        )
    return lines


def _chosen_from(law: FittedLaw) -> list[str]:
    """The candidates that an automatic choice compared, best held-out error first, and why this one."""
    if not law.choice:
        return []
    lines = [f"chosen        {law.choice['why']}"]
    fitted = [c for c in law.choice["candidates"] if "refused" not in c]
    for c in sorted(fitted, key=lambda c: (c["held_out"] is None, c["held_out"], c["aicc"])):
        error = "no size held out" if c["held_out"] is None else f"held-out error {100 * c['held_out']:.2g} %"
        rank = "-" if c["rank"] is None else f"{c['rank']:.2f}"
        mark = "*" if (c["law"], c["pooling"]) == (law.law, law.pooling) else " "
        lines.append(
            f"            {mark} {c['law']}, {c['pooling']}: {error}, rank correlation {rank}, AICc {c['aicc']:.1f}"
        )
    refused = [f"{c['law']}, {c['pooling']}" for c in law.choice["candidates"] if "refused" in c]
    return lines + ([f"              not fitted: {'; '.join(refused)}"] if refused else [])


def _best_rates(context: dict[str, Any]) -> list[str]:
    """In how many cells a parabola gives the best learning rate, how well, and why the others have none."""
    found = dict(context.get("lr_found", {}))
    fitted = found.pop("vertex", 0)
    if not fitted:
        return []
    error = context["vertex_ln_lr_sd"]
    known = "its error not known (one seed a rate)" if error is None else f"to {100 * error:.2g} % in the median"
    others = "".join(f"; {how.replace('_', ' ')}: {n}" for how, n in sorted(found.items()))
    return [f"best rates    vertex of a parabola in ln lr in {fitted} of {context['cells']} cells, {known}{others}"]


def _worth(law: FittedLaw, topology: str) -> str:
    if "pre_ln" not in law.topologies or topology == "pre_ln":
        return ""
    worth = law.worth(topology)
    return "" if math.isnan(worth) else f"; worth {worth:.3g} x the parameters of pre_ln"


# ---- progress


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """On a terminal the time that has passed and what is being done, on stderr, gone at the end; elsewhere nothing."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    from rich.progress import Progress as Line
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Line(*columns, console=console, transient=True) as line:
        task = line.add_task(title, total=None, note="")
        yield lambda text: line.update(task, note=text)


@contextmanager
def progress_lines(title: str) -> Iterator[Listener]:
    """A bar on a terminal; elsewhere a line for each event, routine ones every ten seconds. On stderr.

    The bar and the share count FLOPs, for trials differ by orders of magnitude.
    """
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        with Bar(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console,
        ) as bar:  # fmt: skip
            task = bar.add_task(title, total=None, note="")

            def show(p: Progress) -> None:
                trials = f"{title} {p.done}/{p.planned}" if p.planned else title
                bar.update(
                    task, completed=p.flops_done, total=p.flops_planned or None, note=p.message, description=trials
                )

            yield show
        return
    last = 0.0

    def listener(p: Progress) -> None:
        nonlocal last
        if not p.routine or time.monotonic() - last > 10:
            last = time.monotonic()
            share = f"[{p.done}/{p.planned}, {p.flops_done / p.flops_planned:.0%}] " if p.planned else ""
            print(f"{share}{p.message}", file=sys.stderr, flush=True)

    yield listener
