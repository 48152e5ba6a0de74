"""Linear attention by gated delta rules, token by token, in PyTorch.

A state is [value heads, value channels, key channels] in float32, and a convolution's [channels,
its width - 1]; sequence i has those of its index.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """x: [channels, tokens]."""
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for i, index in enumerate(cache_indices.tolist()):
        new = slice(starts[i], starts[i + 1])
        past = conv_states[index] * has_initial_state[i]
        out[:, new] = _convolve(past, x[:, new], weight, bias, activation, conv_states[index])
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """x: [sequences, channels]."""
    out = torch.empty_like(x)
    for i, index in enumerate(conv_state_indices.tolist()):
        state = conv_states[index]
        out[i] = _convolve(state, x[i][:, None], weight, bias, activation, state)[:, 0]
    return out


def _convolve(
    past: Tensor, new: Tensor, weight: Tensor, bias: Tensor | None, activation: str, state: Tensor
) -> Tensor:
    assert activation == "silu"
    seen = torch.cat([past.to(new.dtype), new], 1)
    state.copy_(seen[:, -state.shape[1] :])
    return F.silu(F.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0])


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """q, k: [1, tokens, key heads, channels]; v: likewise; g, beta: [1, tokens, value heads]."""
    heads, starts = v.shape[2], cu_seqlens.tolist()
    q, k = (
        F.normalize(x[0].float(), dim=-1, eps=1e-6).repeat_interleave(heads // x.shape[2], 1)
        for x in (q, k)
    )
    q = q * q.shape[-1] ** -0.5
    decay, rate, values = g[0].float().exp(), beta[0].float(), v[0].float()
    out = torch.empty_like(values)
    for i, index in enumerate(initial_state_indices.tolist()):
        state = initial_state[index].float()
        for t in range(starts[i], starts[i + 1]):
            state = state * decay[t, :, None, None]
            error = values[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", error * rate[t, :, None], k[t])
            out[t] = torch.einsum("hvk,hk->hv", state, q[t])
        initial_state[index] = state.to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def fused_gdn_gating_cpu(
    a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    states, indices = initial_state_source, initial_state_indices
    return chunk_gated_delta_rule_cpu(q, k, v, g, beta, states, cu_seqlens, indices)[0]


for function in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, function.__name__, function)
