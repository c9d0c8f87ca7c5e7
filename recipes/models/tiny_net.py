"""The tiny model's forward pass for training, with the parameter names of a Hugging Face Llama."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 432
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 5000.0
    norm_eps: float = 1e-5
    max_position: int = 512


CONFIG = Config()


def _matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, CONFIG.norm_eps)


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        small = (2 * c.num_layers) ** -0.5
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q = _matrix(c.num_heads * c.head_dim, c.hidden_size)
        self.k = _matrix(c.num_kv_heads * c.head_dim, c.hidden_size)
        self.v = _matrix(c.num_kv_heads * c.head_dim, c.hidden_size)
        self.o = _matrix(c.hidden_size, c.num_heads * c.head_dim, small)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate = _matrix(c.intermediate_size, c.hidden_size)
        self.up = _matrix(c.intermediate_size, c.hidden_size)
        self.down = _matrix(c.hidden_size, c.intermediate_size, small)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        qkv = F.linear(_norm(x, self.input_norm), torch.cat([self.q, self.k, self.v]))
        heads = qkv.view(rows, length, -1, CONFIG.head_dim).transpose(1, 2)
        turned, value = heads.split([CONFIG.num_heads + CONFIG.num_kv_heads, CONFIG.num_kv_heads], dim=1)
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        query, key = turned.split([CONFIG.num_heads, CONFIG.num_kv_heads], dim=1)
        group = CONFIG.num_heads // CONFIG.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.o)
        gate, up = F.linear(_norm(x, self.mlp_norm), torch.cat([self.gate, self.up])).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(CONFIG.vocab_size, CONFIG.hidden_size) * 0.05)
        self.layers = nn.ModuleList(Layer(CONFIG) for _ in range(CONFIG.num_layers))
        self.norm = nn.Parameter(torch.ones(CONFIG.hidden_size))

    def forward(self, tokens: Tensor, owners: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Returns logits [rows, length, vocab], or [chosen tokens, vocab] if `chosen`, a bool mask, is
        passed. owners: int [rows, length], the index of the conversation to which each token belongs; tokens
        attend only to their own conversation.
        """
        length = tokens.shape[1]
        half = CONFIG.head_dim // 2
        speed = CONFIG.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * speed
        mask = (owners[:, :, None] == owners[:, None, :]) & torch.ones(
            length, length, dtype=torch.bool
        ).tril()
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), mask[:, None])
        x = _norm(x if chosen is None else x[chosen], self.norm)
        return F.linear(x, self.embed)

    def named_weights(self) -> dict[str, Tensor]:
        """Returns name in a Hugging Face Llama checkpoint -> tensor."""
        names = {
            "input_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
            "v": "self_attn.v_proj", "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
            "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        }  # fmt: skip
        by_name = {"model.embed_tokens.weight": self.embed.detach(), "model.norm.weight": self.norm.detach()}
        for i, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                by_name[f"model.layers.{i}.{names[name]}.weight"] = parameter.detach()
        return by_name
