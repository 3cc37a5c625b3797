"""The page: every control with its label, set as the link says, and places for the answer."""

from __future__ import annotations

from pathlib import Path

from htmltools import HTML, Tag, TagList, head_content, tags
from shiny import ui

from depthlaw.platform.explore.reply import STEPS
from depthlaw.platform.explore.source import Source
from depthlaw.platform.explore.state import FIELDS, HARDWARE, Field, State
from depthlaw.scaling.budgets import Budget, every_budget
from depthlaw.scaling.units import EXAMPLES

HERE = Path(__file__).parent


def page(source: Source, state: State) -> TagList:
    budgets, broken = every_budget()
    limits = {text.partition("<")[0].strip(): text.partition("<")[2].lstrip("=").strip() for text in state.budgets}
    own = [f for f in FIELDS if f.of_workload]
    return TagList(
        head_content(
            tags.title(f"depthlaw: {source.name}"),
            tags.meta(name="viewport", content="width=device-width, initial-scale=1"),
            tags.link(rel="icon", href="data:,"),
            tags.style(HTML((HERE / "page.css").read_text(encoding="utf-8"))),
        ),
        tags.header(
            tags.a("To the answer", href="#answer-part", class_="skip"),
            tags.h1("depthlaw ", tags.span(source.name)),
            tags.p("", id="status", role="status", aria_live="polite", aria_atomic="true"),
        ),
        tags.main(
            tags.form(
                tags.p(source.limits, class_="quiet") if source.limits else None,
                _group(
                    "Budgets",
                    *(_budget(b, limits.get(b.name)) for b in budgets),
                    *(tags.p(words, class_="error") for words in broken),
                ),
                _group("Load", *(_field(f, state) for f in own), _hardware(source, state)),
                _group("Training", *(_field(f, state) for f in FIELDS if f not in own)),
                _topologies(source, state),
                tags.p(tags.button("Start again", type="button", id="reset")),
                id="controls",
                autocomplete="off",
                onsubmit="return false",
            ),
            tags.div(
                tags.section(ui.output_ui("answer"), aria_label="Answer", id="answer-part", tabindex="-1"),
                tags.section(tags.h2("Trade-offs"), ui.output_ui("front"), aria_label="Trade-offs"),
                tags.section(tags.h2("How sure"), ui.output_ui("shares"), aria_label="How sure"),
                tags.section(
                    tags.h2("The same elsewhere"),
                    *(_copied(*each) for each in (("command", "Command"), ("call", "Python"), ("link", "Link"))),
                    aria_label="The same elsewhere",
                ),
                id="results",
            ),
        ),
        tags.script(HTML((HERE / "page.js").read_text(encoding="utf-8"))),
    )


def _group(legend: str, *inside: Tag | None) -> Tag:
    return tags.fieldset(tags.legend(legend), *inside)


def _error(key: str) -> Tag:
    return tags.p("", id=f"error-{key}", class_="error")


def _budget(budget: Budget, limit: str | None) -> Tag:
    name, key = budget.name, f"budget:{budget.name}"
    example = EXAMPLES.get(budget.unit, f"1 {budget.unit}")
    return tags.div(
        tags.label(
            tags.input(type="checkbox", id=f"use-{name}", checked="" if limit is not None else None),
            name,
            class_="switch",
        ),
        tags.p(budget.describe, id=f"hint-{name}", class_="hint"),
        tags.label(f"{name} at most", for_=f"limit-{name}", class_="hidden"),
        tags.input(
            type="text",
            id=f"limit-{name}",
            value=limit or "",
            placeholder=f"such as {example}",
            aria_describedby=f"hint-{name} error-{key}",
        ),
        tags.input(
            type="range", id=f"slide-{name}", min=0, max=STEPS, value=STEPS, aria_label=f"{name} at most, slider"
        ),
        _error(key),
        class_="control budget",
        data_budget=name,
    )


def _field(f: Field, state: State) -> Tag:
    text = state.fields.get(f.name, f.default)
    slider = tags.input(
        type="range",
        id=f"slide-{f.name}",
        min=0,
        max=len(f.steps) - 1,
        value=f.steps.index(text) if text in f.steps else _nearest(f, text),
        data_steps="|".join(f.steps),
        aria_label=f"{f.label}, slider",
    )
    return tags.div(
        tags.label(f.label, for_=f"field-{f.name}"),
        tags.p(f.hint, id=f"hint-{f.name}", class_="hint"),
        tags.input(
            type="text",
            id=f"field-{f.name}",
            name=f.name,
            value=text,
            data_default=f.default,
            aria_describedby=f"hint-{f.name} error-{f.name}",
        ),
        slider if f.steps else None,
        _error(f.name),
        class_="control" + (" stepped" if f.steps else ""),
    )


def _nearest(f: Field, text: str) -> int:
    """Where a value that is not one of a slider's is on it."""
    try:
        value = f.read(text)
    except ValueError:
        return 0
    return sum(f.read(step) < value for step in f.steps[:-1])


def _hardware(source: Source, state: State) -> Tag:
    offered = dict.fromkeys((*source.hardware, state.hardware))
    options = [tags.option(name, value=name, selected="" if name == state.hardware else None) for name in offered]
    return tags.div(
        tags.label("Hardware", for_="field-hardware"),
        tags.p("times are predicted for it", id="hint-hardware", class_="hint"),
        tags.select(
            *options,
            id="field-hardware",
            name="hardware",
            data_default=HARDWARE,
            aria_describedby="hint-hardware error-hardware",
        ),
        _error("hardware"),
        class_="control",
    )


def _topologies(source: Source, state: State) -> Tag:
    boxes = [
        tags.label(
            tags.input(
                type="checkbox",
                name="topology",
                value=label,
                checked="" if not state.topologies or label in state.topologies else None,
            ),
            label,
            class_="switch",
        )
        for label in source.topologies
    ]
    return _group("Topologies", tags.div(*boxes, class_="boxes"), _error("topology"))


def _copied(name: str, title: str) -> Tag:
    return tags.div(
        tags.h3(title, id=f"title-{name}"),
        tags.button("Copy", type="button", data_copy=name, aria_label=f"Copy: {title}"),
        tags.pre(tags.code("", id=name), tabindex="0", aria_labelledby=f"title-{name}"),
        class_="copied",
    )
