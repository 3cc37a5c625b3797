"""The same designs under one question after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar, cast

import numpy as np

from depthlaw.scaling import hardware as machine
from depthlaw.scaling.budgets import Budget, BudgetError, Limit
from depthlaw.scaling.design import Design
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.laws import Array, LawError
from depthlaw.scaling.laws import law as find_law
from depthlaw.scaling.table import Table
from depthlaw.scaling.training import Amount, OptimumError

# Of how many questions what they have in common is kept: uses of some twenty budgets, and losses where D follows FLOPs.
KEPT = {"use": 24, "timed": 24, "trained": 4, "served": 4}

T = TypeVar("T")


class Tables:
    """Tables of the same designs under one question after another. What a question has in common with the last few is
    kept, so that one which moves a limit alone costs comparisons only; each table is the same as that of a first
    question. Functions of budgets must give the same for the same arguments. May be used from several threads.

    Of a law that holds at one size only designs of that size are taken. Raises LawError for a topology that the law
    does not know, OptimumError for an empty lattice.
    """

    def __init__(self, law: FittedLaw, designs: Sequence[Design]) -> None:
        if not designs:
            raise OptimumError("no design to choose from: give at least one topology")
        self.law, self.designs = law, tuple(designs)
        self.labels = tuple(design.label for design in designs)
        self.sizes: list[int] = []
        parts = []
        for t, design in enumerate(designs):
            if design.label not in law.topologies:
                raise LawError(
                    f"the law was not fitted on topology {design.label!r}; it knows {', '.join(law.topologies)}: "
                    "ask for these, or add runs of it and fit again"
                )
            counts = (design.n_layers, design.d_model, getattr(design, law.n_is), design.backbone_params, design.params)
            L, d, N, backbone, P = (np.atleast_1d(v) for v in np.broadcast_arrays(*counts))
            if not L.size:
                raise OptimumError(
                    f"topology {design.label!r} has an empty lattice: widen its ranges of layers and widths"
                )
            self.sizes.append(L.size)
            parts.append((np.full(L.size, t), L, d, N, backbone, P))
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        least, most = law.ranges[""]["N"] if find_law(law.law).one_size else (0.0, np.inf)
        self.of_size = (least <= whole[3]) & (most >= whole[3])
        self.all_of_size = bool(self.of_size.all())
        self.columns = [self._taken(column) for column in whole]
        if not self.columns[0].size:
            raise OptimumError(
                f"law {law.law} holds for N from {least:.4g} to {most:.4g} ({law.n_is}) and no design has that: widen "
                "the ranges of layers and widths, or take another vocabulary or shape rule"
            )
        self._kept: dict[str, list[tuple[Any, Any]]] = {}
        self._lock = Lock()

    def table(self, limits: tuple[Limit, ...], amount: Amount, workload: Workload, on: Hardware) -> Table:
        """Raises BudgetError for a budget that does not give one value for each design."""
        tokens, log_loss = self._trained(amount)
        step, kv = self._served(workload, on)
        uses = np.empty((len(limits), log_loss.size))
        for b, x in enumerate(limits):
            uses[b] = self.use(x.budget, amount, workload, on)
        design, L, d, N, backbone, params = self.columns
        return Table(self.labels, limits, design, L, d, N, backbone, params, tokens, log_loss, step, kv, uses)

    def use(self, budget: Budget, amount: Amount, workload: Workload, on: Hardware) -> Array:
        """(M,): what each design uses of a budget, in its unit."""

        def work() -> Array:
            used = []
            for design, size in self._sized():
                own = np.asarray(budget.of(design, workload, on, amount.of(design)), dtype=np.float64)
                if own.shape not in ((), (1,), (size,)):
                    raise BudgetError(
                        f"budget {budget.name!r} returned shape {own.shape} for {size} designs of {design.label!r}; "
                        "its function must return one value for each design"
                    )
                used.append(np.broadcast_to(own, size))
            return self._taken(np.concatenate(used))

        return self._once("use", (budget, workload, on, amount if budget.of_training else None), work)

    def timed(self, budget: Budget, amount: Amount, workload: Workload, on: Hardware) -> bool:
        """Whether a budget counts the time of a pass: its unit says so, or it gives something else for the first
        topology's designs where every pass takes a second longer."""
        first = self.designs[0]

        def work() -> bool:
            slower = replace(on, constant_s=on.constant_s + 1.0)
            one, other = (np.asarray(budget.of(first, workload, at, amount.of(first)), float) for at in (on, slower))
            return not np.array_equal(one, other, equal_nan=True)

        key = (budget, workload, on, amount if budget.of_training else None)
        return budget.unit == "seconds" or self._once("timed", key, work)

    def _trained(self, amount: Amount) -> tuple[Array, Array]:
        """(M,), (M,): D of each design, and ln of its predicted loss."""

        def work() -> tuple[Array, Array]:
            each = [np.broadcast_to(amount.of(x).tokens, m) for x, m in self._sized()]
            tokens = self._taken(np.concatenate(each).astype(float))
            design, L, d, N = self.columns[:4]
            log_loss = np.empty(tokens.size)
            for t, label in enumerate(self.labels):
                own = design == t
                log_loss[own] = self.law.log_loss(label, N[own], tokens[own], L[own], d[own])
            return tokens, log_loss

        return self._once("trained", amount, work)

    def _served(self, workload: Workload, on: Hardware) -> tuple[Array, Array]:
        """(M,), (M,): seconds of a decode step and bytes of KV cache."""

        def work() -> tuple[Array, Array]:
            steps = [np.broadcast_to(machine.tpot(x, workload, on), m) for x, m in self._sized()]
            kv = [np.broadcast_to(machine.kv_bytes(x, workload), m) for x, m in self._sized()]
            return self._taken(np.concatenate(steps)), self._taken(np.concatenate(kv))

        return self._once("served", (workload, on), work)

    def _sized(self) -> list[tuple[Design, int]]:
        return list(zip(self.designs, self.sizes, strict=True))

    def _taken(self, column: Array) -> Array:
        return column if self.all_of_size else column[self.of_size]

    def _once(self, kind: str, key: Any, work: Callable[[], T]) -> T:
        """What `work` gives, from an earlier call of the same kind and key if it is one of the last."""
        with self._lock:
            for held, value in self._kept.get(kind, ()):
                if held == key:
                    return cast(T, value)
        value = work()
        with self._lock:
            self._kept[kind] = [(key, value), *self._kept.get(kind, ())][: KEPT[kind]]
        return value
