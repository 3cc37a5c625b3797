"""The next sweep: candidates by the law's own shape rule, and the YAML of those chosen, which `sweep` takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import ShapeRule, shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.query import DEEPEST, VOCABULARY, installed
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import FitRefusedError
from depthlaw.scaling.laws import law as find_law
from depthlaw.scaling.next_cells import MOST_CELLS, Cell, NextCells, NextCellsError, choose_cells
from depthlaw.scaling.training import SEQ_LEN

RATIOS = (5.0, 20.0, 80.0)  # tokens for each backbone parameter
SIZE_STEP = 2.0  # candidates' sizes are this factor apart, from the smallest fitted to the target
WIDER = 2.0  # shapes go this factor beyond the fitted d / L on both sides
SHAPES_A_SIZE = 12
ONE_PASS = 0.99  # of the text at most, for a trial's tokens are rounded to whole steps
OFF_SIZE = 1.15  # a shape's N is within this factor of its size


def next_cells(law: FittedLaw, compute: float, target: float, most: int = MOST_CELLS) -> NextCells:
    """The cells of least expected variance of ln R_opt at `target` backbone parameters for `compute` FLOPs.

    Candidates: every topology of the law that is installed; sizes a factor 2 apart from the smallest fitted to the
    target; up to 12 shapes each, d / L from half the smallest fitted to twice the largest; D of 5, 20 and 80 tokens a
    backbone parameter, none more than the text of the law's sweep where the law knows that: text that is read twice
    teaches less, which the law does not; of a law that holds at one amount of training that amount. Raises
    NextCellsError, OptimumError if no topology of the law is installed.
    """
    for name, value in (("compute", compute), ("target", target), ("cells", most)):
        if not 0.0 < value < float("inf"):
            raise NextCellsError(f"{name} is {value}; it must be positive and finite")
    least, largest = law.ranges[""]["N"]
    if find_law(law.law).one_size and not least <= target <= largest:
        raise NextCellsError(
            f"target {target:.3g}: law {law.law} holds at the one size that it was fitted to, {least:.3g} to "
            f"{largest:.3g} {law.n_is}; for other sizes fit law shape to runs of several sizes"
        )
    return choose_cells(law, candidates(law, target), compute, target, most)


def candidates(law: FittedLaw, target: float) -> list[Cell]:
    rule = shape_rule(str(law.context.get("shape_rule", "published")))
    vocabulary = int(law.context.get("vocab_size", VOCABULARY))
    seq_len = int(law.context.get("seq_len", SEQ_LEN))
    fitted = law.ranges[""]
    least, low, high = fitted["N"][0], fitted["R"][0] / WIDER, fitted["R"][1] * WIDER
    if target < least:
        raise NextCellsError(
            f"target {target:.3g} is below the smallest size fitted ({least:.3g}): give one at least as large"
        )
    sizes = least * SIZE_STEP ** np.arange(1 + int(np.log(target / least) / np.log(SIZE_STEP)))
    text = law.context.get("corpus_tokens")
    most_tokens = ONE_PASS * text if text else np.inf
    found = []
    for label in installed(law)[0]:
        for L, d in _shapes(rule, label, sizes, (low, high), int(fitted["L"][0]), vocabulary, law.n_is):
            costs = Costs(topology(label), rule.shape(L, d, vocabulary))
            for ratio in RATIOS:
                D = ratio * costs.shape.plain_params
                if most_tokens < D or not _held(law, float(D)):
                    continue
                flops = D * costs.train_flops_per_token(seq_len)
                found.append(Cell(label, L, d, float(getattr(costs, law.n_is)), ratio, float(D), float(flops)))
    if text and not found:
        raise NextCellsError(
            f"no shape of {least:.3g} to {target:.3g} parameters trains on {RATIOS[0]:g} tokens a parameter within "
            f"the {text:,} tokens of the law's text: use more text, or a smaller target"
        )
    return found


def _held(law: FittedLaw, tokens: float) -> bool:
    """Whether the law would still take its runs with one of so many tokens among them."""
    N, D = (np.array(law.ranges[""][name]) for name in "ND")
    try:
        find_law(law.law).accept(N, np.append(D, tokens))
    except FitRefusedError:
        return False
    return True


def _shapes(
    rule: ShapeRule,
    label: str,
    sizes: np.ndarray,
    ratios: tuple[float, float],
    shallowest: int,
    vocabulary: int,
    counted: str,
) -> list[tuple[int, int]]:
    """(L, d) of the rule's designs nearest to an even grid of sizes and of ln d / L, each once."""
    depths, widths = np.arange(min(2, shallowest), DEEPEST + 1), rule.widths(rule.widest)
    L, d = np.repeat(depths, widths.size), np.tile(widths, depths.size)
    N = np.asarray(getattr(Costs(topology(label), rule.shape(L, d, vocabulary)), counted), float)
    wanted = np.linspace(*np.log(ratios), SHAPES_A_SIZE)
    chosen: dict[tuple[int, int], None] = {}
    for size in sizes:
        near = np.flatnonzero(np.abs(np.log(N / size)) <= np.log(OFF_SIZE))
        within = near[(d[near] / L[near] >= ratios[0]) & (d[near] / L[near] <= ratios[1])]
        for goal in wanted if within.size else ():
            off = np.abs(np.log(d[within] / L[within]) - goal) + np.abs(np.log(N[within] / size))
            i = within[np.argmin(off)]
            chosen[int(L[i]), int(d[i])] = None
    return list(chosen)


