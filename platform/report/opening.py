"""The answer in one sentence, and the table below it."""

from __future__ import annotations

from depthlaw.platform.answers import past_words, percent
from depthlaw.platform.report.material import Material
from depthlaw.scaling.answer import Candidate, Optimum
from depthlaw.scaling.fitted import concerns
from depthlaw.scaling.laws import law as find_law
from depthlaw.scaling.units import counted, format_quantity

NAMED = 6  # of what the data do not identify
COLUMNS = (
    "topology", "layers", "width", "d / L", "parameters", "predicted loss", "95 % interval", "least in",
    "within noise", "time per token", "KV cache",
)  # fmt: skip


def sentence(m: Material) -> str:
    a = m.answer
    if a is None:
        return f"There is no answer: {m.no_answer}.{_measured(m)}"
    best = a.best
    return (
        f"Under {_limits(a)}, trained on {format_quantity(best.tokens, 'count')} tokens, the best design is "
        f"{best.topology} with {_shape(best)}: {best.loss:.4f} nats a token (95 % interval {best.lower:.4f} to "
        f"{best.upper:.4f}). {_binding(m, a)} {_noise(a)}{_beyond(best)}{_unknown(m, best)}"
    )


def _measured(m: Material) -> str:
    done = m.cells[m.cells["val_loss"].notna()]
    if done.empty:
        return ""
    c = done.loc[done["val_loss"].idxmin()]
    return (
        f" The least loss that was measured is {c['val_loss']:.4f} nats a token, of {c['topology']} with "
        f"{counted(int(c['n_layers']), 'layer')} of width {int(c['d_model'])} on "
        f"{format_quantity(c['tokens'], 'count')} tokens."
    )


def _shape(c: Candidate) -> str:
    return f"{counted(c.n_layers, 'layer')} of width {c.d_model} (d/L {c.ratio:.3g})"


def _limits(a: Optimum) -> str:
    return " and ".join(f"{u.name} at most {format_quantity(u.limit, u.unit)}" for u in a.budgets) or "no budget"


def _binding(m: Material, a: Optimum) -> str:
    binding = [f"{u.name} (10 % more buys {-u.price:.4f} nats)" for u in a.budgets if u.binds]
    if binding:
        return f"What binds is {' and '.join(binding)}."
    if m.law and find_law(m.law.law).one_size:
        return "No budget binds among designs of the one size that the law holds for."
    held = [u.name for u in a.budgets if u.next_limit is not None]
    if held:
        return f"No budget binds at 10 % more; {' and '.join(held)} holds the answer further on."
    return "No budget binds: more of any one alone changes nothing."


def _noise(a: Optimum) -> str:
    others = [t for t in a.near_ties.topologies if t != a.best.topology]
    noise = f"the law's own scatter, {100 * a.near_ties.noise:.2g} % of the loss"
    if others:
        return f"Within {noise}, the data do not tell it from {_and(others)}."
    if len(a.per_topology) < 2:
        return ""
    return f"No other topology comes within {noise}."


def _beyond(best: Candidate) -> str:
    past = past_words(best)
    return f" It lies {past} of {best.topology}: this is an extrapolation." if past else ""


def _unknown(m: Material, best: Candidate) -> str:
    """Those that the answer rests on by name; of many others how many they are."""
    names = list(m.law.unidentified) if m.law else []
    if len(names) > NAMED:
        own = [name for name in names if concerns(name, best.topology)]
        names = [*own, f"{len(names) - len(own)} {'others' if own else 'parameters of other topologies'}"]
    return f" But the data do not identify {_and(names)} of the law: see what to doubt." if names else ""


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def rows(m: Material) -> list[list[str]]:
    a = m.answer
    if a is None:
        return []
    shares = a.topology_shares
    return [
        [c.topology, str(c.n_layers), str(c.d_model), f"{c.ratio:.3g}", format_quantity(c.params, "count"),
         f"{c.loss:.4f}", f"{c.lower:.4f} to {c.upper:.4f}",
         f"{percent(shares[c.topology])} of draws" if shares else "-",
         "yes" if c.topology in a.near_ties.topologies else "no",
         format_quantity(c.tpot_s, "seconds"), format_quantity(c.kv_bytes, "bytes")]
        for c in a.per_topology
    ]  # fmt: skip


def caption(m: Material) -> str:
    a = m.answer
    if a is None:
        return ""
    load = a.workload
    return (
        f"The best design of each topology, best first, of {a.feasible:,} that meet the budgets of {a.considered:,} "
        f"considered. {m.question}Interval: {a.interval}. Least in: the share of the law's bootstrap draws in which "
        "one of the topology's designs is the best of all. Within noise: one of its designs is within the law's own "
        "scatter of "
        f"the best. Training: {a.training}. Context {load['context']}, batch {load['batch']}, "
        f"{load['weight_bytes']:g}-byte weights, {load['cache_bytes']:g}-byte cache, {load['tensor_parallel']} device"
        f"{'s' * (load['tensor_parallel'] > 1)}. Designs: {a.lattice}. Times of {a.hardware['name']}: "
        f"{a.hardware['source']}."
    )
