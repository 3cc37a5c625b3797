"""`depthlaw evaluate`: downstream NLL of checkpoints and kept trials, one row a model and task, joining the store's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from depthlaw.platform.completions import encode, nll, ratio_error
from depthlaw.platform.data_build import open_built
from depthlaw.platform.data_config import DataConfig, data_root
from depthlaw.platform.evaluate_tables import EvaluateError, table_of
from depthlaw.platform.export import Checkpoint, load
from depthlaw.platform.task_records import SOURCES, MissingError, examples
from depthlaw.platform.tasks import TASKS, Example
from depthlaw.platform.vocabulary import EOS_ID, load_neox, load_tokenizer, tokenizer_hash

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str], None]
BATCH_TOKENS = 8192
EVERY_S = 2.0
LLAMA_SEQ_LEN = 2048  # of a transformers config that does not say


def evaluate(
    *checkpoints: Checkpoint | str | Path,
    tasks: Sequence[str] | None = None,
    source: str = "offline",
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = lambda text: None,
) -> pd.DataFrame:
    """NLL of the completions of each task: a row a model and task, on the GPU if there is one.

    Columns: trial (joins the store), topology, n_layers, d_model; task, group, status (ok, or missing with its
    reason), source; examples, tokens and UTF-8 bytes of their completions; nll_nats = sum over tokens / tokens and
    its std_error over examples as clusters; bits_per_byte = sum / ln 2 / bytes; truncated, the examples longer than
    the model's seq_len. The batch size changes nothing but rounding, of about 1e-6.
    Raises EvaluateError, ExportError or DataError.
    """
    names = names_of(tasks)
    if source not in SOURCES:
        raise EvaluateError(f"source is {source!r}; choose from {', '.join(SOURCES)}")
    if batch_tokens < 1:
        raise EvaluateError(f"batch_tokens is {batch_tokens}; it must be 1 or more")
    if not checkpoints:
        raise EvaluateError("no checkpoint is given; name one at least")
    found = {name: _examples(name, source, progress) for name in names}
    rows = []
    for given in checkpoints:
        checkpoint = given if isinstance(given, Checkpoint) else load(given)
        text = Text(checkpoint, progress)
        checkpoint.model.to("cuda" if torch.cuda.is_available() else "cpu")
        for name, of_task in found.items():
            row = {**checkpoint.identity, "task": name, "group": TASKS[name].group}
            if isinstance(of_task, str):
                rows.append({**row, "status": "missing", "source": source, "reason": of_task})
            else:
                scored = score(text, of_task, batch_tokens, _told(progress, f"{checkpoint.name}: {name}"))
                rows.append({**row, "status": "ok", "source": source, "reason": None, **scored})
    return table_of(rows)


def names_of(given: Sequence[str] | None) -> list[str]:
    """All by default. Raises EvaluateError for an unknown one."""
    for name in given or ():
        if name not in TASKS:
            raise EvaluateError(f"unknown task {name!r}; choose from {', '.join(TASKS)}")
    return list(dict.fromkeys(given or TASKS))


def _examples(name: str, source: str, progress: Progress) -> list[Example] | str:
    """The examples, or why there are none: a task that is missing is reported, and the others go on."""
    try:
        return examples(name, source, data_root() / "wheels", progress)
    except MissingError as error:
        return str(error)


class Text:
    """A model, its tokenizer, the id that text starts behind, and how many tokens it was trained to read."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress = lambda text: None) -> None:
        """Raises EvaluateError or DataError where the tokenizer is not found or is not the model's."""
        self.model, about = checkpoint.model, checkpoint.about
        if "spec" in about:
            self.tokenizer, self.start_id = _of_trial(checkpoint, progress), EOS_ID
            self.seq_len: int = about["spec"]["seq_len"]
        else:
            self.tokenizer, self.start_id = _of_folder(checkpoint)
            self.seq_len = about["config"].get("max_position_embeddings", LLAMA_SEQ_LEN)


def _of_trial(checkpoint: Checkpoint, progress: Progress) -> Any:
    """From the build that it was trained on; GPT-NeoX also without one."""
    data = checkpoint.about["data"]
    config = DataConfig.parse(data["config"])
    dataset = open_built(config, data_root())
    if dataset is not None:
        tokenizer = dataset.tokenizer()
    elif config.tokenizer == "gpt-neox":
        tokenizer = load_neox(config, data_root() / "wheels", progress)
    else:
        raise EvaluateError(
            f"the tokenizer of {checkpoint.name} is not under {data_root()}: set DEPTHLAW_DATA to where its data is, "
            "or build it again with `depthlaw data build CONFIG`"
        )
    if tokenizer_hash(tokenizer.to_str()) != data["tokenizer"]["hash"]:
        raise EvaluateError(f"{checkpoint.name} was trained with another tokenizer than that under {data_root()}")
    return tokenizer


def _of_folder(checkpoint: Checkpoint) -> tuple[Any, int]:
    """tokenizer.json beside the weights, and config.json's begin of text, or its end of text if it has none."""
    path, config = Path(checkpoint.name) / "tokenizer.json", checkpoint.about["config"]
    if not path.exists():
        raise EvaluateError(f"{path}: no such file; the tokenizer of the checkpoint must be beside its weights")
    ids = [config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None]
    if not ids:
        raise EvaluateError(f"{path.with_name('config.json')} has neither bos_token_id nor eos_token_id: add one")
    return load_tokenizer(path), ids[0][0] if isinstance(ids[0], list) else ids[0]


def score(
    text: Text, found: Sequence[Example], batch_tokens: int, progress: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """The figures of one model on one task, as `evaluate` names them."""
    encoded = encode(text.tokenizer, found, text.start_id)
    largest, known = max(max(one.ids) for one in encoded), text.model.shape.vocab_size
    if largest >= known:
        raise EvaluateError(f"the tokenizer gives token {largest} and the model knows {known}: it is of another model")
    nats = nll(text.model, encoded, text.seq_len, batch_tokens, progress)
    tokens = np.array([len(one.ids) - one.first for one in encoded])
    size = sum(len(one.completion.encode()) for one in found)
    return {
        "examples": len(found),
        "tokens": int(tokens.sum()),
        "bytes": size,
        "nll_nats": float(nats.sum() / tokens.sum()),
        "std_error": ratio_error(nats, tokens),
        "bits_per_byte": float(nats.sum() / math.log(2) / size),
        "truncated": sum(one.too_long(text.seq_len) for one in encoded),
        "seq_len": text.seq_len,
    }


def _told(progress: Progress, what: str) -> Callable[[float], None]:
    began = told = time.monotonic()

    def tell(done: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= EVERY_S:
            told = now
            progress(f"{what} {done:.0%}, {now - began:.0f} s")

    return tell
