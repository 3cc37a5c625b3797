"""What loss costs in time and memory: the Pareto front."""

from __future__ import annotations

from depthlaw.platform import answers
from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, legend, log_axis, of_topology, panel, widened
from depthlaw.scaling.units import format_quantity

TITLE = "Loss against time and KV memory"
SHOWN = 12  # rows of the table
BARS = 40  # more points than these have no bars, which would hide them
AXES = {"tpot_s": ("time per output token", "seconds"), "kv_bytes": ("KV cache", "bytes")}


def pareto_front(m: Material) -> Drawing:
    if m.answer is None:
        return Drawing(TITLE, "Designs that no other beats in everything at once.", lacks=m.no_answer)
    whole = m.answer.pareto
    front = [whole[k] for k in answers.worth_showing([c.beyond for c in whole])]
    load, machine = m.answer.workload, m.answer.hardware
    caption = (
        f"The {len(whole)} designs within the budgets that no other equals or beats in predicted loss (nats a token),"
        " time per output token and KV memory all together. A design above and to the right of another in one panel is "
        f"the better one in the other. At context {load['context']}, batch {load['batch']}; times of "
        f"{machine['name']}, modelled and not measured here: {machine['source']}. "
    )
    if len(front) < len(whole):
        caption += (
            f"Not shown: {len(whole) - len(front)} whose d/L or size is more than {answers.FAR:g} times beyond the "
            "runs of their topology, where the law is a guess. "
        )
    if any(c.beyond > 1.0 for c in front):
        caption += (
            "Hollow marks, with a star in the table, have a d/L or size beyond those fitted for their topology: their "
            "loss is extrapolated. "
        )
    if len(front) <= BARS:
        caption += "Bars are 95 % intervals of the loss of one new run, with the form of the law taken as true. "
    caption += "Neighbours on the front differ by less than the law can tell; the table has some, evenly spread."
    panels = []
    for value, (words, unit) in AXES.items():
        figure, ax = panel(f"Loss against {words}", words, "predicted loss, nats a token")
        for topology in dict.fromkeys(c.topology for c in front):
            style = {**of_topology(m.topologies, topology), "linestyle": "none", "label": topology}
            for hollow in (True, False):  # the legend shows the last, if both are there
                own = [c for c in front if c.topology == topology and (c.beyond > 1.0) == hollow]
                if not own:
                    continue
                x, y = [getattr(c, value) for c in own], [c.loss for c in own]
                ends = [[c.loss - c.lower for c in own], [c.upper - c.loss for c in own]]
                fill = (
                    {"markerfacecolor": "white", "markeredgecolor": style["color"], "markeredgewidth": 1.0}
                    if hollow
                    else {}
                )
                bars = ends if len(front) <= BARS else None
                ax.errorbar(x, y, yerr=bars, elinewidth=0.7, ecolor="0.65", **{**style, **fill})
        log_axis(ax.xaxis, *widened([getattr(c, value) for c in front], 1.15), unit=unit)
        legend(figure, ax)
        alt = (
            f"Predicted loss against {words} of {len(front)} designs, from {front[0].loss:.4f} at "
            f"{format_quantity(getattr(front[0], value), unit)} to {front[-1].loss:.4f} at "
            f"{format_quantity(getattr(front[-1], value), unit)}."
        )
        panels.append(Panel("pareto", alt, figure))
    rows = [
        [c.topology, str(c.n_layers), str(c.d_model), f"{c.ratio:.3g}{' *' * (c.beyond > 1.0)}",
         f"{c.loss:.4f}", f"{c.lower:.4f} to {c.upper:.4f}",
         format_quantity(c.tpot_s, "seconds"), format_quantity(c.kv_bytes, "bytes")]
        for c in (front[i] for i in answers.spread(len(front), SHOWN))
    ]  # fmt: skip
    columns = ["topology", "layers", "width", "d / L", "loss", "95 % interval", "time per token", "KV cache"]
    return Drawing(TITLE, caption, panels, table=(columns, rows))
