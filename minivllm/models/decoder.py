"""The decoder of the Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3 from one description.

They differ in little: biases on the query, key and value projections (Qwen2), a norm per head
before the rotation (Qwen3), tied or separate output embeddings. The rest is one stack of attention
and gated MLP around a residual stream, for a flat batch of tokens: rows are tokens of many
requests, and only attention knows which belongs to whom.

Parameters are merged where one product serves several projections; `weight_targets` says where each
tensor of a Hugging Face checkpoint goes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from minivllm.attention.backend import AttentionBackend
from minivllm.config import ModelConfig
from minivllm.layers.attention import Attention
from minivllm.layers.linear import MergedLinear, pack_weight, packed_linear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import RotaryEmbedding, apply_rotary


class DecoderForCausalLM(nn.Module):
    """Token ids in, logits out; built on the default device, in the default dtype.

    Args:
        config: The model's shape.
        backend: How attention is computed.
        max_model_len: Longest sequence, in tokens.
    """

    def __init__(self, config: ModelConfig, backend: AttentionBackend, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Parameter(torch.empty(size), requires_grad=False)
        self.rotary = RotaryEmbedding(config, max_model_len)
        self.layers = nn.ModuleList(
            DecoderLayer(config, backend, f"model.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(size), requires_grad=False)
        self.packed_lm_head: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs the stack.

        Args:
            input_ids: `[num_tokens]`, integers.
            positions: `[num_tokens]`, each token's place in its own sequence.

        Returns:
            Hidden states `[num_tokens, hidden_size]`, normed, ready for `compute_logits`.
        """
        hidden = F.embedding(input_ids, self.embed_tokens)
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`.

        Only rows that a token is sampled from should come here: the product with the vocabulary is
        the largest of a small model.
        """
        if self.packed_lm_head is not None:
            return packed_linear(hidden, self.packed_lm_head, None).float()
        return F.linear(hidden, self.lm_head).float()

    def pack(self) -> None:
        """Reorders all matrices for a CPU; call once, after the weights have been loaded."""
        for module in self.modules():
            if isinstance(module, MergedLinear):
                module.pack()
        self.packed_lm_head = pack_weight(self.lm_head.data)
        if self.lm_head is not self.embed_tokens:  # a tied one is still needed for look-ups
            self.lm_head = nn.Parameter(torch.empty(0), requires_grad=False)

    def attention_layers(self) -> list[Attention]:
        """The attention layers, first layer first."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its Hugging Face name; shapes are the same."""
        targets = {
            "model.embed_tokens.weight": self.embed_tokens.data,
            "model.norm.weight": self.norm.weight.data,
        }
        if self.lm_head is not self.embed_tokens:
            targets["lm_head.weight"] = self.lm_head.data
        for name, layer in self.layers.named_children():
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{name}")
        return targets


class DecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, name: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, backend, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, hidden_size]` to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """The layer's part of the model's `weight_targets`."""
        return {
            f"{prefix}.input_layernorm.weight": self.input_layernorm.weight.data,
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_layernorm.weight.data,
            **self.self_attn.weight_targets(f"{prefix}.self_attn"),
            **self.mlp.weight_targets(f"{prefix}.mlp"),
        }


class SelfAttention(nn.Module):
    """Projections, rotation and the way into the paged cache."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, name: str) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size},
            bias=config.attention_bias,
        )
        self.o_proj = MergedLinear(
            config.q_size, {"o_proj": config.hidden_size}, bias=config.attention_out_bias
        )
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(backend, name)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, hidden_size]` to the same shape."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        qkv = self.qkv_proj(hidden).unflatten(-1, (num_heads + 2 * num_kv_heads, self.head_dim))
        query_key, value = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if self.qk_norm:
            query, key = query_key.split([num_heads, num_kv_heads], dim=1)
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        # Queries and keys turn alike, so they turn together.
        query_key = apply_rotary(query_key, cos, sin)
        query, key = query_key.split([num_heads, num_kv_heads], dim=1)
        output = torch.empty(
            (hidden.shape[0], num_heads, self.head_dim), dtype=hidden.dtype, device=hidden.device
        )
        self.attn(query, key, value, output)
        return self.o_proj(output.flatten(1))

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """The attention's part of the model's `weight_targets`."""
        targets = self.qkv_proj.weight_targets(prefix) | self.o_proj.weight_targets(prefix)
        if self.qk_norm:
            targets[f"{prefix}.q_norm.weight"] = self.q_norm.weight.data
            targets[f"{prefix}.k_norm.weight"] = self.k_norm.weight.data
        return targets


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias
        )
        self.down_proj = MergedLinear(size, {"down_proj": config.hidden_size}, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, hidden_size]` to the same shape."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """The MLP's part of the model's `weight_targets`."""
        return self.gate_up_proj.weight_targets(prefix) | self.down_proj.weight_targets(prefix)
