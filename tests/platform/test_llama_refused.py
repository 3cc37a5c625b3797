"""What a Llama-style checkpoint may have that this backbone does not: one line that names it, never wrong logits."""

import json

import pytest
import torch
from safetensors.torch import save_file

from depthlaw.platform.export import ExportError, load

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}


def tensors():
    generator = torch.Generator().manual_seed(0)
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens": (10, 16), "lm_head": (10, 16), "model.norm": (16,), at + "input_layernorm": (16,),
        at + "post_attention_layernorm": (16,), **{f"{at}self_attn.{x}_proj": (16, 16) for x in "qkvo"},
        f"{at}mlp.gate_proj": (24, 16), f"{at}mlp.up_proj": (24, 16), f"{at}mlp.down_proj": (16, 24),
    }  # fmt: skip
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder, config, given):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(given, folder / "model.safetensors")
    return folder


def test_a_config_of_before_transformers_5_loads(tmp_path):
    model = load(write(tmp_path, CONFIG | {"rope_theta": 5e5}, tensors())).model
    assert (model.rope_theta, model.shape.n_kv_heads) == (5e5, 2)
    # eps 1e-5 is honoured by a stream that is sqrt(1e-6 / 1e-5) as large.
    assert torch.equal(model.embedding, tensors()["model.embed_tokens.weight"] * 0.1**0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; only llama and mistral can be read"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"head_dim": 32}, "head_dim is 32; this backbone needs hidden_size / heads = 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_type is 'llama3'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"num_attention_heads": 3}, "n_heads 3 does not divide d_model 16"),
        ({"vocab_size": 11}, "embedding is (10, 16), the model has (11, 16)"),
    ],
)
def test_what_the_backbone_does_not_have_is_refused_in_one_line(tmp_path, changes, words):
    with pytest.raises(ExportError) as error:
        load(write(tmp_path, CONFIG | changes, tensors()))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lacks tensor 'lm_head.weight'"),
        (lambda t: t.pop("model.norm.weight"), "lacks tensor 'norm.weight'"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}), "unknown tensor 'layers.0.self"),
    ],
)
def test_tensors_that_are_missing_or_have_no_place_are_named(tmp_path, change, words):
    given = tensors()
    change(given)
    with pytest.raises(ExportError) as error:
        load(write(tmp_path, CONFIG, given))
    assert words in str(error.value)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ExportError, match=r"config\.json: no such file"):
        load(tmp_path)
