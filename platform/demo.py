"""The demo: a whole study, from text to an answer, in a few minutes on two cores."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path

from depthlaw.platform.answers import answer_text
from depthlaw.platform.baselines import baselines
from depthlaw.platform.command import note
from depthlaw.platform.config import SweepConfig, load_config
from depthlaw.platform.data_build import build
from depthlaw.platform.data_config import data_root
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.query import fit, optimum
from depthlaw.platform.show import data_lines, law_lines, out, progress_lines
from depthlaw.platform.status import status_table
from depthlaw.platform.store import Store
from depthlaw.platform.sweep import sweep
from depthlaw.scaling.hardware import Workload
from depthlaw.scaling.optimum import Infeasible

DEMO = Path(str(files("depthlaw.tune_configs") / "demo.yaml"))

# What fits; what still fits a cache; what is still fast.
QUESTIONS = (["params<=250k"], ["params<=250k", "kv_bytes<=640KiB"], ["params<=250k", "tpot<=175us"])
TOKENS = 5e5
WORKLOAD = Workload(context=1024, batch=1, weight_bytes=4, cache_bytes=4)

LIMITS = """\
What this is worth: models of 13 to 170 thousand parameters, trained briefly on technical documentation and code, one
seed. The figures are real and say nothing about web text or hundreds of millions of parameters."""


def run(folder: Path) -> None:
    """Runs or resumes the demo in `folder` and prints what it found."""
    config = load_config(DEMO)
    dataset = build(config.data, data_root(), progress=note)
    out(data_lines(dataset, config.seq_len), "")
    store = Store.create(folder)
    known, began = len(store.statuses()), time.monotonic()
    with progress_lines(config.name) as listener:
        trials = sweep(config, store, listener=listener)
    ran = len(store.statuses()) - known
    out(
        status_table(store, config.name), f"{ran} of {len(trials)} trials run now, {time.monotonic() - began:.0f} s", ""
    )
    out(largest_cell(store, config, dataset), "")

    law = fit(store, "shape", experiment=config.name)
    law.save(folder / "law.json")
    out(law_lines(law), "")
    for budgets in QUESTIONS:
        quoted = " ".join(f'"{text}"' for text in budgets)
        out(
            f"$ depthlaw optimum {folder / 'law.json'} {quoted} --tokens 500k --context 1024 --weight-bytes 4 "
            "--cache-bytes 4 --hardware cpu"
        )
        try:
            answer = optimum(law, budgets, tokens=TOKENS, workload=WORKLOAD, hardware="cpu")
            out(answer_text(answer), "")
        except Infeasible as no:
            out(f"infeasible: {no}", "")
    out(LIMITS)


def largest_cell(store: Store, config: SweepConfig, dataset: Dataset) -> str:
    """The learning curve of the largest model beside what models that know only frequencies score."""
    finished = store.trials().query("status == 'finished' and experiment == @config.name")
    row = finished.sort_values(["backbone_params", "val_loss"]).iloc[-1]
    curve = store.steps(trial=row["trial"], names="val_loss")
    points = ", ".join(f"{value:.3f} at step {step}" for step, value in zip(curve["step"], curve["value"], strict=True))
    scores = baselines(dataset, config.seq_len, config.validation.windows)
    return (
        f"largest cell  {row['topology']} {row['n_layers']} x {row['d_model']}: validation loss {points}\n"
        f"              unigram entropy of the same text {scores['unigram']:.3f}, which is "
        f"{scores['unigram'] - row['val_loss']:.2f} above the model; a bigram model {scores['bigram']:.3f}, which is "
        f"{scores['bigram'] - row['val_loss']:.2f} above it"
    )
