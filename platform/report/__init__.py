"""`depthlaw report`: what a store or a table says, as one HTML file that needs nothing else, and its figures beside it.

Adding a figure is one function from `Material` to `Drawing` and one line in `figures()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlaw.platform.store import Store

if TYPE_CHECKING:
    import pandas as pd

    from depthlaw.platform.bundled import Bundled
    from depthlaw.platform.report.material import Material
    from depthlaw.platform.report.style import Drawing
    from depthlaw.scaling.fitted import FittedLaw

OUR_FILES = re.compile(r"[a-z-]+-\d\d\.svg")


class ReportError(ValueError):
    """A report that cannot be written. One line: where, why, and what to do."""


@dataclass(frozen=True)
class Report:
    """page: the HTML file. figures: the SVG files. answered: whether the runs and their law give an answer."""

    page: Path
    figures: tuple[Path, ...]
    answered: bool


def figures() -> list[Callable[[Material], Drawing]]:
    """Every figure and table, in the order of the page."""
    from depthlaw.platform.report import budgets, depth, front, held_out, isoflop, outcomes, provenance, rates, shapes

    return [
        shapes.loss_by_shape,
        rates.learning_rates,
        isoflop.iso_flop,
        held_out.held_out,
        budgets.optimum_by_budget,
        front.pareto_front,
        depth.diagnostics,
        outcomes.counts,
        outcomes.reasons,
        provenance.law,
        provenance.data,
    ]


def report(
    runs: Store | pd.DataFrame | Bundled,
    law: FittedLaw | None = None,
    out: str | Path = "report",
    *,
    budgets: Sequence[str] = (),
    experiment: str | None = None,
    columns: Mapping[str, str] | None = None,
    name: str = "a data frame",
    progress: Callable[[str], None] = lambda text: None,
    **question: Any,
) -> Report:
    """Writes OUT/report.html and OUT/report_figures/, or OUT and its folder if OUT ends in .html.

    runs: a store, a frame of runs with `columns` as `fit` takes them and the `name` of its file, or what `bundled`
    gives, whose law is beside it and whose limits stand on the page. Without a law one is fitted as `depthlaw fit
    --law auto --pooling auto` does. budgets and the other arguments are those of `optimum`; without budgets the
    question is the largest size trained. Runs that cannot give a figure, as a table cannot give learning rates, give a
    report that says what lacks. The same runs give the same bytes, beside the same data
    build: the texts of a corpus are named where its build is. Raises ReportError if the disk refuses,
    and the errors of `optimum` for a question that cannot be asked.
    """
    from depthlaw.platform.report import opening, page
    from depthlaw.platform.report.gather import gather
    from depthlaw.platform.report.style import styled, svg

    target = _target(Path(out))
    material = gather(runs, law, budgets, experiment, question, progress, columns or {}, name)
    files: dict[str, bytes] = {}
    sections = [("What to doubt", page.items(_doubts(material)))]
    with styled():
        for make in figures():
            drawn = make(material)
            if drawn.panels:
                progress(f"drawing {drawn.title.lower()}, {len(drawn.panels)} panels")
            pictures = {k: svg(p.figure) for k, p in enumerate(drawn.panels)}
            files |= {f"{p.name}-{k + 1:02}.svg": pictures[k] for k, p in enumerate(drawn.panels)}
            sections.append((drawn.title, page.drawing(drawn, pictures)))
    head = f'<p class="lacks">{page.escape(_sentence(material.bundled.note))}</p>' if material.bundled else ""
    head += f'<p class="answer">{page.escape(opening.sentence(material))}</p>'
    if material.answer is not None:
        rows = opening.rows(material)
        head += page.table("The best design of each topology", opening.COLUMNS, rows)
        head += f'<p class="note">{page.escape(opening.caption(material))}</p>'
    text = page.page(f"depthlaw report: {material.title}", head, sections)
    return Report(target, _write(target, text, files), material.answer is not None)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _doubts(material: Material) -> list[str]:
    from depthlaw.platform.report import provenance

    flags: list[str] = []
    if material.answer and material.law:  # what the law cannot tell follows in full
        short = material.law.doubts_about(material.answer.best.topology)
        flags = [flag for flag in material.answer.flags if flag not in short]
    known = provenance.doubts(material)
    return list(dict.fromkeys([*flags, *known]))


def _target(out: Path) -> Path:
    return out if out.suffix.lower() in (".html", ".htm") else out / "report.html"


def _write(target: Path, text: str, files: dict[str, bytes]) -> tuple[Path, ...]:
    """The page and its figures; figures of an earlier report go, for they would not be this one's."""
    folder = target.with_name(f"{target.stem}_figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if OUR_FILES.fullmatch(old.name) and old.name not in files:
                old.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"cannot write the report to {target}: {error.strerror}; choose another --out") from error
    return tuple(folder / name for name in files)
