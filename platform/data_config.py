"""What a data build is asked for, where builds live, and the error that a user of the data sees.

Importing this module is cheap: `datasets` and `tokenizers` load only when text is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

NEOX_VOCAB = 50_280
BPE_VOCAB = (257, 65_535)  # 256 bytes and the separator; the largest id count that leaves uint16 room
HUB_FIELDS = ("dataset", "subset", "split", "text_field", "max_documents", "max_tokens")


class DataError(ValueError):
    """The data cannot do what was asked. The message is one line: what, the value, what is allowed or what to do."""


def one_line(error: BaseException) -> str:
    """Another library's error as its kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def data_root() -> Path:
    """Folder of all builds: environment variable DEPTHLAW_DATA, else ./data under the current directory."""
    return Path(os.environ.get("DEPTHLAW_DATA") or "data").absolute()


class DataConfig(BaseModel):
    """Which text, which tokenizer, how much is held out. Everything here changes the tokens, so all of it is hashed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["offline", "pydoc", "hub"] = "offline"
    tokenizer: Literal["bpe", "gpt-neox"] = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = Field(default=0.02, gt=0.0, le=0.5)
    # Only for source "hub": what `datasets.load_dataset` is asked for (a local folder works), and where it ends:
    # documents read, before dedup; tokens of both splits together, separators included.
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    max_documents: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        low, high = BPE_VOCAB
        if self.tokenizer == "bpe" and not low <= self.vocab_size <= high:
            raise ValueError(f"vocab_size={self.vocab_size} with tokenizer 'bpe': allowed are {low} to {high}")
        if self.tokenizer == "gpt-neox" and self.vocab_size != NEOX_VOCAB:
            raise ValueError(f"vocab_size={self.vocab_size} with tokenizer 'gpt-neox': allowed is only {NEOX_VOCAB}")
        if self.source == "hub":
            if not self.dataset:
                raise ValueError(
                    f"dataset={self.dataset!r} with source 'hub': give a hub name such as "
                    "'HuggingFaceFW/fineweb-edu' or a local folder of parquet or jsonl files"
                )
            if self.max_documents is None and self.max_tokens is None:
                raise ValueError("max_documents=None and max_tokens=None with source 'hub': give at least one limit")
        else:
            given = [name for name in HUB_FIELDS if name in self.model_fields_set]
            if given:
                value = getattr(self, given[0])
                raise ValueError(f"{given[0]}={value!r} with source {self.source!r}: allowed only with source 'hub'")
        return self

    @classmethod
    def parse(cls, values: dict[str, Any]) -> DataConfig:
        """The same as `DataConfig(**values)`, but a mistake is a one-line DataError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise DataError(f"data config: {_first_mistake(error)}") from None

    def describe(self) -> str:
        """The text in a few words, for whoever reads a loss on it."""
        text = {
            "offline": "technical documentation and Python code",
            "pydoc": "the Python reference's help topics",
            "hub": f"{self.dataset} {self.subset or ''}".strip(),
        }[self.source]
        return f"{text}, {self.tokenizer} vocabulary of {self.vocab_size}"

    def canonical(self) -> dict[str, Any]:
        """The fields that decide the tokens; what another source would use is left out."""
        return self.model_dump(exclude=set() if self.source == "hub" else set(HUB_FIELDS))


def _first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {name!r}; allowed: {', '.join(DataConfig.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{name}={first['input']!r}: {message}" if name else message
