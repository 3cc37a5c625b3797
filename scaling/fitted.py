"""A fitted law: what it predicts, how sure it is, what it was fitted on; to and from JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from depthlaw.scaling.laws import Array, Centre, Features, Law, LawError, features, law
from depthlaw.scaling.pooling import Layout, layout
from depthlaw.scaling.rows import LeftOut
from depthlaw.scaling.student import student_quantile

FORMAT = 2
Ranges = dict[str, tuple[float, float]]
# Designs and draws that are evaluated at once: small enough that everything in between stays in the cache.
DESIGNS_AT_ONCE, DRAWS_AT_ONCE = 1000, 100
LARGEST_LOG = 20.0  # of a loss in nats, in an interval: 5e8, and with it a law says nothing
NOISE_A_DRAW = 4  # residuals added to each draw of the parameters in an interval


@dataclass(frozen=True)
class FittedLaw:
    """The result of `fit`. Frozen; equal after a round trip through JSON.

    theta: the unknowns `names` in fitting coordinates (logarithms of positive parameters), with `covariance` from the
    linearised fit; read them through `parameters` and `shared`. residuals: ln(observed) - ln(predicted) of
    `rows_used` (positions in the frame). ranges: fitted N, D, R = d / L, L, d and D/N by topology, and of all rows
    under "". log_rms: root mean square of the residuals clipped at 1.3 standard deviations or delta if more, over
    (rows - unknowns): a relative error of the loss that a few outliers hardly move.
    n_is: the count of a model that the law takes as N, `backbone_params` or `params`; counting: the same in words.
    draws_base64, draws: refits of resampled runs, see `draws`. inflation: by how much more than it expected the law was
    off on sizes larger than those fitted, at least 1; intervals are widened by it. held_out: for each such size N, how
    many rows, their mean absolute error in ln loss and the one that the law expected. profiles: 95 % profile
    likelihood interval of each exponent and of each topology's best d / L at the largest N; an end that the data do not
    bound is 0 or inf. choice: the laws and poolings this one was chosen from, see `depthlaw.scaling.choose`.
    status: `unidentified` if the data cannot tell some unknown, else `not_converged` if the best start ran out of
    steps, else `bound` if an unknown ended at the edge of its allowed range, else `ok`.
    """

    law: str
    pooling: str
    topologies: tuple[str, ...]
    names: tuple[str, ...]
    theta: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    N0: float
    D0: float
    L0: float
    d0: float
    objective: float
    delta: float
    status: str
    unidentified: dict[str, str]
    at_bound: tuple[str, ...]
    notes: tuple[str, ...]
    starts: int
    share_at_best: float
    condition: float
    log_rms: float
    residuals: tuple[float, ...]
    rows_used: tuple[int, ...]
    left_out: tuple[LeftOut, ...]
    ranges: dict[str, Ranges]
    units: dict[str, str]
    rows_hash: str
    n_is: str
    counting: str
    context: dict[str, Any] = field(default_factory=dict)
    draws_base64: str = ""
    inflation: float = 1.0
    profiles: dict[str, tuple[float, float]] = field(default_factory=dict)
    held_out: tuple[dict[str, float], ...] = ()
    choice: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _law(self) -> Law:
        return law(self.law)

    @property
    def centre(self) -> Centre:
        return Centre(self.N0, self.D0, self.L0, self.d0)

    @cached_property
    def _layout(self) -> Layout:
        return layout(self._law, self.topologies, self.pooling)

    def _natural(self, topology: str) -> Array:
        """(P, 1): the topology's parameters in their own units."""
        return self._layout.natural(np.array([self.theta]), self._number(topology))[:, 0]

    def _number(self, topology: str) -> int:
        if topology not in self.topologies:
            raise LawError(
                f"this law was not fitted on topology {topology!r}; it knows {', '.join(self.topologies)}: "
                "choose one of these or add runs of it and fit again"
            )
        return self.topologies.index(topology)

    def _features(self, N: Any, D: Any, n_layers: Any, d_model: Any) -> Features:
        for name, value in (("N", N), ("D", D), ("n_layers", n_layers), ("d_model", d_model)):
            if not np.all(np.asarray(value) > 0):
                raise LawError(f"{name} must be positive, got {np.min(value)}")
        return features(N, D, n_layers, d_model, self.centre)

    def parameters(self, topology: str) -> dict[str, float]:
        """Every parameter of one topology, shared ones included, in its own unit (e, a, b at the centres N0, D0)."""
        values = self._natural(topology)[:, 0]
        return {p.name: float(v) for p, v in zip(self._law.parameters, values, strict=True)}

    @property
    def shared(self) -> dict[str, float]:
        """The parameters that all topologies have in common."""
        return {k: v for k, v in self.parameters(self.topologies[0]).items() if k in self.names}

    def log_loss(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        """ln of the predicted loss; arguments are scalars or arrays of one shape (m,), result (m,)."""
        p, x = self._natural(topology), self._features(N, D, n_layers, d_model)
        return self._law.log_loss(p.reshape(-1, *[1] * x.n.ndim), x)

    def predict(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        """Predicted loss in nats per token. Raises LawError for a topology not fitted or a value not positive."""
        return np.asarray(np.exp(self.log_loss(topology, N, D, n_layers, d_model)))

    def sensitivity(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        """(m, K): derivative of the predicted ln loss with respect to each unknown, in fitting coordinates."""
        t, x = self._number(topology), self._features(*np.atleast_1d(N, D, n_layers, d_model))
        natural = self._natural(topology)
        own = self._law.jacobian(natural.reshape(-1, *[1] * x.n.ndim), x)
        j = np.zeros((*x.n.shape, len(self.names)))
        j[..., self._layout.index[t]] = own * np.where(self._layout.positive, natural[:, 0], 1.0)
        return j

    def log_sd(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        """Standard error of the predicted ln loss from the parameters alone, linearised: sqrt(j C j'), (m,)."""
        j = self.sensitivity(topology, N, D, n_layers, d_model)
        sd = np.sqrt(np.einsum("...k,kl,...l->...", j, np.array(self.covariance), j))
        return np.asarray(sd.reshape(np.broadcast_shapes(*(np.shape(v) for v in (N, D, n_layers, d_model)))))

    @cached_property
    def draws(self) -> Array | None:
        """(B, K) float64: theta of B refits to resampled runs, or None if none were asked for."""
        if not self.draws_base64:
            return None
        return np.frombuffer(base64.b64decode(self.draws_base64), dtype="<f8").reshape(-1, len(self.names))

    def log_loss_draws(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        """(B, m) float32: ln of the predicted loss under each draw of the parameters, without the runs' own noise.

        In single precision, exact to about 1e-6: the spread between draws is a thousand times that. Raises LawError if
        the law carries no draws.
        """
        if self.draws is None:
            raise LawError("this law carries no bootstrap draws: fit again with draws, 1000 are usual")
        p = self._layout.natural(self.draws, self._number(topology)).astype(np.float32)
        wide = self._features(*np.atleast_1d(N, D, n_layers, d_model))
        x = Features(*(np.asarray(getattr(wide, f.name), dtype=np.float32) for f in fields(wide)))
        out = np.empty((p.shape[1], x.n.size), dtype=np.float32)
        for i in range(0, x.n.size, DESIGNS_AT_ONCE):
            some = x.take(np.arange(i, min(i + DESIGNS_AT_ONCE, x.n.size)))
            for b in range(0, p.shape[1], DRAWS_AT_ONCE):
                out[b : b + DRAWS_AT_ONCE, i : i + DESIGNS_AT_ONCE] = self._law.log_loss(
                    p[:, b : b + DRAWS_AT_ONCE], some
                )
        return out

    def interval(
        self,
        topology: str,
        N: Any,
        D: Any,
        n_layers: Any,
        d_model: Any,
        level: float = 0.95,
        inflated: bool = True,
    ) -> tuple[Array, Array]:
        """(lower, upper), each (m,) in nats per token: where the loss of one new run is expected with this probability.

        Quantiles over the draws of the parameters, each with residuals of the fit added (scaled by sqrt(m / (m - K)) to
        undo the fit's own shrinkage), then widened about their middle in ln loss: by `inflation`, and by the ratio of
        Student's t with m - K degrees of freedom to the normal quantile, as the scatter is itself estimated. Without
        the latter, 95 % intervals of 21 to 30 runs with 9 unknowns held 93.8 % of new runs in simulation. A law
        without draws uses the linearised covariance and a normal scatter instead.
        """
        if not 0.0 < level < 1.0:
            raise LawError(f"level is {level}; it must be between 0 and 1, such as 0.95")
        where = np.atleast_1d(N, D, n_layers, d_model)
        tail = 0.5 * (1.0 - level)
        if self.draws is None:
            sd = np.sqrt(self.log_sd(topology, *where) ** 2 + self.log_rms**2)
            middle, half = self.log_loss(topology, *where), NormalDist().inv_cdf(1.0 - tail) * sd
        else:
            m, K = len(self.residuals), len(self.names)
            # The same noise for every design and every call: intervals differ by what the law says alone.
            noise = np.random.default_rng(0).choice(np.array(self.residuals), (NOISE_A_DRAW, len(self.draws), 1))
            noise = (noise * np.sqrt(m / (m - K))).astype(np.float32)
            # Far past the runs a draw may overflow, and between two infinities there is no quantile.
            draws = np.clip(self.log_loss_draws(topology, *where), -LARGEST_LOG, LARGEST_LOG)
            parts = np.array_split(draws, 1 + draws.shape[1] // 100, axis=1)
            low, high = np.concatenate(
                [np.quantile((p + noise).reshape(-1, p.shape[1]), [tail, 1.0 - tail], axis=0) for p in parts], axis=1
            ).astype(np.float64)
            middle, half = 0.5 * (low + high), 0.5 * (high - low)
        if inflated:
            student = student_quantile(1.0 - tail, len(self.residuals) - len(self.names))
            half = half * self.inflation * student / NormalDist().inv_cdf(1.0 - tail)
        return np.exp(middle - half), np.exp(middle + half)

    def best_ratio(self, topology: str, N: Any) -> Array | None:
        """d / L of least predicted loss at size N, or None for a law without a best shape."""
        p = self._natural(topology)
        n = np.log(np.asarray(N, dtype=np.float64) / self.N0)
        best = self._law.best_ln_ratio(p.reshape(-1, *[1] * n.ndim), n, self.centre)
        return None if best is None else np.exp(best)

    def best_ratio_draws(self, topology: str, N: float) -> Array | None:
        """(B,): d / L of least predicted loss at size N under each draw, or None for a law without shape or draws."""
        if self.draws is None:
            return None
        p = self._layout.natural(self.draws, self._number(topology))
        best = self._law.best_ln_ratio(p, np.log(np.array([N]) / self.N0), self.centre)
        return None if best is None else np.exp(best)[:, 0]

    def worth(self, topology: str, reference: str = "pre_ln") -> float:
        """x: at its best shape this topology is worth x times the parameters of the reference at its own best shape
        (under a law without one, at the middle of the shapes fitted).

        Solved at N0 and D0 by bisection in ln x; nan where no x in [1/1000, 1000] does, or where the data do not
        identify what trades size for loss (see `worth_rests_on`).
        """
        if any(name in self.unidentified for name in self.worth_rests_on(topology, reference)):
            return float("nan")
        x = float(self._worths(np.array([self.theta]), topology, reference)[0])
        return x if 0.0 < x < np.inf else float("nan")

    def worth_draws(self, topology: str, reference: str = "pre_ln") -> Array:
        """(B,): the same under each draw; 0 or inf where it is below 1/1000 or above 1000. Raises LawError without
        draws."""
        if self.draws is None:
            raise LawError("this law carries no bootstrap draws: fit again with draws, 1000 are usual")
        return self._worths(self.draws, topology, reference)

    def worth_rests_on(self, topology: str, reference: str) -> list[str]:
        """The unknowns of the two topologies that trade size for loss: all but those of shape."""
        of_shape = {p.name for p in self._law.parameters if "shape" in p.needs}
        owners = ("", f"{topology}]", f"{reference}]")
        split = {name: name.partition("[") for name in self.names}
        return [name for name, (base, _, owner) in split.items() if owner in owners and base not in of_shape]

    def _worths(self, theta: Array, topology: str, reference: str) -> Array:
        """(S,): x of `worth` for theta (S, K), 0 and inf where it lies outside [1/1000, 1000]."""
        goal = self._best_log_loss(theta, topology, np.zeros(len(theta)))
        low, high = np.full(len(theta), -np.log(1000.0)), np.full(len(theta), np.log(1000.0))
        above = goal < self._best_log_loss(theta, reference, high)
        below = goal > self._best_log_loss(theta, reference, low)
        for _ in range(60):
            middle = 0.5 * (low + high)
            more = self._best_log_loss(theta, reference, middle) > goal
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        return np.where(above, np.inf, np.where(below, 0.0, np.exp(0.5 * (low + high))))

    def _best_log_loss(self, theta: Array, topology: str, n: Array) -> Array:
        """(S,): ln of the least loss over shapes at ln(N / N0) = n, each of the (S,) under its own theta (S, K)."""
        p, at = self._layout.natural(theta, self._number(topology)), n[:, None]
        middle = self.centre.ln_ratio
        best = self._law.best_ln_ratio(p, at, self.centre)
        ratio = np.full_like(at, middle) if best is None else best
        # In the continuum of shapes with N proportional to L d^2: n = depth + 2 width and ln_ratio = width - depth.
        width = (at + ratio - middle) / 3.0
        x = Features(at, np.zeros_like(at), width, at - 2.0 * width, ratio)
        return np.asarray(self._law.log_loss(p, x)[:, 0])

    def doubts(self) -> list[str]:
        """What the data could not tell, with what to run instead, in words."""
        by_reason: dict[str, list[str]] = {}
        for name, why in self.unidentified.items():
            by_reason.setdefault(why, []).append(name)
        words = [f"the data do not identify {', '.join(names)}: {why}" for why, names in by_reason.items()]
        return words + self._common_doubts("")

    def doubts_about(self, topology: str) -> list[str]:
        """The same in short, and only what the prediction for one topology rests on."""
        names = [name for name in self.unidentified if concerns(name, topology)]
        said = f"the data do not identify {', '.join(names)} of the law; `depthlaw report` says what to run instead"
        return [said] * bool(names) + self._common_doubts(topology)

    def _common_doubts(self, topology: str) -> list[str]:
        bound = [name for name in self.at_bound if not topology or concerns(name, topology)]
        words = [f"{', '.join(bound)} of the law ended at the bound of its range"] if bound else []
        return words + (["the fit of the law did not converge"] if self.status == "not_converged" else [])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: an infinite end of a profile is None, and what was not asked for is absent."""
        data = {"format": FORMAT, **asdict(self)}
        data["profiles"] = {k: tuple(v if v < np.inf else None for v in ends) for k, ends in self.profiles.items()}
        optional = ("draws_base64", "profiles", "held_out", "choice")
        return {k: v for k, v in data.items() if v or k not in optional}

    def save(self, path: str | Path) -> None:
        """Write JSON; floats keep all their digits, so a prediction from the file is the same to the last bit.

        Raises LawError if the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise LawError(f"cannot write the law file {path}: {error.strerror}; choose another path") from error


def concerns(name: str, topology: str) -> bool:
    """Whether a parameter, `alpha` or `kappa[hc]`, is one that a topology's prediction uses."""
    return "[" not in name or name.endswith(f"[{topology}]")
