"""The definitions, written out in float64 one token and one head at a time: what the reference is tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def l2_normalize(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, HV, V], states [B, HV, V, K]: value-first, S <- S a (I - b k k^T) + b v k^T.

    g is [B, T, HV], or of one decay a channel [B, T, HV, K]: then a is the diagonal matrix of them.
    """
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    batch, tokens, heads, channels = q.shape
    group, identity = v.shape[2] // heads, torch.eye(channels, dtype=torch.float64)
    all_outputs, all_states = [], []
    for b in range(batch):
        for h in range(v.shape[2]):
            key_head = h // group
            state = v.new_zeros(v.shape[3], channels) if states is None else states[b, h].double()
            outputs = []
            for t in range(tokens):
                key, step = k[b, t, key_head], beta[b, t, h]
                decay = 1.0 if g is None else g[b, t, h].double().exp()
                state = (decay * state) @ (identity - step * torch.outer(key, key)) + step * torch.outer(
                    v[b, t, h], key
                )
                outputs.append(scale * (state @ q[b, t, key_head]))
            all_outputs.append(torch.stack(outputs))
            all_states.append(state)
    output = torch.stack(all_outputs).unflatten(0, (batch, -1)).transpose(1, 2)
    return output, torch.stack(all_states).unflatten(0, (batch, -1))


def delta_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule with k, v and beta of n steps a token: S <- a S, n times S <- S (I - b k k^T) + b v k^T.

    q [B, T, H, K], k [B, T n, H, K], v [B, T n, HV, V], g [B, T, HV], states [B, HV, V, K], value-first.
    """
    steps, channels = k.shape[1] // q.shape[1], q.shape[3]
    identity = torch.eye(channels, dtype=torch.float64)
    finals, outputs = [], []
    for b in range(q.shape[0]):
        for h in range(v.shape[2]):
            head, state, rows = h // (v.shape[2] // q.shape[2]), states[b, h], []
            for t in range(q.shape[1]):
                state = g[b, t, h].exp() * state
                for s in range(t * steps, (t + 1) * steps):
                    key, step = k[b, s, head], beta[b, s, h]
                    state = state @ (identity - step * torch.outer(key, key)) + step * torch.outer(v[b, s, h], key)
                rows.append(channels**-0.5 * state @ q[b, t, head])
            finals.append(state)
            outputs.append(torch.stack(rows))
    shape = (q.shape[0], v.shape[2])
    return torch.stack(outputs).unflatten(0, shape).transpose(1, 2), torch.stack(finals).unflatten(0, shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, before: Tensor | None = None) -> Tensor:
    """x [B, T, D], weight [D, W], before [B, W - 1, D]."""
    width = weight.shape[1]
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if before is None else before
    inputs = torch.cat([before, x], dim=1)
    windows = [(inputs[:, t : t + width] * weight.T).sum(1) for t in range(x.shape[1])]
    output = torch.stack(windows, dim=1)
    return output if bias is None else output + bias


def model_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of a fla model with delta-rule layers alone, [B, T, vocabulary], in float64.

    Differentiable: gradients arrive in the parameters of the model.
    """
    config, weights = model.config, {name: tensor.double() for name, tensor in model.named_parameters()}
    mixer = {"gated_deltaproduct": _product_mixer, "kda": _channel_decay_mixer}.get(config.model_type, _mixer)
    hidden = weights["model.embeddings.weight"][tokens]
    for index in range(config.num_hidden_layers):
        layer = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{index}.")}
        hidden = hidden + mixer(config, layer, rms_norm(hidden, layer["attn_norm.weight"], config.norm_eps))
        inner = rms_norm(hidden, layer["mlp_norm.weight"], config.norm_eps)
        gate = F.silu(inner @ layer["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (inner @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embeddings.weight"])
    return rms_norm(hidden, weights["model.norm.weight"], config.norm_eps) @ head.T