def sweep_yaml(law: FittedLaw, plan: NextCells, name: str) -> str:
    """A sweep of the chosen cells. What the law does not know of its own sweep is a default, named in a comment."""
    c, assumed = law.context, []

    def known(key: str, default: Any, why: str) -> Any:
        if key not in c:
            assumed.append(f"{key} {default}: {why}")
        return c.get(key, default)

    vocabulary = known("vocab_size", VOCABULARY, "that of the published suites")
    rule = known("shape_rule", "published", "16 heads")
    seq_len = known("seq_len", SEQ_LEN, "not in the law")
    batch = known("batch_tokens", 64 * seq_len, "64 sequences")
    precision = known("precision", "fp32", "not in the law")
    micro = max(k for k in range(1, 9) if batch // seq_len % k == 0)
    assumed.append(f"micro_batch_seqs {micro}: the most up to 8 that divides a batch")
    source, tokenizer = _data(str(c.get("data", "")), vocabulary)
    if source is None:
        source = "offline"
        said = f"the law was fitted on {c['data']!r}" if c.get("data") else "the law does not say what it was fitted on"
        assumed.append(f"data source offline: {said}; put that sweep's data block here, or losses will not compare")
    else:
        assumed.append("data: source, tokenizer and vocabulary of the law's sweep, and the default validation_fraction")
    rates = c.get("best_lr")
    assumed.append(
        "lr: for each cell that of the law's cell of the nearest size, topology for topology"
        if rates
        else "published_lr best: the law does not hold its cells' rates, and these are for 400M"
    )
    if text := c.get("corpus_tokens"):
        assumed.append(f"no cell trains on more than the {text:,} tokens of the law's text")
    assumed.append("optimizer, schedule, validation and divergence: the defaults; copy those of the law's sweep")
    before, after = (", ".join(f"{t} {sd:.3g}" for t, sd in x.items()) for x in (plan.sd_before, plan.sd_after))
    head = [
        f"# {len(plan.cells)} cells for {plan.flops:.3g} of {plan.compute:.3g} FLOPs, chosen to make the best d/L at "
        f"N = {plan.target:.3g} certain.",
        f"# Standard deviation of ln d/L there: now {before}; after these runs {after}.",
        "# It takes the law's form and scatter as true at every size. Assumed, so check before running:",
        *(f"#   {text}" for text in assumed),
    ]
    body = [
        f"name: {name}",
        f"data: {{source: {source}, tokenizer: {tokenizer}, vocab_size: {vocabulary}}}",
        f"seq_len: {seq_len}",
        f"batch_tokens: {batch}",
        f"micro_batch_seqs: {micro}",
        f"shape_rule: {rule}",
        f"precision: {precision}",
        "grid:",
    ]
    blocks: dict[tuple[str, float, str], list[str]] = {}
    for cell in sorted(plan.cells, key=lambda cell: (cell.topology, cell.ratio, cell.N)):
        rate = f"lr: [{_nearest(rates[cell.topology], cell.N):.3e}]" if rates else "published_lr: best"
        blocks.setdefault((cell.topology, cell.ratio, rate), []).append(f"[{cell.n_layers}, {cell.d_model}]")
    for (label, ratio, rate), shapes in blocks.items():
        body += [
            f'  - topologies: ["{label}"]' if "(" in label else f"  - topologies: [{label}]",
            f"    shapes: [{', '.join(shapes)}]",
            f"    tokens_per_backbone_param: [{ratio:g}]",
            f"    {rate}",
        ]
    return "\n".join([*head, *body]) + "\n"


def _nearest(rates: Sequence[tuple[float, float]], N: float) -> float:
    """The rate of the (size, rate) whose size is nearest to N; of equal ones the first."""
    return float(min(rates, key=lambda pair: abs(np.log(pair[0] / N)))[1])


def _data(described: str, vocabulary: int) -> tuple[str | None, str]:
    """(source, tokenizer) of a data description in the law, the source None where the description does not fix it."""
    from depthlaw.platform.data_config import NEOX_VOCAB, DataConfig

    for source in ("offline", "pydoc"):
        for tokenizer in ("bpe", "gpt-neox"):
            if tokenizer == "gpt-neox" and vocabulary != NEOX_VOCAB:
                continue
            given = {"source": source, "tokenizer": tokenizer, "vocab_size": vocabulary}
            try:
                same = DataConfig.parse(given).describe() == described
            except ValueError:
                continue
            if same:
                return source, tokenizer
    return None, "gpt-neox" if vocabulary == NEOX_VOCAB else "bpe"


def write_sweep(path: Path, text: str) -> None:
    """Raises NextCellsError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NextCellsError(f"cannot write {path}: {error.strerror}; choose another path") from error
