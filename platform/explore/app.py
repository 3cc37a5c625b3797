"""The page as a Shiny application. What is set lives in the browser alone: a server keeps nothing of a page but its
last answer, and two pages share no more than the law and what it costs to ask about it."""

from __future__ import annotations

import asyncio
from typing import Any

from htmltools import HTML
from shiny import App, Inputs, Outputs, Session, reactive, render
from starlette.requests import Request

from depthlaw.platform.explore import panels
from depthlaw.platform.explore import state as states
from depthlaw.platform.explore.page import page
from depthlaw.platform.explore.reply import Reply, ask, positions, slider_steps
from depthlaw.platform.explore.source import Source
from depthlaw.platform.explore.state import State
from depthlaw.scaling.table import Wins

SETTLED = 0.3  # seconds without a move before the law's draws are looked at, which may take a second


def application(source: Source) -> App:
    def ui(request: Request) -> Any:
        return page(source, State.of(request.url.query))

    def server(input: Inputs, output: Outputs, session: Session) -> None:
        current: reactive.Value[Reply | None] = reactive.Value(None)
        held: dict[str, Any] = {}  # what this page was told last

        def outdate() -> None:
            later.cancel()
            if "reply" in held:
                held["reply"].outdated.set()

        session.on_ended(outdate)

        @reactive.effect
        @reactive.event(input.asked)
        async def _() -> None:
            asked = input.asked()
            outdate()
            reply, told = await asyncio.to_thread(_told, str(asked["query"]), source)
            held["reply"] = reply
            current.set(reply)
            later.invoke(reply, asked["number"])
            await session.send_custom_message("told", {**told, "number": asked["number"]})

        @reactive.extended_task
        async def later(reply: Reply, number: int) -> tuple[Reply, Wins | None]:
            """What may come after the answer: where sliders begin and end, and the law's draws."""
            await asyncio.sleep(SETTLED)
            steps = await asyncio.to_thread(slider_steps, reply.asked, source)
            sliders: dict[str, Any] = {"positions": positions(reply.asked.state, steps), "number": number}
            if steps and steps != held.get("steps"):
                sliders["steps"] = held["steps"] = steps
            await session.send_custom_message("sliders", sliders)
            return reply, await asyncio.to_thread(reply.found.wins, reply.outdated) if reply.found else None

        @render.ui
        def answer() -> Any:
            reply = current()
            return HTML(panels.answer(reply)) if reply else "Asking ..."

        @render.ui
        def front() -> Any:
            reply = current()
            return reply and HTML(panels.front(reply.found) if reply.found else panels.without(reply))

        @render.ui
        def shares() -> Any:
            reply = current()
            if reply is None or reply.found is None:
                return reply and HTML(panels.without(reply))
            if later.status() == "success" and later.result()[0] is reply:
                return HTML(panels.shares(reply.found, later.result()[1]))
            return "Counting the draws ..."

    return App(ui, server)


def _told(query: str, source: Source) -> tuple[Reply, dict[str, Any]]:
    """The answer, and what a page shows by its fields."""
    reply = ask(query, source)
    told = {
        "query": reply.asked.state.query(),
        "errors": reply.errors,
        "summary": panels.summary(reply),
        "good": reply.found is not None,
        "command": states.command(reply.asked, source),
        "call": states.call(reply.asked, source),
    }
    return reply, told
