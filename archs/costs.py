"""Exact accounting of one model, or of a lattice of models: parameters, FLOPs, cache and weight traffic. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Topology


@dataclass(frozen=True)
class Costs:
    """What a topology costs at a shape. All results are exact whole numbers (or int64 arrays over a lattice).

    FLOPs count a multiply-add as two and cover the matrices, the causal half of the attention scores (each token
    attends to itself and all before it) and the topology's own mixing; norms and other element-wise work are not
    counted. Attention of one token over c keys costs 4 c d a layer: scores and values.
    """

    topology: Topology
    shape: Shape

    @property
    def label(self) -> str:
        return self.topology.label

    @property
    def n_layers(self) -> Count:
        return self.shape.n_layers

    @property
    def d_model(self) -> Count:
        return self.shape.d_model

    @property
    def n_heads(self) -> Count:
        return self.shape.n_heads

    @property
    def n_sublayers(self) -> Count:
        return 2 * self.shape.n_layers

    @property
    def depth_reads(self) -> Count:
        """Sources over depth that all mixes of one pass read together; 0 where a stream carries everything."""
        return self.topology.depth_reads(self.shape)

    @property
    def backbone_params(self) -> Count:
        """N of the laws: all parameters but embedding and head."""
        return self.shape.plain_params + self.topology.extra_params(self.shape)

    @property
    def params(self) -> Count:
        """Total: backbone, embedding and head."""
        return self.backbone_params + self.shape.embedding_params

    @property
    def decode_params(self) -> Count:
        """Weights that one decode step must read: all but the embedding table, of which it reads one row a sequence."""
        return self.params - self.shape.vocab_size * self.shape.d_model

    def kv_elements(self, context: int) -> Count:
        """Elements of the KV cache of one sequence of `context` tokens: 2 T L d_kv."""
        return 2 * context * self.shape.n_layers * self.shape.d_kv

    def state_elements(self, batch: int = 1) -> Count:
        """Elements that the state over depth holds while one token of each of `batch` sequences passes."""
        return batch * self.topology.state_width(self.shape)

    def forward_flops_per_token(self, seq_len: int, head: bool) -> Count:
        """Mean over the tokens of one causal sequence; with `head`, logits for every token.

        Exact: token t attends to t keys, so a sequence costs 2 T (T + 1) d a layer in scores and values.
        """
        return self._matrix_flops(head) + 2 * (seq_len + 1) * self.shape.n_layers * self.shape.d_model

    def train_flops_per_token(self, seq_len: int) -> Count:
        """Forward and backward, three times the forward pass with the head; recomputation is not counted."""
        return 3 * self.forward_flops_per_token(seq_len, head=True)

    def decode_flops(self, context: int) -> Count:
        """One generated token that attends to `context` keys, its own included; with the head."""
        return self._matrix_flops(head=True) + 4 * context * self.shape.n_layers * self.shape.d_model

    def _matrix_flops(self, head: bool) -> Count:
        s = self.shape
        return 2 * s.branch_params + self.topology.extra_flops(s) + (2 * s.vocab_size * s.d_model if head else 0)
