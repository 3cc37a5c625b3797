"""The page without a browser: what is set, the link, command and call that say the same, and what is told back."""

import asyncio
import contextlib
import html
import io
import json
import re
import shlex
import socket
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("shiny", reason="the extra `explore` is not installed")

import depthlaw
from depthlaw.platform import answers
from depthlaw.platform.cli import main
from depthlaw.platform.explore import panels, state
from depthlaw.platform.explore.page import page
from depthlaw.platform.explore.reply import STEPS, ask, positions, slider_steps
from depthlaw.platform.explore.serve import OwnPages
from depthlaw.platform.explore.source import Source
from depthlaw.platform.explore.state import State
from depthlaw.scaling import budgets
from depthlaw.scaling.budgets import BUDGETS, budget, every_budget
from depthlaw.scaling.units import format_quantity, parse_quantity

PUBLISHED = Source(data="published-400m")


def random_state(seed):
    """Some of everything that can be set, as people write it."""
    rng = np.random.default_rng(seed)

    def some(texts):
        return [text for text in texts if rng.random() < 0.4]

    limits = ["params<=405M", "kv_bytes<=0.5GiB", "tpot<=2 ms", "peak_memory<=2GiB", "train_flops<=2.1e19", "ttft<=1s"]
    fields = {"context": "8k", "batch": "2", "weight_bytes": "1", "cache_bytes": "4", "seq_len": "2048", "mfu": "0.35"}
    fields |= {"tokens": "8B"} if rng.random() < 0.4 else {}
    known = PUBLISHED.fitted.topologies
    return State(
        tuple(some(limits)),
        {f.name: fields[f.name] for f in state.FIELDS if f.name in some(fields)},
        str(rng.choice(["h100", "a100", "cpu"])),
        tuple(t for t in known if rng.random() < 0.8) if rng.random() < 0.5 else (),
    )


