"""Trained weights as a safetensors file and, beside it, a JSON that says what they are. Nothing in either is code.

    STORE/weights/TRIAL.safetensors        the model's tensors by name, fp32
    STORE/weights/TRIAL.json               topology, shape, the trial's spec, the data and its tokenizer

The JSON is written last: where it is, the weights are whole. safetensors and not torch's own files, because reading
those runs what is pickled in them, and checkpoints are passed around.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from depthlaw.archs.backbone import Model, build
from depthlaw.archs.errors import ShapeError, TopologyError
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology
from depthlaw.platform.data_config import HUB_FIELDS
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.store import Store
from depthlaw.platform.store_cells import best_trials
from depthlaw.platform.store_files import encode

FORMAT_VERSION = 1
NAMED = 5  # trials in an error


class ExportError(ValueError):
    """A checkpoint that cannot be read or is not one. One line: what, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A model and what is known of it; `name` is its trial's id, or the path it was read from."""

    name: str
    model: Model
    about: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """The columns that every row of a table about it begins with; `trial` joins the store's trial rows."""
        shape = self.about["shape"]
        return {
            "trial": self.name,
            "topology": self.about["topology"],
            "n_layers": shape["n_layers"],
            "d_model": shape["d_model"],
        }


def weights_path(store: Store, trial: str) -> Path:
    """Where the weights of a trial are if they were kept; their JSON has the same name with another ending."""
    return store.local_folder / "weights" / f"{encode(trial, 'trial')}.safetensors"


def export_trial(model: torch.nn.Module, spec: TrialSpec, dataset: Dataset, store: Store, first: bool = True) -> None:
    """Writes the weights of a trained trial into its store. Raises ExportError if the disk refuses.

    All ranks of a trial take part, for each may have a part of them; only the `first` writes.
    """
    tensors = _whole(model, first)
    if not first:
        return
    given = dataset.index["config"]
    unused = () if given["source"] == "hub" else HUB_FIELDS
    config = {key: value for key, value in given.items() if key not in unused and value is not None}
    about = {
        "trial": spec.hash,
        "topology": spec.topology,
        "shape": asdict(spec.shape),
        "spec": spec.to_dict(),
        "data": {"fingerprint": dataset.fingerprint, "config": config, "tokenizer": dataset.index["tokenizer"]},
    }
    write(weights_path(store, spec.hash), tensors, about)


def _whole(model: torch.nn.Module, wanted: bool) -> dict[str, torch.Tensor]:
    """All tensors by name, none if not `wanted`; ZeRO 3 leaves only parts in the model, which all ranks gather here."""
    parted = [p for p in model.parameters() if hasattr(p, "ds_id")]
    if not parted:
        return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()} if wanted else {}
    import deepspeed

    with deepspeed.zero.GatheredParameters(parted):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()} if wanted else {}


def write(path: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """Either file appears whole or not at all."""
    from safetensors.torch import save

    text = json.dumps({"format": "depthlaw", "format_version": FORMAT_VERSION, **about}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, data in ((path, save(tensors)), (path.with_suffix(".json"), text.encode())):
            temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
            temporary.write_bytes(data)
            os.replace(temporary, target)
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror}") from error


def load(path: str | Path) -> Checkpoint:
    """A checkpoint of a sweep (its .safetensors or .json), or a Llama-style one of transformers (its folder).

    The model is on the CPU, in fp32 and in eval mode. Raises ExportError.
    """
    path = Path(path)
    if path.is_dir():
        from depthlaw.platform.llama import load_llama

        model, about = load_llama(path)
        return Checkpoint(str(path), model, about)
    if path.suffix not in (".safetensors", ".json"):
        raise ExportError(
            f"{path} is no checkpoint: give a .safetensors file of a sweep's weights/, or a folder with config.json"
        )
    about = read_json(path.with_suffix(".json"))
    if about.get("format") != "depthlaw" or about.get("format_version", 0) > FORMAT_VERSION:
        raise ExportError(
            f"{path.with_suffix('.json')} has format {about.get('format')!r} version {about.get('format_version')!r}; "
            f"this depthlaw reads 'depthlaw' up to version {FORMAT_VERSION}"
        )
    try:
        model = build(Shape(**about["shape"]), topology(about["topology"]), 0)
        name = about["trial"] or str(path)
    except (KeyError, TypeError, ShapeError, TopologyError) as error:
        raise ExportError(f"{path.with_suffix('.json')} describes no model: {error}") from error
    tensors = read_tensors([path.with_suffix(".safetensors")])
    fill(model, tensors, path)
    return Checkpoint(name, model.eval(), about)


def find_checkpoint(given: str, store: Store | None) -> Path:
    """The file of a trial kept in the store, or the path itself. Raises ExportError."""
    if Path(given).exists():
        return Path(given)
    if store is None:
        raise ExportError(f"{given}: no such file or folder; for a trial's id give its store too, with --storage")
    path = weights_path(store, given)
    if not path.exists():
        there = sorted(kept(store, store.statuses()))
        more = f" and {len(there) - NAMED} more in {path.parent}" if len(there) > NAMED else ""
        some = ", ".join(there[:NAMED]) + more if there else "none; set keep_checkpoints in the sweep"
        raise ExportError(f"store {store.path} has no weights of {given!r}; it has those of: {some}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path}: no such file; it must say what the weights beside it are") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ExportError(f"{path}: not a JSON object")
    return found


def read_tensors(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            found |= load_file(path)
        except FileNotFoundError:
            raise ExportError(f"{path}: no such file") from None
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path}: not a whole safetensors file ({error})") from error
    return found


@torch.no_grad()
def fill(model: Model, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Copies every tensor in by name; raises ExportError naming the first that is missing, left over or misshapen."""
    own = dict(model.named_parameters())
    if wrong := sorted(own.keys() ^ tensors.keys()):
        there = "lacks" if wrong[0] in own else "has an unknown"
        raise ExportError(f"{path} {there} tensor {wrong[0]!r}" + (f", and {len(wrong) - 1} more" * (len(wrong) > 1)))
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ExportError(f"{path}: {name} is {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}")
        own[name].copy_(tensor)


def kept(store: Store, trials: Iterable[str]) -> list[str]:
    """Those of the trials whose weights are in the store."""
    return [trial for trial in trials if weights_path(store, trial).with_suffix(".json").exists()]


def keep(store: Store, trials: Iterable[str], which: str) -> list[str]:
    """Deletes those weights of these trials that are not to stay; returns the trials whose weights were to.

    `which` is all, or best: of each cell the finished trial of lowest val_loss.
    """
    rows = store.trials()
    rows = rows[rows["trial"].isin(list(trials)) & (rows["status"] == "finished")]
    if which == "best":
        rows = best_trials(rows)
    wanted = set(rows["trial"])
    for trial in kept(store, trials):
        if trial not in wanted:
            path = weights_path(store, trial)
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return sorted(wanted)
