"""How fast the topologies are beside other packages' code and beside pre_ln: ratios of process time on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.topologies [--only llama decode ...] [--repeats 7] [--dtypes fp32 bf16]

The packages are those of the extra `peers`; `make bench-peers` installs them and runs everything. What is timed, and
why it is fair:

* One training step is forward pass, loss, backward pass, and a fused AdamW step on B x T = 16 x 128 tokens of a
  vocabulary of 512; both sides take the same cross-entropy of fp32 logits, the same batch and the same optimizer.
  bf16 is autocast around the forward pass on both sides, with fp32 weights.
* The two sides take turns, A B A B ..., after one untimed turn each, and each ratio is of two medians. Process time
  and not wall time, so that others' load on the machine counts as little as it can.
* Llama of transformers has the same shape and the same attention kernel (sdpa).
* hyper-connections and DeepSeek-V4's hyper-connection are put around this project's own branches and norms, so that
  the connections alone differ. The mhc of hyper-connections is another formula (coefficients of each stream); that of
  DeepSeek-V4 is ours.
  Both sides train the same branches: the time that each takes beyond pre_ln is the connections' own, and its ratio
  stands in brackets. Where pre_ln alone takes more than half of the other's time, no connection could be twice as fast.
* The naive form of full_attnres stacks all sources for each mix and leaves the rest to autograd; branches as above.
* A decode step is one token of one sequence after a prompt of 64, with each side's own cache of keys and values, and
  ends with the logits. One turn is 32 steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthlaw.archs.backbone import Context, Model, build
from depthlaw.archs.ops import rms_norm
from depthlaw.archs.shape import Shape, ceil_to_16
from depthlaw.archs.topologies import topology

BATCH, SEQ_LEN, VOCABULARY, HEAD_DIM = 16, 128, 512, 32
SINGLE = ("pre_ln", "sandwich_ln", "lns", "deepnorm", "keel", "hc", "mhc", "full_attnres", "block_attnres", "moda")
AIMS = {"hc": 1.5, "full_attnres": 1.5, "block_attnres": 1.5, "mhc": 2.0}


def shape_of(d_model: int, n_layers: int) -> Shape:
    heads = d_model // HEAD_DIM
    return Shape(n_layers, d_model, heads, heads, ceil_to_16(-(-8 * d_model // 3)), VOCABULARY)


def llama(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


class Wrapped(nn.Module):
    """This project's backbone, connected over depth by other code: subclasses say how, in `stream`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner = build(shape, topology("pre_ln"), 0)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, self.inner.embedding)
        context = Context(self.inner.rope(0, tokens_BT.shape[1], x_BTD.dtype))
        branches = [
            lambda h, branch=branch, gain=p.norm: branch(rms_norm(h, gain), context)
            for branch, p in zip(self.inner.branches, self.inner.depth, strict=False)
        ]
        return F.linear(rms_norm(self.stream(x_BTD, branches), self.inner.final_norm), self.inner.head)

    def stream(self, x_BTD: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> Tensor:
        raise NotImplementedError


class PackageStreams(Wrapped):
    """hyper-connections: its HyperConnections, or its mHC."""

    def __init__(self, shape: Shape, constrained: bool) -> None:
        from hyper_connections import HyperConnections
        from hyper_connections.manifold_constrained_hyper_connections import ManifoldConstrainedHyperConnections

        super().__init__(shape)
        kind = ManifoldConstrainedHyperConnections if constrained else HyperConnections
        self.expand, self.reduce = kind.get_expand_reduce_stream_functions(4)
        self.connections = nn.ModuleList(kind(4, dim=shape.d_model, layer_index=i) for i in range(2 * shape.n_layers))

    def stream(self, x_BTD: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> Tensor:
        H = self.expand(x_BTD)
        for connection, branch in zip(self.connections, branches, strict=True):
            read_BTD, write = connection(H)
            H = write(branch(read_BTD))
        return self.reduce(H)


class DeepSeekStreams(Wrapped):
    """The hyper-connection of transformers' DeepSeek-V4, applied as its decoder layer does."""

    def __init__(self, shape: Shape) -> None:
        from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

        super().__init__(shape)
        config = DeepseekV4Config(hidden_size=shape.d_model, hc_mult=4, hc_sinkhorn_iters=20)
        self.connections = nn.ModuleList(DeepseekV4HyperConnection(config) for _ in range(2 * shape.n_layers))
        for connection in self.connections:
            for tensor in connection.parameters():
                nn.init.normal_(tensor, std=0.02)

    def stream(self, x_BTD: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> Tensor:
        H_BTMD = x_BTD.unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        for connection, branch in zip(self.connections, branches, strict=True):
            post_BTM, comb_BTMM, read_BTD = connection(H_BTMD)
            out_BTD = branch(read_BTD)
            kept_BTMD = torch.matmul(comb_BTMM.to(H_BTMD.dtype).transpose(-1, -2), H_BTMD)
            H_BTMD = post_BTM.to(out_BTD.dtype).unsqueeze(-1) * out_BTD.unsqueeze(-2) + kept_BTMD
        return H_BTMD.mean(2)


class StackedAttnRes(Wrapped):
    """full_attnres as it reads: stack the sources, normalise them as keys, softmax, weighted sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        rows = 2 * shape.n_layers + 1
        self.queries, self.gains = (
            nn.Parameter(torch.zeros(rows, shape.d_model)),
            nn.Parameter(torch.ones(rows, shape.d_model)),
        )

    def mix(self, i: int, sources: list[Tensor]) -> Tensor:
        values_SBTD = torch.stack(sources)
        keys_SBTD = F.rms_norm(values_SBTD, values_SBTD.shape[-1:], self.gains[i], 1e-6)
        weights_SBT = torch.einsum("sbtd,d->sbt", keys_SBTD, self.queries[i]).softmax(0)
        return torch.einsum("sbt,sbtd->btd", weights_SBT, values_SBTD)

    def stream(self, x_BTD: Tensor, branches: list[Callable[[Tensor], Tensor]]) -> Tensor:
        sources = [x_BTD]
        for i, branch in enumerate(branches):
            sources.append(branch(x_BTD if i == 0 else self.mix(i, sources)))
        return self.mix(len(branches), sources)


def training(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """One step of training, always on the same batch."""
    tokens_BT = torch.randint(0, VOCABULARY, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    inputs_BT, targets_N = tokens_BT[:, :-1], tokens_BT[:, 1:].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if isinstance(model, Model | Wrapped):
        logits = model.logits
    else:

        def logits(tokens_BT: Tensor) -> Tensor:
            return model(input_ids=tokens_BT, use_cache=False).logits

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits_BTV = logits(inputs_BT)
        F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_N).backward()
        optimizer.step()

    return step


PROMPT, STEPS = 64, 32


def our_decoding(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    model = build(shape, topology("pre_ln"), 0).eval()
    tokens_BT = torch.randint(0, VOCABULARY, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches(1, PROMPT + STEPS)

    def run() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for cache in caches:
                cache.length = min(cache.length, PROMPT)
            if caches[0].length < PROMPT:
                model.decode(tokens_BT[:, :PROMPT], caches)
            for t in range(PROMPT, PROMPT + STEPS):
                model.decode(tokens_BT[:, t : t + 1], caches)

    return run


def llama_decoding(shape: Shape, dtype: torch.dtype) -> Callable[[], None]:
    """With its default cache, which grows by one token a step."""
    from transformers import DynamicCache

    model = llama(shape).eval()
    tokens_BT = torch.randint(0, VOCABULARY, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def run() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if cache.get_seq_length() == 0:
                model(input_ids=tokens_BT[:, :PROMPT], cache=cache, use_cache=True)
            else:
                cache.crop(-STEPS)
            for t in range(PROMPT, PROMPT + STEPS):
                out = model(input_ids=tokens_BT[:, t : t + 1], cache=cache, use_cache=True)
                out.logits[:, -1]

    return run


def interleaved(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median process seconds of each side; all take a turn, `repeats` times, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            start = time.process_time()
            run()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: median(found) for name, found in times.items()}


Row = tuple[str, dict[str, Callable[[], None]], float]  # what is compared, our side and the other, the ratio aimed at


def llama_rows(dtype: torch.dtype) -> Iterator[Row]:
    for d, L in ((256, 4), (128, 16), (64, 16)):
        shape = shape_of(d, L)
        ours = training(build(shape, topology("pre_ln"), 0), dtype)
        yield f"train pre_ln / Llama, d {d} L {L}", {"ours": ours, "other": training(llama(shape), dtype)}, 1.1


def streams_rows(dtype: torch.dtype) -> Iterator[Row]:
    for d, L in ((64, 16), (256, 2)):
        shape = shape_of(d, L)
        for name, peer, other in (
            ("hc", "hyper-connections", lambda s: PackageStreams(s, constrained=False)),
            ("mhc", "hyper-connections", lambda s: PackageStreams(s, constrained=True)),
            ("mhc", "DeepSeek-V4's", DeepSeekStreams),
        ):
            ours = training(build(shape, topology(name), 0), dtype)
            sides = {
                "ours": ours,
                "other": training(other(shape), dtype),
                "pre_ln": training(build(shape, topology("pre_ln"), 0), dtype),
            }
            yield f"train {name} / {peer}, d {d} L {L}", sides, 2.0


def attnres_rows(dtype: torch.dtype) -> Iterator[Row]:
    for d in (64, 128):
        shape = shape_of(d, 16)
        ours = training(build(shape, topology("full_attnres"), 0), dtype)
        yield (
            f"train full_attnres / stacked, d {d} L 16",
            {
                "ours": ours,
                "other": training(StackedAttnRes(shape), dtype),
            },
            2.0,
        )


def decode_rows(dtype: torch.dtype) -> Iterator[Row]:
    shape = shape_of(128, 16)
    sides = {"ours": our_decoding(shape, dtype), "other": llama_decoding(shape, dtype)}
    yield "decode pre_ln / Llama, d 128 L 16", sides, 2.0


ROWS = {"llama": llama_rows, "streams": streams_rows, "attnres": attnres_rows, "decode": decode_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of process time, one thread.")
    parser.add_argument("--only", nargs="+", choices=[*ROWS, "cost"], default=[*ROWS, "cost"])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.dtypes:
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        print(f"| {name}: times as fast as | ours ms | other ms | ratio | goal |\n|---|---|---|---|---|")
        for what, sides, goal in (row for key in args.only if key in ROWS for row in ROWS[key](dtype)):
            found = interleaved(sides, args.repeats)
            ratio = found["other"] / found["ours"]
            met = "met" if ratio >= goal else "missed"
            if "pre_ln" in found:
                own = (found["other"] - found["pre_ln"]) / (found["ours"] - found["pre_ln"])
                what += f" (beyond pre_ln's {1e3 * found['pre_ln']:.0f} ms: {own:.1f})"
            print(
                f"| {what} | {1e3 * found['ours']:.0f} | {1e3 * found['other']:.0f} | {ratio:.2f} | {goal:.1f} {met} |",
                flush=True,
            )
        if "cost" in args.only:
            shape = shape_of(256, 8)
            found = interleaved({t: training(build(shape, topology(t), 0), dtype) for t in SINGLE}, args.repeats)
            print(f"\n| {name}: cost of training, d 256 L 8 | ms | x pre_ln | aim |\n|---|---|---|---|")
            for t, seconds in found.items():
                ratio = seconds / found["pre_ln"]
                aim = f"{AIMS[t]:.1f} {'met' if ratio <= AIMS[t] else 'missed'}" if t in AIMS else ""
                print(f"| {t} | {1e3 * seconds:.0f} | {ratio:.2f} | {aim} |")
        print(flush=True)


if __name__ == "__main__":
    main()