def answered(arguments):
    """What the command line prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        main(arguments)
    return json.loads(out.getvalue())


def plain(answer):
    return json.loads(json.dumps(answer.to_dict()))


# ---- the link


@pytest.mark.parametrize("seed", range(20))
def test_a_link_gives_back_what_was_set(seed):
    there = random_state(seed)
    assert State.of(there.query()) == there


def test_a_link_keeps_any_text_as_it_was_typed_and_leaves_out_what_is_a_default():
    there = State(("a&b=c<=1", "params<=4 00%M", "<b>ü</b><=1"), {"context": "32k&x=1", "tokens": "a+b c"}, "x;y.json")
    assert State.of(there.query()) == there
    assert State.of("context=4096&batch=1&hardware=h100&mfu=0.4&unknown=1&tokens=") == State()
    assert State().query() == ""


# ---- the same elsewhere


@pytest.mark.parametrize("seed", range(10))
def test_the_command_and_the_call_shown_give_the_answer_of_the_page(seed):
    reply = ask(random_state(seed).query(), PUBLISHED)
    assert reply.errors == {}
    words = shlex.split(state.command(reply.asked, PUBLISHED))
    told = answered([*words[1:], "--json"])
    assert words[0] == "depthlaw"
    lines = state.call(reply.asked, PUBLISHED).replace("print(answer.best)", "")
    if reply.infeasible is not None:
        assert told == plain(reply.infeasible)
        with pytest.raises(type(reply.infeasible)) as no:
            exec(lines, {})
        assert plain(no.value) == told
        return
    assert plain(reply.question.optimum(reply.found)) == told
    names: dict = {}
    exec(lines, names)
    assert plain(names["answer"]) == told


def test_the_settings_tried_have_answers_of_both_kinds():
    kinds = {ask(random_state(seed).query(), PUBLISHED).found is None for seed in range(10)}
    assert kinds == {True, False}


def test_designs_chosen_at_the_start_are_in_the_command_and_the_call():
    source = Source(data="published-400m", layers=(8, 40), widest=1500, rule="head64", vocab_size=50280)
    reply = ask("budget=params%3C%3D410M", source)
    told = answered([*shlex.split(state.command(reply.asked, source))[1:], "--json"])
    assert plain(reply.question.optimum(reply.found)) == told
    names: dict = {}
    exec(state.call(reply.asked, source), names)
    assert plain(names["answer"]) == told
    assert "L 8 to 40, d up to 1472, shape rule head64" in told["lattice"]


def test_the_panels_say_what_the_command_says():
    reply = ask("budget=params%3C%3D400M&budget=tpot%3C%3D5ms", PUBLISHED)
    answer = reply.question.optimum(reply.found)
    shown = panels.answer(reply) + panels.front(reply.found) + panels.shares(reply.found, reply.found.wins())
    shown = html.unescape(re.sub(r"<[^>]*>", "|", shown))
    said = answers.answer_text(answer)
    parts = [
        answers.design_words(answer.best),
        answers.loss_words(answer.best, answer.draws),
        answers.model_words(answer.best),
        answers.ties_words(answer.near_ties),
        f"shape rule {answer.lattice.split('shape rule ')[1]}",
        *answer.flags,
    ]
    for use in answer.budgets:
        parts += [answers.use_words(use), answers.verdict(use)]
    for c in answer.per_topology:
        parts += [answers.design_words(c), f"{c.loss:.4f}", answers.percent(answer.topology_shares[c.topology])]
    for c in answer.contenders[:5]:
        parts += [answers.design_words(c), answers.percent(c.share)]
    for part in parts:
        assert part in shown
        assert part in said
    for k in answers.worth_showing([c.beyond for c in answer.pareto]):
        c = answer.pareto[k]
        assert f"{c.loss:.4f}|" in shown
        assert format_quantity(c.kv_bytes, "bytes") in shown
    assert len(answer.pareto) > 2


# ---- what is typed wrongly


@pytest.mark.parametrize(
    ("query", "where", "words"),
    [
        ("budget=params%3C%3D4Q", "budget:params", "budget 'params<=4Q': '4Q' has unit 'Q'; count take K, M, B, T"),
        ("budget=params%3C%3D", "budget:params", "'' is not a quantity"),
        ("budget=tpot%3C%3D5", "budget:tpot", "no unit"),
        ("budget=nothing%3C%3D5", "budget:nothing", "unknown budget 'nothing'; choose one of params"),
        ("budget=params%3C%3D4M&budget=params%3C%3D5M", "budget:params", "limited twice"),
        ("budget=params%3E%3D4M", "budget:params>=4M", "a budget is an upper limit"),
        ("context=-3", "context", "not a context length"),
        ("batch=1.5", "batch", "not a whole number"),
        ("batch=0", "batch", "batch is 0; it must be a whole number, at least 1"),
        ("weight_bytes=99", "weight_bytes", "must be bytes per element"),
        ("cache_bytes=nan", "cache_bytes", "must be bytes per element"),
        ("tokens=8X", "tokens", "unit 'X'"),
        ("tokens=8B&tokens_per_param=20", "tokens", "both given: keep one"),
        ("mfu=1.5", "mfu", "share of a device's peak"),
        ("seq_len=0", "seq_len", "seq_len is 0; it must be positive"),
        ("hardware=%2Fetc%2Fpasswd", "hardware", "unknown hardware '/etc/passwd'; choose one of a100"),
        (
            "topology=resnet",
            "topology",
            "topology 'resnet' is not in the law or not installed here; choose of block_attnres",
        ),
    ],
)
def test_what_is_wrong_is_one_line_by_its_field(query, where, words):
    reply = ask(query, PUBLISHED)
    assert list(reply.errors) == [where]
    assert words in reply.errors[where]
    assert "\n" not in reply.errors[where]
    assert words in panels.summary(reply)


def test_each_field_that_is_wrong_says_so():
    assert set(ask("context=x&batch=y&budget=params%3C%3Dz", PUBLISHED).errors) == {"context", "batch", "budget:params"}


def test_text_is_escaped_wherever_it_is_shown(monkeypatch):
    monkeypatch.setattr(budgets, "BUDGETS", dict(BUDGETS))

    @budget("odd", unit="<i>")
    def odd(design, workload, hardware):
        """<script>alert(1)</script>"""
        return design.params

    nasty = "<script>alert(2)</script>"
    asked = State(("odd<=1e9", f"{nasty}<=1"), {"context": nasty}, f"{nasty}.json")
    whole = str(page(PUBLISHED, asked)) + panels.answer(ask(asked.query(), PUBLISHED))
    whole += panels.answer(ask("budget=odd%3C%3D1e9", PUBLISHED)) + panels.answer(ask("budget=odd%3C%3D1", PUBLISHED))
    assert "<script>alert" not in whole
    assert "<i>" not in whole
    assert whole.count("&lt;script&gt;alert") >= 3


# ---- budgets of other packages


def test_every_registered_budget_is_offered_and_one_that_fails_leaves_the_page_alive(monkeypatch):
    monkeypatch.setattr(budgets, "BUDGETS", dict(BUDGETS))

    @budget("bill", unit="dollars")
    def bill(design, workload, hardware):
        """What it costs."""
        return 1e-9 * design.params

    @budget("fails", unit="count")
    def fails(design, workload, hardware):
        raise RuntimeError("no luck")

    shown = str(page(PUBLISHED, State()))
    for name in budgets.BUDGETS:
        assert f'id="use-{name}"' in shown
    assert "What it costs." in shown
    reply = ask("budget=bill%3C%3D0.4", PUBLISHED)
    assert reply.found.uses()[0].use <= 0.4
    steps = slider_steps(reply.asked, PUBLISHED)
    assert steps["bill"][0].endswith(" dollars")
    assert len(steps["fails"]) == STEPS + 1
    assert "RuntimeError: no luck" in ask("budget=fails%3C%3D1", PUBLISHED).errors[""]


def test_a_package_that_does_not_load_is_said_and_the_others_are_offered(monkeypatch):
    class Point:
        name, value, dist = "broken", "nowhere:broken", None

        def load(self):
            raise ImportError("no nowhere")

    monkeypatch.setattr(budgets, "_offered", lambda: [Point()])
    offered, problems = every_budget()
    assert {b.name for b in offered} >= {"params", "tpot"}
    assert len(problems) == 1
    assert "'broken' of the package nowhere:broken does not load (ImportError: no nowhere)" in problems[0]
    assert "does not load" in str(page(PUBLISHED, State()))


# ---- sliders


def test_a_slider_goes_from_the_least_to_the_most_that_a_design_uses_and_stands_at_the_limit():
    reply = ask("budget=params%3C%3D401M&budget=tpot%3C%3D1us&budget=kv_bytes%3C%3D1TiB&context=8k", PUBLISHED)
    steps = slider_steps(reply.asked, PUBLISHED)
    assert set(steps) == set(BUDGETS)
    whole = depthlaw.optimum(PUBLISHED.fitted, workload=depthlaw.Workload(context=8192))
    sizes = [c.kv_bytes for c in whole.pareto]
    ends = [parse_quantity(steps["kv_bytes"][k], "bytes") for k in (0, STEPS)]
    assert ends[0] == pytest.approx(min(sizes), rel=0.01)
    assert ends[1] >= max(sizes)
    at = positions(reply.asked.state, steps)
    assert (at["tpot"], at["kv_bytes"]) == (0, STEPS)
    scale = [parse_quantity(step, "count") for step in steps["params"]]
    assert scale[at["params"] - 1] < 401e6 <= scale[at["params"]] * (1 + 1e-9)


def test_sliders_work_while_a_limit_is_wrong_and_wait_while_what_they_span_is():
    wrong = ask("budget=params%3C%3D4Q&budget=tpot%3C%3D1us", PUBLISHED)
    steps = slider_steps(wrong.asked, PUBLISHED)
    assert set(steps) == set(BUDGETS)
    assert positions(wrong.asked.state, steps) == {"tpot": 0}
    wrong = ask("budget=tpot%3C%3D1us&context=x", PUBLISHED)
    assert slider_steps(wrong.asked, PUBLISHED) == {}
    assert positions(wrong.asked.state, {}) == {}


# ---- the server


def ask_server(headers, local=True):
    sent = []

    async def inner(scope, receive, send):
        await send({"type": "inner"})

    async def run():
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await OwnPages(inner, local)({"type": "http", "headers": raw}, None, lambda m: _keep(sent, m))

    asyncio.run(run())
    return "let in" if sent[0]["type"] == "inner" else sent[0]["status"]


async def _keep(sent, message):
    sent.append(message)


def test_pages_of_other_sites_are_refused():
    assert ask_server({"host": "127.0.0.1:8642"}) == "let in"
    assert ask_server({"host": "localhost:8642", "origin": "http://localhost:8642"}) == "let in"
    assert ask_server({"host": "127.0.0.1:8642", "origin": "http://evil.example"}) == 403
    assert ask_server({"host": "evil.example:8642"}) == 403
    assert ask_server({"host": "box.lan:8642"}, local=False) == "let in"
    assert ask_server({"host": "box.lan:8642", "origin": "http://evil.example"}, local=False) == 403


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of the two: a law file"),
        (["--data", "other"], "no bundled data set 'other'; choose one of published-400m"),
        (["--data", "published-400m", "--hardware", "none.json"], "cannot read hardware file none.json"),
        (["--data", "published-400m", "--layers", "x"], "layers is 'x'"),
        (["nothing.json"], "cannot read the law file nothing.json"),
    ],
)
def test_a_page_that_cannot_be_is_one_line_and_code_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["explore", "--no-browser", *arguments])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_said(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["explore", "--data", "published-400m", "--no-browser", "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "choose another --port" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        main(["explore", "--data", "published-400m", "--no-browser", "--port", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the page needs uvicorn: pip install 'depthlaw[explore]'\n"


def test_the_other_commands_load_nothing_of_the_page():
    code = "import sys, depthlaw.platform.cli; print([m for m in ('shiny', 'starlette', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_topology_of_the_law_that_is_not_installed_is_not_offered_and_the_answer_says_so(tmp_path):
    told = PUBLISHED.fitted.to_dict()
    (tmp_path / "law.json").write_text(json.dumps(told).replace("keel", "resnet"))
    source = Source(law=str(tmp_path / "law.json"))
    source.check()
    assert "resnet" not in str(page(source, State()))
    assert "resnet" in " ".join(ask("", source).question.doubts)
    some = "&".join(f"topology={t}" for t in source.topologies if t != "hc")
    reply = ask(f"budget=params<=405M&{some}", source)
    assert reply.found is not None
    assert slider_steps(reply.asked, source)
