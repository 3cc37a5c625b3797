"""Text of the three sources as documents with a group, exact paragraph dedup, and the split by group."""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from depthlaw.platform.data_config import DataConfig, DataError, one_line


@dataclass(frozen=True)
class Document:
    """One text. `group` ("kind/name") is what the split keeps together: a service, an API, a block of a package."""

    group: str
    text: str


# --- HTML in service documentation ---------------------------------------------------------------------------------

# Only names that are markup: `<bucket>` and `<account-id>` in the same texts are placeholders and must stay.
_BLOCK = "p note important ul ol dl div pre h1 h2 h3 h4 h5 h6 zonbook xhtml para table tr"
_LINE = "dt dd br /li"
_INLINE = "code a i b em strong u replaceable fullname link filename span td th tt small sup sub text"
_ITEM = "\x01"  # where a list item starts, until the spaces around it are gone
_MARKUP = {
    **{slash + name: "\n\n" for name in _BLOCK.split() for slash in ("", "/")},
    **{slash + name: "\n" for name in _LINE.split() for slash in ("", "/")},
    **{slash + name: "" for name in _INLINE.split() for slash in ("", "/")},
    "li": _ITEM,
}
_TAG = re.compile(r"<(/?[A-Za-z][\w:.-]*)[^<>]*>")
_AROUND_ITEM = re.compile(rf"\s*{_ITEM}\s*")
_MANY_NEWLINES = re.compile(r"\n{3,}")


def strip_html(text: str) -> str:
    """Documentation as plain text: paragraphs apart by a blank line, list items as "- ", entities as characters."""
    if "<" in text:
        text = _TAG.sub(lambda tag: _MARKUP.get(tag[1], tag[0]), text)
        text = _AROUND_ITEM.sub("\n- ", text)
    text = html.unescape(text) if "&" in text else text
    text = "\n".join(" ".join(line.split()) for line in text.split("\n"))
    return _MANY_NEWLINES.sub("\n\n", text).strip()


# --- Sources -------------------------------------------------------------------------------------------------------

_NOT_CODE = re.compile(r"(^|/)(tests?|testing|__pycache__)/|(^|/)(test_[^/]*|[^/]*_test|conftest|tests?)\.py$")
_BLOCK_DEPTH = 3  # django/db/models is one block: deep enough to be small, shallow enough to keep siblings together


def _strings(node: Any, field: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == field and isinstance(value, str):
                yield value
            else:
                yield from _strings(value, field)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, field)


