"""Llama-style checkpoints as `transformers` writes them, against its own logits, with random weights.

Run by `make test-peers`. Refusals, which need no other package, are in tests/platform/test_llama_refused.py.
"""

import json

import pytest
import torch

from depthlaw.platform.cli import main
from depthlaw.platform.export import load

pytestmark = pytest.mark.peers


def saved(folder, shard="5GB", **changes):
    """A LlamaForCausalLM with no parameter at its start, and its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(options | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 8},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5},
        {"rms_norm_eps": 1e-2, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"shard": "50KB"},
    ],
    ids=["gqa", "mha", "tied", "eps 1e-5", "eps 1e-2", "rope_theta", "sharded"],
)
def test_logits_equal_those_of_transformers(tmp_path, changes):
    theirs = saved(tmp_path, **changes).double()
    if "shard" in changes:
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours = load(tmp_path).model.double()
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(input_ids=tokens, use_cache=False).logits, ours.logits(tokens)
    # Their rotation tables are fp32 at any precision: what is left of that after three layers.
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())


def test_theta_and_eps_are_not_ignored(tmp_path):
    """What the test above allows is far below what a wrong theta or eps would do."""
    theirs = saved(tmp_path, rms_norm_eps=1e-2).double()
    config = json.loads((tmp_path / "config.json").read_text())
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected = theirs(input_ids=tokens, use_cache=False).logits
        for changes in ({"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}):
            (tmp_path / "config.json").write_text(json.dumps(config | changes))
            found = load(tmp_path).model.double().logits(tokens)
            assert float((found - expected).abs().max()) > 1e-3 * float(expected.abs().max())


def test_a_model_in_bf16_loads_as_the_values_it_has(tmp_path):
    theirs = saved(tmp_path).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path).model
    assert torch.equal(ours.branches[0].out, theirs.model.layers[0].self_attn.o_proj.weight.float())


def test_diagnose_takes_a_transformers_folder_and_a_text(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    saved(tmp_path, rms_norm_eps=1e-6)
    alphabet = {c: k for k, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("How deep should a model be, and how wide? " * 20)
    words = ["diagnose", tmp_path, "--text", text, "--out", tmp_path / "d", "--length", 32, "--sequences", 4, "--json"]
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in [*words, "--only", "pruning"]])
    assert not end.value.code
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert (model["trial"], model["topology"], model["tokens"]) == (str(tmp_path), "pre_ln", 128)
