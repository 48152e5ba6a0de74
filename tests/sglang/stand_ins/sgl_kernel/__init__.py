"""What SGLang's scheduler calls of sgl_kernel on a CPU, in PyTorch; there is no wheel of it.

Arguments that are written come where sgl_kernel has them.
"""

from typing import Any

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, first: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    at = 0
    for row, a, b in zip(rows.tolist(), first.tolist(), end.tolist(), strict=True):
        table[row, a:b] = slots[at : at + b - a].to(table.dtype)
        at += b - a


# ---- speculative decoding


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, first: Tensor, end: Tensor, out: Tensor, _: int
) -> None:
    at = 0
    for row, a, b in zip(rows.tolist(), first.tolist(), end.tolist(), strict=True):
        out[at : at + b - a] = table[row, a:b]
        at += b - a


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, out: Tensor, _: int, topk: int, steps: int
) -> None:
    new = topk * steps
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + new, out, 0)


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    children: Tensor,
    siblings: Tensor,
    topk: int,
    steps: int,
    size: int,
    mode: int,
) -> None:
    """Trees of one guess for a token, which are chains."""
    if topk != 1:
        raise NotImplementedError("the stand-in knows chains of drafts only")
    places = torch.arange(size)
    mask.view(-1, size, size).copy_(torch.ones(size, size).tril().bool())
    positions.copy_((lengths[:, None] + places).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    children.copy_(torch.where(places + 1 < size, places + 1, -1).expand_as(children))
    siblings.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    answers = target_predict.flatten().tolist()
    for i in range(len(candidates)):
        index, tokens = retrive_index[i].tolist(), candidates[i].tolist()
        children, siblings = retrive_next_token[i].tolist(), retrive_next_sibling[i].tolist()
        accepted = [index[0]]
        node = children[0]
        while node != -1:
            if tokens[node] == answers[accepted[-1]]:
                predicts[accepted[-1]] = tokens[node]
                accepted.append(index[node])
                node = children[node]
            else:
                node = siblings[node]
        predicts[accepted[-1]] = answers[accepted[-1]]
        accept_index[i, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[i] = len(accepted) - 1


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, out: Tensor, stride: int) -> None:
    last = torch.arange(len(lengths)) * stride + lengths - 1
    out.copy_(tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    chosen = accepted.flatten()
    chosen = chosen[chosen != -1].long()
    out[: len(chosen)] = slots[chosen]


def copy_all_layer_kv_cache_cpu(*_: Any) -> None:
    """Called once at start, with nothing to copy: chains of drafts stay where they are."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
