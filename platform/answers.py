"""An optimum in plain words. Text only, so that a query starts fast."""

from __future__ import annotations

from collections.abc import Sequence

from depthlaw.scaling.answer import BudgetUse, Candidate, NearTies, Optimum
from depthlaw.scaling.compare import Comparison
from depthlaw.scaling.hardware import Workload
from depthlaw.scaling.laws import Array
from depthlaw.scaling.next_cells import NextCells
from depthlaw.scaling.units import counted, format_quantity

SHOWN = 5  # of the draws' winners, and of the designs on the front
FAR = 2.0  # a factor in N or d/L past the runs, beyond which a design on the front is not shown


def design_words(c: Candidate) -> str:
    shape = f"{c.topology}, {counted(c.n_layers, 'layer')} of width {c.d_model} (d/L {c.ratio:.3g})"
    return ", ".join(filter(None, (shape, past_words(c))))


def past_words(c: Candidate) -> str:
    """How far a design lies past the runs of its topology; empty within them."""
    factors = {"N": f"{c.size_beyond:.2g}", "d/L": f"{c.ratio_beyond:.2g}"}
    past = [f"{what} {factor}x" for what, factor in factors.items() if factor != "1"]
    return f"{' and '.join(past)} past the runs" if past else ""


def verdict(use: BudgetUse) -> str:
    if use.binds:
        return f"binds: 10 % more buys {-use.price:.4f} nats"
    if use.next_limit is None:
        return "is used up, but more of it buys no better design" if use.use > 0.95 * use.limit else "does not bind"
    more = f"{use.next_limit / use.limit - 1:.0%}"
    return f"holds the answer: a better design needs {format_quantity(use.next_limit, use.unit)}, {more} more"