def _mixer(config: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    gated = config.model_type == "gated_deltanet"
    activation = "silu" if gated else config.qk_activation
    value_heads = (config.num_v_heads or config.num_heads) if gated else config.num_heads
    q, k, v = (_stream(config, weights, x, name, activation if name in "qk" else "silu") for name in "qkv")
    q, k = (stream.unflatten(-1, (config.num_heads, -1)) for stream in (q, k))
    v = v.unflatten(-1, (value_heads, -1))
    if gated or config.qk_norm == "l2":
        q, k = l2_normalize(q), l2_normalize(k)
    else:
        q, k = q / q.abs().sum(-1, keepdim=True), k / k.abs().sum(-1, keepdim=True)

    if gated or config.use_beta:
        beta = torch.sigmoid(x @ weights["attn.b_proj.weight"].T) * (2 if config.allow_neg_eigval else 1)
    else:
        beta = torch.ones_like(v[..., 0])
    g = None
    if gated:
        raw = x @ weights["attn.a_proj.weight"].T + weights["attn.dt_bias"]
        g = -weights["attn.A_log"].exp() * torch.log1p(raw.exp())
    output, _ = delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5)
    output = rms_norm(output, weights["attn.o_norm.weight"], config.norm_eps)
    if config.use_gate:
        gate = (x @ weights["attn.g_proj.weight"].T).unflatten(-1, (value_heads, -1))
        sigmoid_only = gated and config.output_gate_activation == "sigmoid"
        output = output * torch.sigmoid(gate) * (1 if sigmoid_only else gate)
    return output.flatten(2) @ weights["attn.o_proj.weight"].T


def _product_mixer(config: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (_stream(config, weights, x, name, "silu") for name in "qkv")
    beta = torch.sigmoid(x @ weights["attn.b_proj.weight"].T) * (2 if config.allow_neg_eigval else 1)
    q = q.unflatten(-1, (config.num_heads, -1))
    # The rows of all but q are (step, head, channel); steps come one after the other.
    steps_and_heads = (config.num_householder, config.num_heads)
    k, v = (stream.unflatten(-1, (*steps_and_heads, -1)).flatten(1, 2) for stream in (k, v))
    beta = beta.unflatten(-1, steps_and_heads).flatten(1, 2)
    g = q.new_zeros(q.shape[:3])
    if config.use_forget_gate:
        # The stock layer rounds both factors to float32, in a float64 model too.
        raw = (x @ weights["attn.a_proj.weight"].T).float().double() + weights["attn.dt_bias"]
        g = -weights["attn.A_log"].float().exp().double() * torch.log1p(raw.exp())
    states = q.new_zeros(len(x), config.num_heads, v.shape[-1], q.shape[-1])
    output, _ = delta_product(l2_normalize(q), l2_normalize(k), v, g, beta, states)
    output = rms_norm(output, weights["attn.o_norm.weight"], config.norm_eps)
    if config.use_output_gate:
        output = output * F.silu(x @ weights["attn.g_proj.weight"].T).unflatten(-1, (config.num_heads, -1))
    return output.flatten(2) @ weights["attn.o_proj.weight"].T


def _channel_decay_mixer(config: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    value_heads = config.num_v_heads or config.num_heads
    q, k, v = (_stream(config, weights, x, name, "silu") for name in "qkv")
    q, k = (l2_normalize(stream.unflatten(-1, (config.num_heads, -1))) for stream in (q, k))
    v = v.unflatten(-1, (value_heads, -1))
    beta = torch.sigmoid(x @ weights["attn.b_proj.weight"].T) * (2 if config.allow_neg_eigval else 1)
    raw = x @ weights["attn.f_proj.0.weight"].T @ weights["attn.f_proj.1.weight"].T + weights["attn.dt_bias"]
    raw, rate = raw.unflatten(-1, (value_heads, -1)), weights["attn.A_log"].exp()[:, None]
    bound = config.lower_bound
    g = -rate * torch.log1p(raw.exp()) if bound is None else bound * torch.sigmoid(rate * raw)
    output, _ = delta_rule(q, k, v, g, beta, scale=q.shape[-1] ** -0.5)
    gate = x @ weights["attn.g_proj.0.weight"].T @ weights["attn.g_proj.1.weight"].T + weights["attn.g_proj.1.bias"]
    output = rms_norm(output, weights["attn.o_norm.weight"], config.norm_eps)
    output = output * torch.sigmoid(gate.unflatten(-1, (value_heads, -1)))
    return output.flatten(2) @ weights["attn.o_proj.weight"].T


def _stream(config: Any, weights: dict[str, Tensor], x: Tensor, name: str, activation: str) -> Tensor:
    projected = x @ weights[f"attn.{name}_proj.weight"].T
    if config.use_short_conv:
        projected = convolve(projected, weights[f"attn.{name}_conv1d.weight"][:, 0])
    if activation == "silu":
        return projected * torch.sigmoid(projected)
    if activation == "elu":
        return torch.where(projected >= 0, projected + 1, projected.exp())
    return projected.relu() if activation == "relu" else projected
