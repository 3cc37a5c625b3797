"""What this room needs to know of a topology: numbers over a lattice of shapes."""

from __future__ import annotations

from typing import Any, Protocol


class Design(Protocol):
    """One topology over a lattice of m shapes: each count is an int64 array (m,) of exact whole numbers, or one number.

    label: the topology's name, as in the law. backbone_params: N, without embedding and head. params: all.
    decode_params: weights that one decode step reads (not the input embedding). n_sublayers: branches in sequence.
    depth_reads: sources over depth that all mixes of one pass read together; 0 where a stream carries everything.
    """

    @property
    def label(self) -> str: ...
    @property
    def n_layers(self) -> Any: ...
    @property
    def d_model(self) -> Any: ...
    @property
    def n_heads(self) -> Any: ...
    @property
    def n_sublayers(self) -> Any: ...
    @property
    def depth_reads(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def backbone_params(self) -> Any: ...
    @property
    def decode_params(self) -> Any: ...
    def kv_elements(self, context: int) -> Any:
        """Elements of the KV cache of one sequence of `context` tokens."""

    def state_elements(self, batch: int) -> Any:
        """Elements that the state over depth holds at its largest while `batch` tokens pass."""

    def decode_flops(self, context: int) -> Any:
        """FLOPs of one generated token that attends to `context` keys."""

    def forward_flops_per_token(self, seq_len: int, head: bool) -> Any:
        """FLOPs of one forward pass, a token, mean over a sequence; with `head`, logits for every token."""

    def train_flops_per_token(self, seq_len: int) -> Any:
        """FLOPs of forward and backward, a token, at this sequence length."""