def percent(share: float) -> str:
    """Whole percent, and two digits of what is less."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def worth_showing(beyond: Sequence[float] | Array) -> list[int]:
    """Numbers of the designs on a front, best loss first, that the law can speak of, and of the best in any case."""
    return [k for k, factor in enumerate(beyond) if k == 0 or factor <= FAR]


def front_words(size: int, near: int, shown: int) -> str:
    """size: of the front; near: those of it that are `worth_showing`."""
    far = f"; {size - near} others lie more than {FAR:g}x past the runs" if near < size else ""
    return f"{size} designs that no other beats in loss, tpot and KV memory together, {shown} of them{far}"


def spread(size: int, shown: int) -> list[int]:
    """Numbers of `shown` of `size` designs at most, evenly from the first to the last."""
    return sorted({round(k * (size - 1) / (shown - 1)) for k in range(shown)}) if size else []


def _front_lines(answer: Optimum) -> list[str]:
    """A few designs spread over the front from the least loss to the least of the other two."""
    if len(answer.pareto) < 2:
        return []
    front = [answer.pareto[k] for k in worth_showing([c.beyond for c in answer.pareto])]
    some = spread(len(front), SHOWN)
    return [f"trade-offs    {front_words(len(answer.pareto), len(front), len(some))}"] + [
        f"              {c.loss:.4f}, {format_quantity(c.tpot_s, 'seconds')}, {format_quantity(c.kv_bytes, 'bytes')}: "
        f"{design_words(c)}"
        for c in (front[i] for i in some)
    ]


def model_words(best: Candidate) -> str:
    return (
        f"{format_quantity(best.params, 'count')} parameters, {format_quantity(best.backbone_params, 'count')} in the "
        f"backbone; trained on {format_quantity(best.tokens, 'count')} tokens"
    )


def loss_words(best: Candidate, draws: int) -> str:
    """draws: bootstrap draws behind the interval, 0 for a linearised one."""
    how = f"{draws} bootstrap draws" if draws else "linearised"
    return f"{best.loss:.4f} nats a token ({best.lower:.4f} to {best.upper:.4f}: 95 %, {how})"


def use_words(use: BudgetUse) -> str:
    return f"{format_quantity(use.use, use.unit)} of {format_quantity(use.limit, use.unit)}"


def none_binds(uses: Sequence[BudgetUse]) -> str:
    """What to say where every budget has room; empty where one has not."""
    held = any(use.binds or use.next_limit for use in uses)
    return "" if held or not uses else "no budget binds: more of any one alone changes nothing"


def ties_words(ties: NearTies) -> str:
    """Empty where the best design has no rival within the noise."""
    if ties.count < 2:
        return ""
    return (
        f"{ties.count} designs within the fit's own scatter ({100 * ties.noise:.2g} % of the loss): "
        f"L {ties.n_layers[0]} to {ties.n_layers[1]}, d {ties.d_model[0]} to {ties.d_model[1]}, "
        f"{', '.join(ties.topologies)}"
    )


def load_words(training: str, load: Workload) -> str:
    return (
        f"{training}; context {load.context}, batch {load.batch}, "
        f"{load.weight_bytes:g}-byte weights, {load.cache_bytes:g}-byte cache"
        + (f", over {load.tensor_parallel} devices" if load.tensor_parallel > 1 else "")
    )


def answer_text(answer: Optimum) -> str:
    """The answer, what each budget leaves, the alternatives and what to doubt."""
    best = answer.best
    lines = [
        f"best design   {design_words(best)}",
        f"              {model_words(best)}",
        f"loss          {loss_words(best, answer.draws)}",
    ]
    for k, use in enumerate(answer.budgets):
        lines.append(f"{'budgets' if k == 0 else '':14}{use.name} {use_words(use)}, {verdict(use)}")
    if none_binds(answer.budgets):
        lines.append(f"              {none_binds(answer.budgets)}")
    for k, use in enumerate(answer.budgets):
        lines.append(f"{'counted' if k == 0 else '':14}{use.name}: {use.describe}")
    for k, c in enumerate(answer.per_topology):
        share = f", least in {percent(answer.topology_shares[c.topology])} of draws" if answer.draws else ""
        lines.append(f"{'by topology' if k == 0 else '':14}{design_words(c)}: {c.loss:.4f}{share}")
    if ties_words(answer.near_ties):
        lines.append(f"near ties     {ties_words(answer.near_ties)}")
    for k, c in enumerate(answer.contenders[:SHOWN]):
        lines.append(f"{'draws won by' if k == 0 else '':14}{design_words(c)}: {percent(c.share or 0.0)}")
    lines += _front_lines(answer)
    for k, flag in enumerate(answer.flags):
        lines.append(f"{'doubts' if k == 0 else '':14}{flag}")
    machine = answer.hardware
    lines.append(f"assumed       {load_words(answer.training, Workload(**answer.workload))}")
    if any(use.unit == "hours" for use in answer.budgets):
        lines.append(f"              training at {answer.mfu:.0%} of the peak of {machine['name']}")
    if answer.lattice:
        lines.append(f"              {answer.lattice}")
    if len(answer.pareto) > 1 or any(use.unit == "seconds" for use in answer.budgets):
        lines.append(f"              times of {machine['name']}: {machine['source']}")
    return "\n".join(lines)


def comparison_text(found: Comparison) -> str:
    """One line a topology: what it is worth, how sure that is, and its best shape; doubts of several once for all."""
    of_doubt: dict[str, list[str]] = {}
    for t in found.topologies:
        of_doubt.setdefault(t.doubt, []).append(t.topology)
    several = {doubt: names for doubt, names in of_doubt.items() if doubt and len(names) > 1}
    columns = ("topology", f"x {found.reference}", "95 %", "better in", "best d/L", "95 %", "")
    rows = [columns]
    for t in found.topologies:
        rows.append(
            (
                t.topology,
                "-" if t.worth is None else f"{t.worth:.3g}",
                _span(t.lower, t.upper),
                "-" if t.better_in is None or t.topology == found.reference else percent(t.better_in) + " of draws",
                "-" if t.best_ratio is None else f"{t.best_ratio:.3g}",
                _span(t.ratio_lower, t.ratio_upper),
                "" if t.doubt in several else t.doubt,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(columns))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    intervals = (
        f"intervals from {found.draws} bootstrap draws, of d/L from {found.ratio_by}"
        if found.draws
        else "the law carries no draws"
    )
    return "\n".join(
        [
            *lines,
            *(f"{', '.join(names)}: {doubt}" for doubt, names in several.items()),
            f"worth x times the parameters of {found.reference}, each at its best shape, at N "
            f"{format_quantity(found.N, 'count')} and D {format_quantity(found.D, 'count')}; {intervals}",
        ]
    )


def _span(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def next_cells_text(plan: NextCells) -> str:
    """The chosen cells by topology and size, and what they are expected to bring."""
    lines = [
        f"{counted(len(plan.cells), 'run')}   {format_quantity(plan.flops, 'FLOPs')} of "
        f"{format_quantity(plan.compute, 'FLOPs')}",
        f"for       the best d/L at N = {format_quantity(plan.target, 'count')}; standard deviation of its logarithm:",
    ]
    for t, before in plan.sd_before.items():
        plain = "" if plan.sd_ladder is None else f" (a plain ladder: {plan.sd_ladder[t]:.3g})"
        lines.append(f"          {t}: {before:.3g} now, {plan.sd_after[t]:.3g} after{plain}")
    if plan.sd_ladder is not None:
        lines.append(
            f"          (plain ladder: four shapes a size, sizes 4x apart, D = 20 N, "
            f"{format_quantity(plan.ladder_flops, 'FLOPs')})"
        )
    for k, c in enumerate(sorted(plan.cells, key=lambda c: (c.topology, c.N, c.n_layers, c.tokens))):
        lines.append(
            f"{'runs' if k == 0 else '':10}{c.topology}, {c.n_layers} x {c.d_model}: "
            f"N {format_quantity(c.N, 'count')}, D {format_quantity(c.tokens, 'count')} ({c.ratio:g} N), "
            f"{format_quantity(c.flops, 'FLOPs')}"
        )
    return "\n".join([*lines, "assumed   the law's form and scatter hold at every size"])