def botocore_documents(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """One document per operation and shape of the latest version of each service."""
    latest: dict[str, str] = {}
    for name in sorted(wheel.namelist()):
        if name.endswith("/service-2.json.gz"):
            latest[name.split("/")[-3]] = name  # versions are dates: the last in order is the latest
    for service, name in latest.items():
        model = json.loads(gzip.decompress(wheel.read(name)))
        parts = [model.get("documentation", "")]
        parts += ["\n\n".join(_strings(node, "documentation")) for node in model.get("operations", {}).values()]
        parts += ["\n\n".join(_strings(node, "documentation")) for node in model.get("shapes", {}).values()]
        yield from (Document(f"prose/aws/{service}", strip_html(part)) for part in parts if part)


def discovery_documents(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """One document per schema and resource of each API; all versions of an API are one group."""
    for name in sorted(wheel.namelist()):
        if "/discovery_cache/documents/" not in name or not name.endswith(".json"):
            continue
        file = name.rsplit("/", 1)[1]
        if file == "index.json":
            continue
        api = json.loads(wheel.read(name))
        nodes = [{"description": api.get("description", "")}, *api.get("schemas", {}).values()]
        nodes += list(api.get("resources", {}).values())
        for node in nodes:
            text = "\n\n".join(part.strip() for part in _strings(node, "description"))
            yield Document(f"prose/google/{file.split('.')[0]}", text)


def source_documents(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """One document per Python file that is not a test."""
    for name in sorted(wheel.namelist()):
        if name.endswith(".py") and not _NOT_CODE.search(name) and ".dist-info/" not in name:
            block = "/".join(name.split("/")[:-1][:_BLOCK_DEPTH])
            yield Document(f"code/{block or name}", wheel.read(name).decode("utf-8", errors="replace"))


def offline_documents(wheels: Mapping[str, zipfile.ZipFile]) -> Iterator[Document]:
    """The offline corpus, in the order of the pinned list."""
    readers = {"botocore": botocore_documents, "google-api-python-client": discovery_documents}
    for name, wheel in wheels.items():
        yield from readers.get(name, source_documents)(wheel)


def pydoc_documents() -> Iterator[Document]:
    """The topics of this Python's `help()`: 0.5 MB in every CPython, different from one patch release to the next."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield text_document(topics[name])


def hub_documents(config: DataConfig) -> Iterator[Document]:
    """Rows of a hub dataset or of a local folder, streamed in their order. Raises DataError if it cannot be read."""
    from datasets import load_dataset

    what = f"dataset {config.dataset!r}, subset {config.subset!r}, split {config.split!r}"
    try:
        rows = load_dataset(config.dataset, config.subset, split=config.split, streaming=True)
        for row in rows:
            text = row.get(config.text_field)
            if isinstance(text, str):
                yield text_document(text)
            elif text is not None or config.text_field not in row:  # a null is an empty document
                texts = [name for name, value in row.items() if isinstance(value, str)]
                raise DataError(f"{what}: text_field={config.text_field!r} holds no text; text is in {texts}")
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds; a user needs one line
        raise DataError(f"{what} cannot be read: {one_line(error)}") from error


def text_document(text: str) -> Document:
    """A document without a natural group: equal texts, and one in 65 536 others, share one."""
    return Document(f"text/{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:4]}", text)


# --- Dedup and split -----------------------------------------------------------------------------------------------

_PARAGRAPH_END = re.compile(r"\n(?:[ \t]*\n)+")


class Dedup:
    """Keeps the first copy of every paragraph (text between blank lines) of the whole corpus.

    Memory is about 80 bytes a paragraph. Equality is exact up to trailing space; indentation counts.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.paragraphs = 0

    def __call__(self, document: Document) -> Document | None:
        """The document without paragraphs seen before, or None when nothing is left."""
        kept = []
        text = document.text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")  # lone surrogates -> "?"
        for paragraph in _PARAGRAPH_END.split(text):
            paragraph = paragraph.rstrip().lstrip("\n")
            if not paragraph:
                continue
            self.paragraphs += 1
            key = int.from_bytes(hashlib.blake2b(paragraph.encode(), digest_size=8).digest(), "little")
            if key not in self.seen:
                self.seen.add(key)
                kept.append(paragraph)
        return Document(document.group, "\n\n".join(kept) + "\n") if kept else None


def deduplicated(documents: Iterable[Document], dedup: Dedup) -> Iterator[Document]:
    """`documents` with repeated paragraphs, and documents left empty, taken out."""
    for document in documents:
        kept = dedup(document)
        if kept is not None:
            yield kept


SPLIT_RULE = (
    "per kind (first part of the group's name), room = validation_fraction of its bytes; groups in order of "
    "sha256(group) go to validation while they fit, first those under a quarter of the room, then any; "
    "a kind where none fits gives its smallest group, a kind of one group gives none"
)


def validation_groups(group_bytes: Mapping[str, int], fraction: float) -> set[str]:
    """The groups held out, by SPLIT_RULE: whole groups only, close to `fraction` of the bytes of every kind."""
    held: set[str] = set()
    for kind in sorted({group.split("/")[0] for group in group_bytes}):
        groups = [group for group in group_bytes if group.split("/")[0] == kind]
        if len(groups) < 2:
            continue
        groups.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        room = math.floor(fraction * sum(group_bytes[group] for group in groups))
        chosen: set[str] = set()
        for largest in (room // 4, room):  # one large service must not be most of the validation text
            for group in groups:
                if group not in chosen and group_bytes[group] <= min(largest, room):
                    chosen.add(group)
                    room -= group_bytes[group]
        held |= chosen or {min(groups, key=lambda name: (group_bytes[name], name))}
    return held
