"""The answer as HTML, in the words of the command line. Made of strings, since a moved slider waits for it; every text
that is not a number of ours goes through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from depthlaw.platform import answers
from depthlaw.platform.explore.chart import RADIUS, chart, marker
from depthlaw.platform.explore.reply import Reply
from depthlaw.scaling.answer import Candidate, Infeasible
from depthlaw.scaling.optimum import Found
from depthlaw.scaling.table import Wins
from depthlaw.scaling.units import format_quantity

DRAWN = 60  # of the front


class Html(str):
    """Text that is HTML already."""


def summary(reply: Reply) -> str:
    """One line of plain text, which is also read aloud."""
    if reply.found is not None:
        best = reply.found.candidates([reply.found.best])[0]
        binding = [use.name for use in reply.found.uses() if use.binds]
        held = f"{' and '.join(binding)} bind{'s' * (len(binding) == 1)}" if binding else "no budget binds"
        return f"{answers.design_words(best)}: loss {best.loss:.4f}, {held}"
    if reply.infeasible is not None:
        return f"No design meets {' and '.join(reply.infeasible.conflict)}"
    return "Not asked: " + "; ".join(reply.errors.values())


def answer(reply: Reply) -> str:
    if reply.found is not None and reply.question is not None:
        return _found(reply.found, reply.question.flags(reply.found), reply.question.words)
    if reply.infeasible is not None:
        return _infeasible(reply.infeasible)
    return "<h2>Not asked</h2>" + _list(reply.errors.values(), "errors")


def _found(found: Found, flags: Sequence[str], designs: str) -> str:
    labels = found.table.labels
    best, uses = found.candidates([found.best])[0], found.uses()
    draws = 0 if found.law.draws is None else len(found.law.draws)
    ties = (
        answers.ties_words(found.near_ties()) or "None: every other design is further off than the scatter of the fit."
    )
    budgets = _table(
        ("budget", "uses", "verdict"),
        ((use.name, answers.use_words(use), answers.verdict(use)) for use in uses),
        "uses",
        [use.binds for use in uses],
    )
    topologies = _table(
        ("design", "loss", "95 %"),
        (
            (_design(c, labels), f"{c.loss:.4f}", f"{c.lower:.4f} to {c.upper:.4f}")
            for c in found.candidates(found.winners())
        ),
        "topologies",
    )
    considered = f"{designs}; {found.feasible.sum():,} of {found.feasible.size:,} designs meet the budgets"
    return "".join(
        (
            "<h2>Best design</h2>",
            f'<p class="big" id="best">{_design(best, labels)}</p>',
            f'<p id="loss">{escape(answers.loss_words(best, draws))}</p>',
            _quiet(answers.model_words(best)),
            "<h3>Budgets</h3>",
            budgets if uses else "<p>None is on: every design is allowed.</p>",
            f"<p>{escape(answers.none_binds(uses))}</p>",
            "<h3>Near ties</h3>",
            f'<p id="ties">{escape(ties)}</p>',
            "<h3>Best of each topology</h3>",
            topologies,
            "<h3>Doubts</h3>",
            _list(flags, "doubts") if flags else "<p>None.</p>",
            "<h3>Assumed</h3>",
            _quiet(answers.load_words(found.training.words, found.workload)),
            _quiet(considered),
            _quiet(f"times of {found.hardware.name}: {found.hardware.source}"),
        )
    )


def _infeasible(no: Infeasible) -> str:
    table = _table(
        ("budget", "use / limit", ""),
        (
            (name, f"{ratio:.3g}", "in conflict" if name in no.conflict else "met" if ratio <= 1 else "missed")
            for name, ratio in no.ratios.items()
        ),
        "ratios",
        [name in no.conflict for name in no.ratios],
    )
    return (
        f'<h2>No design meets the budgets</h2><p id="infeasible">{escape(str(no))}</p><h3>Nearest design</h3>'
        f'<p class="big">{escape(answers.design_words(no.nearest))}</p>{table}'
    )


def without(reply: Reply) -> str:
    """What stands where there is no best design to say more about."""
    return _quiet("No design meets the budgets." if reply.infeasible is not None else "Not asked.")


def front(found: Found) -> str:
    """The front drawn twice and as a table."""
    whole = found.trade_offs()
    rows = whole[answers.worth_showing(found.beyond(whole))]
    some = found.candidates(rows[answers.spread(len(rows), DRAWN)])
    if not some:
        return "<p>No design has a finite time.</p>"
    best, labels = found.candidates([found.best])[0], found.table.labels
    key = "".join(f"<span>{_sign(t, labels)}{escape(t)}</span>" for t in dict.fromkeys(c.topology for c in some))
    table = _table(
        ("design", "loss", "time a token", "KV memory"),
        (
            (
                _design(c, labels),
                f"{c.loss:.4f}",
                format_quantity(c.tpot_s, "seconds"),
                format_quantity(c.kv_bytes, "bytes"),
            )
            for c in some
        ),
        "front-table",
    )
    return (
        _quiet(f"{answers.front_words(len(whole), len(rows), len(some))}; the ring is the best design")
        + f'<div class="charts">{chart(some, best, labels, "tpot_s", "seconds", "time per output token")}'
        + f"{chart(some, best, labels, 'kv_bytes', 'bytes', 'KV memory of the batch')}</div>"
        + f'<p class="key">{key}</p><h3 id="front-title">The same as a table</h3>'
        + f'<div class="tall" tabindex="0" role="region" aria-labelledby="front-title">{table}</div>'
    )


def shares(found: Found, wins: Wins | None) -> str:
    """Who has the least loss in how many of the law's draws."""
    if wins is None:
        return "<p>The law carries no draws: fit again with --draws 1000.</p>"
    feasible = {found.table.labels[found.table.design[i]] for i in found.winners()}
    by_topology = [(t, answers.percent(s)) for t, s in wins.by_topology(found.table).items() if t in feasible]
    some = [(answers.design_words(c), answers.percent(c.share or 0.0)) for c in found.contenders(wins)]
    return (
        _quiet(f"The law refitted to resampled runs, {wins.draws} times:")
        + _table(("topology", "has the least loss in"), by_topology, "topology-shares")
        + _table(("design", "has the least loss in"), some[: answers.SHOWN], "wins")
    )


def _design(c: Candidate, labels: Sequence[str]) -> Html:
    return Html(_sign(c.topology, labels) + escape(answers.design_words(c)))


def _sign(topology: str, labels: Sequence[str]) -> str:
    size = 3 * RADIUS
    drawn = marker(list(labels).index(topology), size / 2, size / 2)
    return f'<svg viewBox="0 0 {size} {size}" class="sign" aria-hidden="true">{drawn}</svg>'


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _list(texts: Iterable[str], name: str) -> str:
    return f'<ul id="{name}">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str, marked: Sequence[bool] = ()) -> str:
    """Rows of text or Html; those marked stand out."""
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = []
    for k, row in enumerate(rows):
        cells = "".join(f"<td>{cell if isinstance(cell, Html) else escape(cell)}</td>" for cell in row)
        body.append(f'<tr class="marked">{cells}</tr>' if k < len(marked) and marked[k] else f"<tr>{cells}</tr>")
    table = f'<table id="{name}"><thead><tr>{titles}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div class="wide">{table}</div>'
