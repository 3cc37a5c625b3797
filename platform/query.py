"""The two questions people ask of what was trained: which law, and which design. Imports neither torch nor ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.archs.costs import Costs
from depthlaw.archs.errors import TopologyError
from depthlaw.archs.shape import ShapeRule, shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.scaling.budgets import Budget, Limit
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.optimum import Found, Optimum, OptimumError, Prepared
from depthlaw.scaling.training import MFU, SEQ_LEN

if TYPE_CHECKING:
    import pandas as pd

    from depthlaw.platform.store import Store

DEEPEST = 128
VOCABULARY = 50_280  # of the published suites, where the law's sweep does not say
LARGEST = 2_000_000  # designs a topology, some seconds and a gigabyte


def fit(
    rows: Store | pd.DataFrame | Mapping[str, Any],
    law: str = "shape",
    *,
    pooling: str = "shared",
    experiment: str | None = None,
    draws: int = 1000,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> FittedLaw:
    """Fits a law to a store's cells at their best learning rate, or to a frame of runs.

    From a store the law also carries what a query needs to turn (L, d) into a model: shape rule, vocabulary and
    sequence length. law, pooling: `auto` chooses by held-out sizes, see `depthlaw.scaling.choose`. draws: refits to
    resampled runs, for intervals; 0 leaves out these, the profiles and the held-out sizes. A frame says in a column
    `run` which rows come from one training run. progress is told what is being done. Other options go to
    `depthlaw.scaling.fit.fit`. Raises LawError, StoreError.
    """
    from depthlaw.platform.observations import context, law_rows
    from depthlaw.platform.store import Store
    from depthlaw.scaling.assess import assess
    from depthlaw.scaling.choose import AUTO, choose
    from depthlaw.scaling.fit import fit as fit_frame

    progress("searching parameters")
    frame = law_rows(rows, experiment) if isinstance(rows, Store) else rows
    if AUTO in (law, pooling):
        fitted = choose(frame, law, pooling, **options)
    else:
        fitted = fit_frame(frame, law, pooling, **options)
    if draws:
        fitted = assess(fitted, frame, draws, columns=options.get("columns"), progress=progress)
    return replace(fitted, context=context(rows, frame)) if isinstance(rows, Store) else fitted


def lattice(rule: ShapeRule, layers: tuple[int, int], widest: int) -> tuple[np.ndarray, np.ndarray]:
    """(n_layers, d_model) of every design that the rule allows, as two int64 arrays of one length."""
    size = (layers[1] - layers[0] + 1) * (widest // rule.width_step)
    if size > LARGEST:
        raise OptimumError(
            f"layers {layers[0]} to {layers[1]} by widths up to {widest} are {size:,} designs: narrow them"
        )
    depths = np.arange(layers[0], layers[1] + 1, dtype=np.int64)
    widths = rule.widths(widest)
    return np.repeat(depths, widths.size), np.tile(widths, depths.size)


def installed(law: FittedLaw) -> tuple[list[str], list[str]]:
    """The law's topologies whose designs can be counted, and those that no package here has.

    Raises OptimumError if there are only the latter.
    """
    known: list[str] = []
    unknown: list[str] = []
    for label in law.topologies:
        try:
            topology(label)
        except TopologyError:
            unknown.append(label)
        else:
            known.append(label)
    if not known:
        raise OptimumError(
            f"none of the law's topologies ({', '.join(unknown)}) is installed here: install the package that has them"
        )
    return known, unknown


def left_out(unknown: Sequence[str]) -> str:
    """What is said of topologies that are not installed."""
    return (
        f"no topology of this installation is named {', '.join(unknown)}: left out, for its parameters and times are "
        "not known; install the package that has it"
    )


def designs_of(
    law: FittedLaw,
    topologies: Sequence[str] | None = None,
    layers: tuple[int, int] | None = None,
    rule: str | None = None,
    widest: int | None = None,
    vocab_size: int | None = None,
) -> tuple[list[Costs], str]:
    """Every design that a question to `optimum` is about, a lattice for each topology, and which they are in words.

    Without `topologies` those of the law that are installed.
    """
    low, high = layers or (min(2, int(law.ranges[""]["L"][0])), DEEPEST)
    if not 1 <= low <= high:
        raise OptimumError(f"layers {low} to {high}: give the smallest, at least 1, and then the largest")
    chosen = shape_rule(rule or str(law.context.get("shape_rule", "published")))
    vocabulary = int(law.context.get("vocab_size", VOCABULARY) if vocab_size is None else vocab_size)
    n_layers, d_model = lattice(chosen, (low, high), chosen.widest if widest is None else widest)
    shape = chosen.shape(n_layers, d_model, vocabulary)
    wanted = dict.fromkeys(topology(label) for label in topologies or installed(law)[0])  # each once
    words = (
        f"L {low} to {high}, d up to {d_model.max(initial=0)}, shape rule {chosen.name} ({chosen.describe}), "
        f"vocabulary {vocabulary}"
    )
    return [Costs(one, shape) for one in wanted], words


class Question:
    """`optimum` for many questions about the same designs: after the first, one that moves a limit takes milliseconds.

    The arguments say which designs, as in `optimum`; words: the same in plain words. May be asked from several threads.
    """

    def __init__(
        self,
        law: FittedLaw,
        topologies: Sequence[str] | None = None,
        layers: tuple[int, int] | None = None,
        rule: str | None = None,
        widest: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        designs, self.words = designs_of(law, topologies, layers, rule, widest, vocab_size)
        self.law, self.prepared = law, Prepared(law, designs)
        unknown = [] if topologies else installed(law)[1]
        self.doubts: tuple[str, ...] = (left_out(unknown),) if unknown else ()
        off = law.context.get("cells_off_the_shape_rule", 0)
        if off and rule is None:
            name = law.context["shape_rule"]
            self.doubts += (
                f"{off} of {law.context['cells']} cells fitted have other heads or d_ff than the shape rule {name!r}",
            )

    def seq_len(self, asked: int | None) -> int:
        return int(self.law.context.get("seq_len", SEQ_LEN)) if asked is None else asked

    def find(self, budgets: str | Sequence[str | Limit] = (), *, seq_len: int | None = None, **asked: Any) -> Found:
        """The best design, before the law's draws are looked at. asked: the rest of what `optimum` takes."""
        return self.prepared.find(budgets, seq_len=self.seq_len(seq_len), **asked)

    def span(self, budget: Budget, *, seq_len: int | None = None, **asked: Any) -> tuple[float, float] | None:
        """The least and the most that a design uses of a budget, see `Prepared.span`."""
        return self.prepared.span(budget, seq_len=self.seq_len(seq_len), **asked)

    def flags(self, found: Found) -> tuple[str, ...]:
        return (*found.flags(), *self.doubts)

    def optimum(self, found: Found) -> Optimum:
        return replace(found.optimum(), flags=self.flags(found), lattice=self.words)


def optimum(
    law: FittedLaw,
    budgets: str | Sequence[str] = (),
    *,
    topologies: Sequence[str] | None = None,
    tokens: float | None = None,
    tokens_per_param: float | None = None,
    seq_len: int | None = None,
    mfu: float = MFU,
    workload: Workload | None = None,
    hardware: Hardware | str | None = None,
    layers: tuple[int, int] | None = None,
    rule: str | None = None,
    widest: int | None = None,
    vocab_size: int | None = None,
) -> Optimum:
    """The (topology, L, d) of least predicted loss under the budgets, over every design of the shape rule.

    Topologies default to those the law was fitted on that are installed; shape rule, vocabulary and training sequence
    length to those of its sweep; depths to 2 to 128, or from 1 where the sweep had models of one layer. Budgets are
    written as `params<=400M`. Raises Infeasible when nothing fits, and the errors of `optimise`.
    """
    question = Question(law, topologies, layers, rule, widest, vocab_size)
    found = question.find(
        budgets,
        tokens=tokens,
        tokens_per_param=tokens_per_param,
        seq_len=seq_len,
        mfu=mfu,
        workload=workload,
        hardware=hardware,
    )
    return question.optimum(found)
