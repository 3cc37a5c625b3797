"""A public Llama-style checkpoint in the layout of `transformers`, as a pre_ln model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from depthlaw.archs.backbone import ROPE_THETA, Model, build
from depthlaw.archs.errors import ShapeError
from depthlaw.archs.ops.norm import EPS
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology
from depthlaw.platform.export import ExportError, fill, read_json, read_tensors

# What this backbone does not have, and the value at which a config does without it.
PLAIN = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
}


def load_llama(folder: Path) -> tuple[Model, dict[str, Any]]:
    """The model in fp32, eval mode, and what config.json says. Raises ExportError for what cannot be honoured.

    Honoured: grouped-query attention, tied embeddings, sharded files, rope_theta, and any rms_norm_eps e. This
    backbone's own is 1e-6; a stream scaled by c = sqrt(1e-6 / e) has the same normed values, x / sqrt(mean x^2 + e),
    everywhere, so embedding, output and down projections are scaled by c. Depth states are then c times the
    original's, which no diagnostic sees: all are ratios or angles, or decode through the final norm.
    """
    config = read_json(folder / "config.json")
    shape = _shape(config, folder)
    model = build(shape, topology("pre_ln"), 0)
    model.rope_theta = _rope_theta(config, folder)
    scale = (EPS / float(config.get("rms_norm_eps", EPS))) ** 0.5
    fill(model, _renamed(_tensors(folder), config, shape, scale, folder), folder)
    about = {"trial": None, "topology": "pre_ln", "shape": shape.__dict__, "config": config}
    return model.eval(), about


def _shape(config: dict[str, Any], folder: Path) -> Shape:
    if config.get("model_type") not in ("llama", "mistral"):
        raise ExportError(f"{folder}: model_type is {config.get('model_type')!r}; only llama and mistral can be read")
    for key, allowed in PLAIN.items():
        if config.get(key, allowed[-1]) not in allowed:
            raise ExportError(
                f"{folder}: {key} is {config[key]!r}, which this backbone does not have; it needs {allowed[0]}"
            )
    try:
        heads, width = config["num_attention_heads"], config["hidden_size"]
        shape = Shape(
            n_layers=config["num_hidden_layers"],
            d_model=width,
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads") or heads,
            d_ff=config["intermediate_size"],
            vocab_size=config["vocab_size"],
        )
    except KeyError as error:
        raise ExportError(f"{folder}: config.json has no {error}") from None
    except ShapeError as error:
        raise ExportError(f"{folder}: {error}") from error
    if (config.get("head_dim") or shape.head_dim) != shape.head_dim:
        raise ExportError(
            f"{folder}: head_dim is {config['head_dim']}; this backbone needs hidden_size / heads = {shape.head_dim}"
        )
    return shape


def _rope_theta(config: dict[str, Any], folder: Path) -> float:
    """Of transformers 5's `rope_parameters`, or of the keys before it. Raises ExportError for scaled rotations."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ExportError(f"{folder}: rope_type is {kind!r}, which this backbone does not have; it needs 'default'")
    return float(rope.get("rope_theta") or config.get("rope_theta") or ROPE_THETA)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors([folder / "model.safetensors"])
    names = read_json(index).get("weight_map", {}).values()
    return read_tensors(folder / name for name in sorted(set(names)))


def _renamed(
    given: dict[str, torch.Tensor], config: dict[str, Any], shape: Shape, scale: float, folder: Path
) -> dict[str, torch.Tensor]:
    """Our names and fused matrices; what has no place here stays under its own name, for `fill` to refuse."""
    left = {name.removeprefix("model."): t.float() for name, t in given.items() if not name.endswith("inv_freq")}

    def take(*names: str) -> torch.Tensor:
        try:
            return torch.cat([left.pop(f"{name}.weight") for name in names])
        except KeyError as error:
            raise ExportError(f"{folder} lacks tensor {error}") from None

    embedding = take("embed_tokens")
    tied = config.get("tie_word_embeddings", False) and "lm_head.weight" not in left
    found = {
        "embedding": embedding * scale,
        "head": embedding if tied else take("lm_head"),
        "final_norm": take("norm"),
    }
    for block in range(shape.n_layers):
        at, attention, mlp = f"layers.{block}", f"branches.{2 * block}", f"branches.{2 * block + 1}"
        found |= {
            f"{attention}.qkv": take(*(f"{at}.self_attn.{x}_proj" for x in "qkv")),
            f"{attention}.out": take(f"{at}.self_attn.o_proj") * scale,
            f"{mlp}.gate_up": take(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
            f"{mlp}.down": take(f"{at}.mlp.down_proj") * scale,
            f"depth.{2 * block}.norm": take(f"{at}.input_layernorm"),
            f"depth.{2 * block + 1}.norm": take(f"{at}.post_attention_layernorm"),
        }
    return found | left
