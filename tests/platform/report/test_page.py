"""The page: its answer is that of `optimum`, its texts are texts, it needs nothing else, and it can be read."""

import base64
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from xml.etree import ElementTree

import matplotlib
import pytest

from depthlaw.platform import report as package
from depthlaw.platform.palette import COLOURS
from depthlaw.platform.query import optimum
from depthlaw.platform.report import ReportError, figures, report
from depthlaw.platform.report.css import CSS
from depthlaw.platform.report.style import in_order, panel, styled, svg
from depthlaw.scaling.hardware import Workload

SCRIPT = "<script>alert(1)</script>"
EXPERIMENT = '"><img src=x onerror=alert(2)>'
REASON = "loss 99 <b>was</b> above & beyond $\\frac{"


class Page(HTMLParser):
    """Every tag with its attributes, every text with the tags that it is in, and the tables as rows of cells."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.inside, self.tables = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.inside.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.inside.pop() == tag

    def handle_data(self, data):
        self.texts.append((tuple(self.inside), data))
        if self.inside and self.inside[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, tag):
        return [data for inside, data in self.texts if tag in inside]


@pytest.fixture(scope="module")
def page(made):
    return Page(made.html)


def svgs(page):
    prefix = "data:image/svg+xml;base64,"
    assert all(image["src"].startswith(prefix) for image in page.of("img"))
    return [base64.b64decode(image["src"].removeprefix(prefix)) for image in page.of("img")]


def test_it_opens_with_the_answer_of_optimum(made, page):
    largest, longest = made.law.ranges[""]["N"][1], made.law.ranges[""]["D"][1]
    answer = optimum(
        made.law, [f"backbone_params<={largest:.0f}"], topologies=["pre_ln", "hc"], tokens=longest, hardware="cpu"
    )
    opening = " ".join(page.text("p"))
    best = answer.best
    assert f"the best design is {best.topology} with {best.n_layers} layer" in opening
    assert f"of width {best.d_model}" in opening
    assert f"{best.loss:.4f} nats a token (95 % interval {best.lower:.4f} to {best.upper:.4f})" in opening
    assert "What binds is backbone_params" in opening
    header, *rows = page.tables[0]
    assert header[0] == "topology"
    assert [row[:3] for row in rows] == [[c.topology, str(c.n_layers), str(c.d_model)] for c in answer.per_topology]
    assert [row[5] for row in rows] == [f"{c.loss:.4f}" for c in answer.per_topology]
    noisy = answer.near_ties.topologies
    assert [row[8] for row in rows] == ["yes" if c.topology in noisy else "no" for c in answer.per_topology]


def test_names_and_reasons_of_others_are_text(made, page):
    assert page.of("script") == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.of("b") == []
    assert SCRIPT in page.text("th")
    assert REASON in page.text("td")
    assert any(EXPERIMENT in text for text in page.text("h1"))
    assert any(SCRIPT in image["alt"] for image in page.of("img"))


def test_pictures_hold_no_markup_of_others_and_draw_what_looks_like_mathematics(made, page):
    for data in svgs(page):
        tree = ElementTree.fromstring(data)
        names = {element.tag.rpartition("}")[2] for element in tree.iter() if isinstance(element.tag, str)}
        assert not names & {"script", "image", "foreignObject", "a"}
        assert b"<script" not in data
    odd = "a $\\frac{ b$ \x00 <i>&"
    with styled():
        figure, ax = panel(odd, odd, odd)
        ax.plot([1, 2], [1, 2], label=odd)
        data = svg(figure)
    assert ElementTree.fromstring(data).tag.endswith("svg")
    assert b"<i>" not in data


def test_the_files_beside_the_page_are_its_pictures(made, page):
    assert [path.read_bytes() for path in made.report.figures] == svgs(page)
    assert len(made.report.figures) > 20
    assert {path.parent.name for path in made.report.figures} == {"report_figures"}


def test_it_names_nothing_outside_itself(made, page):
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "url(" not in CSS
    assert "@import" not in CSS
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", made.html).replace("http-equiv", "")
    assert "default-src 'none'" in page.of("meta")[1]["content"]


def test_headings_are_in_order_and_tables_and_pictures_say_what_they_are(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels == [1] + [2] * (len(levels) - 1)
    assert len(levels) == 2 + len(figures())
    assert all(cell["scope"] in ("col", "row") for cell in page.of("th"))
    assert all(len(image["alt"]) > 20 for image in page.of("img"))
    assert len(page.of("figcaption")) == len(page.of("figure")) > 8
    targets = {attributes.get("id") for _, attributes in page.tags}
    assert all(link["href"].removeprefix("#") in targets for link in page.of("a"))


def contrast(a, b):
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of relative luminances."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out_from_white():
    assert contrast("#000", "#fff") == pytest.approx(21)
    assert contrast("#777", "#fff") == pytest.approx(4.48, abs=0.01)  # the known grey just below AA
    assert all(contrast(colour, "white") >= 3 for colour in COLOURS)
    assert all(contrast(in_order(k, n)["color"], "white") >= 3 for n in (1, 2, 5, 9) for k in range(n))
    ink = re.findall(r"[^-]color: (#[0-9a-f]{3,6})", CSS)
    assert len(ink) >= 4
    assert all(contrast(colour, "#f0f0f0") >= 4.5 for colour in ink)


def test_no_two_topologies_or_sizes_are_told_apart_by_colour_alone():
    assert len({in_order(k, 9)["marker"] for k in range(9)}) == 9


def test_another_report_at_the_same_place_leaves_no_old_figure(store, trial_row, tmp_path):
    store.write_trial(trial_row())
    folder = tmp_path / "report_figures"
    folder.mkdir()
    (folder / "pareto-09.svg").write_text("old")
    (folder / "mine.svg").write_text("mine")
    report(store, None, tmp_path)
    assert not (folder / "pareto-09.svg").exists()
    assert (folder / "mine.svg").read_text() == "mine"


# ---- the command


@pytest.fixture
def run(run):
    return partial(run, "report")


def test_the_command_writes_the_same_bytes_as_the_function_and_says_how_far_it_is(run, made, tmp_path):
    made.law.save(tmp_path / "law.json")
    code, out, err = run(made.store.path, "--law", tmp_path / "law.json", "--out", tmp_path / "r", "--hardware", "cpu")
    assert code == 0, err
    assert out == f"{tmp_path / 'r' / 'report.html'} and {len(made.report.figures)} figures in report_figures\n"
    assert "drawing loss against shape" in err
    assert all(re.match(r" *\d+\.\d s  \w", line) for line in err.splitlines())
    assert (tmp_path / "r" / "report.html").read_text(encoding="utf-8") == made.html
    for path in made.report.figures:
        assert (tmp_path / "r" / "report_figures" / path.name).read_bytes() == path.read_bytes()


def test_a_question_of_ones_own_is_answered_as_optimum_does(run, made, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "figures", list)
    made.law.save(tmp_path / "law.json")
    options = ("--law", tmp_path / "law.json", "--out", tmp_path / "a.html", "--hardware", "cpu", "--context", "256")
    code, out, err = run(
        made.store.path, *options, "--budget", "params<=300k", "--budget", "kv_bytes<=4MiB", "--tokens", "1M"
    )
    assert code == 0, err
    assert f"{tmp_path / 'a.html'} and " in out
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    answer = optimum(
        made.law, ["params<=300k", "kv_bytes<=4MiB"], topologies=["pre_ln", "hc"], tokens=1e6, hardware="cpu",
        workload=Workload(context=256),
    )  # fmt: skip
    assert page.tables[0][1][1:3] == [str(answer.best.n_layers), str(answer.best.d_model)]
    assert page.tables[0][1][5] == f"{answer.best.loss:.4f}"
    assert "Under params at most 300K and kv_bytes at most 4 MiB" in " ".join(page.text("p"))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--budget", "parms<=1"], "unknown budget 'parms'"),
        (["--hardware", "abacus"], "abacus"),
        (["--experiment", "none"], "no experiment 'none'"),
        (["--layers", "9:2"], "layers 9 to 2"),
        (["--law", "/nowhere/law.json"], "cannot read the law file"),
        (["--topology", "unheard"], "unheard"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line(run, made, tmp_path, extra, said):
    made.law.save(tmp_path / "law.json")
    code, out, err = run(made.store.path, "--law", tmp_path / "law.json", "--out", tmp_path / "r", *extra)
    last = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert last.startswith("error: ")
    assert said in last
    assert not (tmp_path / "r").exists()


def test_a_place_that_cannot_be_written_is_one_line(store, trial_row, tmp_path):
    store.write_trial(trial_row())
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write the report to .*choose another --out"):
        report(store, None, tmp_path / "file" / "r")


def test_neither_torch_nor_ray_nor_pyplot_is_loaded_and_the_global_style_stays(made, tmp_path):
    made.law.save(tmp_path / "law.json")
    code = (
        "import sys, matplotlib, depthlaw\n"
        "matplotlib.rcParams['font.size'] = 31\n"
        "store, law = depthlaw.Store(sys.argv[1]), depthlaw.load_law(sys.argv[2])\n"
        "depthlaw.report(store, law, sys.argv[3])\n"
        "heavy = [n for n in ('torch', 'ray', 'matplotlib.pyplot') if n in sys.modules]\n"
        "print(heavy, matplotlib.rcParams['font.size'])"
    )
    given = [str(made.store.path), str(tmp_path / "law.json"), str(tmp_path / "r")]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 31.0"
