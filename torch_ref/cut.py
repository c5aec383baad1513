"""Cuts one stage's backward in two: input gradients first, weight gradients later, no matmul done
twice.

The graph of a stage's forward has a spine, the nodes from which an input of the stage can be
reached.  The gradient of the inputs runs along the spine; autograd computes nothing for edges that
leave it.  A spine node with an edge towards a weight (a matmul, say) is where weight work branches
off: the gradient that arrives there is caught by a hook while the inputs' gradient is computed, and
later that node alone is run again, for the weight's edge only.

The zero-bubble schedules need this split (Qi et al. 2023, section 2).
`torch.distributed.pipelining._backward` has the same aim, by another way: there a weight's gradient
may walk the spine again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .models.base import Params


class Uses(Mapping[str, Tensor]):
    """Weights by name; every look-up gives a new leaf that shares the weight's memory, and is
    noted.

    So a weight that is used at several places has a gradient for each place, and each place can be
    cut by itself.
    """

    def __init__(self, weights: Params, *, grad: bool) -> None:
        self._weights = weights
        self._grad = grad
        self.noted: list[tuple[str, Tensor]] = []

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name].detach()
        if not self._grad:
            return weight
        self.noted.append((name, weight.requires_grad_()))
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@dataclass
class _Branch:
    """A spine node with weight work: the gradients that arrive at it, and the uses whose gradients
    start there.
    """

    node: Node
    uses: list[int] = field(default_factory=list)
    arrived: tuple[Tensor | None, ...] = ()


@dataclass
class PendingWeights:
    """Weight work left over by `input_gradients`; `finish` does it, once."""

    names: list[str]
    leaves: list[Tensor]
    early: dict[int, Tensor | None]
    branches: list[_Branch]
    loose: list[int]
    roots: list[Tensor]
    seeds: list[Tensor]

    def finish(self) -> list[tuple[str, Tensor]]:
        """Compute the weights' gradients: (name, gradient) for every use, in the order in which
        they were looked up.
        """
        found: dict[int, Tensor | None] = dict(self.early)
        for branch in self.branches:
            edges = [
                GradientEdge(branch.node, k) for k, g in enumerate(branch.arrived) if g is not None
            ]
            arrived = [g for g in branch.arrived if g is not None]
            if edges:
                found |= self._grad(edges, arrived, branch.uses)
        if self.loose and self.roots:
            found |= self._grad(self.roots, self.seeds, self.loose)
        named = [
            (self.names[use], gradient)
            for use, gradient in sorted(found.items())
            if gradient is not None
        ]
        # Let go of the graph: what W needed is dead now.
        self.branches, self.roots, self.seeds, self.leaves = [], [], [], []
        return named

    def _grad(
        self, outputs: Sequence[Any], seeds: list[Tensor], uses: list[int]
    ) -> dict[int, Tensor | None]:
        wanted = [self.leaves[use] for use in uses]
        return dict(
            zip(uses, torch.autograd.grad(outputs, wanted, seeds, allow_unused=True), strict=True)
        )


def full_backward(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None], inputs: Sequence[Tensor], uses: Uses
) -> tuple[list[Tensor | None], list[tuple[str, Tensor]]]:
    """Input and weight gradients in one pass: (a gradient per input, (name, gradient) per use)."""
    outputs, arriving = _with_gradient(roots, seeds)
    wanted = [x for x in inputs if x.requires_grad]
    leaves = [leaf for _, leaf in uses.noted]
    if not outputs or not wanted + leaves:
        return [None] * len(inputs), []
    found = torch.autograd.grad(outputs, wanted + leaves, arriving, allow_unused=True)
    named = [
        (name, g)
        for (name, _), g in zip(uses.noted, found[len(wanted) :], strict=True)
        if g is not None
    ]
    return _spread(inputs, found[: len(wanted)]), named


def input_gradients(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None], inputs: Sequence[Tensor], uses: Uses
) -> tuple[list[Tensor | None], PendingWeights]:
    """Gradients of the inputs only (None for an input without one), and the weight work that is
    left.

    A look-up of a weight that is used at several spine nodes cannot be cut there without walking
    the spine twice, so its gradient is computed now.
    """
    outputs, arriving = _with_gradient(roots, seeds)
    wanted = [x for x in inputs if x.requires_grad]
    leaves = [leaf for _, leaf in uses.noted]
    branches, loose, shared = _branches(outputs, wanted, leaves)
    found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(shared))
    if outputs and found:
        handles = [branch.node.register_prehook(_catcher(branch)) for branch in branches]
        try:
            targets = wanted + [leaves[use] for use in shared]
            found = torch.autograd.grad(
                outputs, targets, arriving, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
    early = dict(zip(shared, found[len(wanted) :], strict=True))
    names = [name for name, _ in uses.noted]
    kept = list(zip(outputs, arriving, strict=True)) if loose else []
    pending = PendingWeights(
        names, leaves, early, branches, loose, [o for o, _ in kept], [a for _, a in kept]
    )
    return _spread(inputs, found[: len(wanted)]), pending


def _branches(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[_Branch], list[int], list[int]]:
    """Sort the uses: those of one spine node each (by node), those that no spine node leads to,
    those of several.
    """
    starts = [get_gradient_edge(output).node for output in outputs]
    order = _children_first(starts)
    sources = {get_gradient_edge(x).node for x in inputs}
    use_of = {get_gradient_edge(leaf).node: use for use, leaf in enumerate(leaves)}
    spine: set[Node] = set()
    reached: dict[Node, frozenset[int]] = {}  # uses below a node off the spine
    # use -> the spine nodes that lead to it; None stands for the outputs themselves
    led: dict[int, set[Node | None]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        below = frozenset(use for child in children if child not in spine for use in reached[child])
        if node in sources or any(child in spine for child in children):
            spine.add(node)
            for use in below:
                led.setdefault(use, set()).add(node)
        else:
            reached[node] = below | ({use_of[node]} if node in use_of else frozenset())
    for node in starts:
        for use in reached.get(node, ()):
            led.setdefault(use, set()).add(None)
    branches: dict[Node, _Branch] = {}
    loose: list[int] = []
    shared: list[int] = []
    for use, nodes in sorted(led.items()):
        if len(nodes) > 1:
            shared.append(use)
            continue
        (only,) = nodes
        if only is None:
            loose.append(use)
        else:
            branches.setdefault(only, _Branch(only)).uses.append(use)
    return list(branches.values()), loose, shared


def _children_first(starts: Sequence[Node]) -> list[Node]:
    """Every node below the starts, each after all nodes that it leads to."""
    order: list[Node] = []
    entered: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
            continue
        if node in entered:
            continue
        entered.add(node)
        stack.append((node, True))
        stack += [
            (child, False)
            for child, _ in node.next_functions
            if child is not None and child not in entered
        ]
    return order


def _catcher(branch: _Branch) -> Callable[[tuple[Tensor | None, ...]], None]:
    def catch(arrived: tuple[Tensor | None, ...]) -> None:
        branch.arrived = tuple(arrived)

    return catch


def _with_gradient(
    roots: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (root, seed)
        for root, seed in zip(roots, seeds, strict=True)
        if root.requires_grad and seed is not None
    ]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def _spread(inputs: Sequence[Tensor], found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the inputs that want one, None for the others."""
    left = iter(found)
    return [next(left) if x.requires_grad else None for x in inputs]
