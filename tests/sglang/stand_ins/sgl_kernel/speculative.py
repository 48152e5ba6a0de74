"""Of trees of drafts by n-grams."""

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    children: Tensor,
    siblings: Tensor,
    sequences: int,
    size: int,
) -> None:
    """Parents, children and places of the nodes; mask: which nodes a node sees."""
    trees = mask.view(sequences, size, size).tolist()
    for i, tree in enumerate(trees):
        parents = [max((j for j in range(n) if row[j]), default=-1) for n, row in enumerate(tree)]
        for n, row in enumerate(tree):
            below = [c for c in range(size) if parents[c] == n]
            beside = [c for c in range(n + 1, size) if n and parents[c] == parents[n]]
            positions[i * size + n] = int(lengths[i]) + sum(map(bool, row)) - 1
            index[i, n] = i * size + n
            children[i, n] = below[0] if below else -1
            siblings[i, n] = beside[0] if beside else -1
