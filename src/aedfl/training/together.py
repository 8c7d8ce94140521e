"""What the GPU's kernels of a network do in one go, found in its trace: layers with those that follow them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from .traced import Layers, halves, in_place, is_line_max, is_relu, layer_of, name_of, only_user, plain, slides

COLOURS = 4
"""Most channels of an image that is not made by a network."""


class Together:
    """Which node of a graph does the work of which others, where kernels are used."""

    def __init__(self, nodes: list[fx.Node], layers: Layers, side_by_side: bool = True) -> None:
        self._layers = layers
        relus = [node for node in nodes if is_relu(node, layers)]
        alone = [relu for relu in relus if only_user(relu.all_input_nodes[0]) or not in_place(relu, layers)]
        before = {relu: user for relu in alone if (user := only_user(relu)) and halves(user, layers)}
        after = {relu: node for relu in relus if only_user(node := relu.all_input_nodes[0])}
        self.pools = {*before.values(), *(node for node in after.values() if halves(node, layers))}
        self.norms = {node for node in after.values() if self._is_norm(node)}
        """Poolings and norms that take the ReLU before or after them along."""
        taken = {*before, *(relu for relu, node in after.items() if node in self.pools | self.norms)}
        found = {user: relu for relu in after if (user := only_user(relu)) and is_line_max(user)}
        lines = {most: after[relu] for most, relu in found.items() if slides(after[relu], layers)}
        self.lines = {most: str(conv.target) for most, conv in lines.items()}
        """Maxima over a line, after a ReLU after a convolution, with the name of that: all three are one kernel."""
        taken |= {*lines.values(), *(found[most] for most in lines)}
        convolutions = [node for node in nodes if isinstance(layer_of(node, layers), nn.Conv1d | nn.Conv2d)]
        fit = side_by_side and all(in_sixteens(layer_of(node, layers)) for node in convolutions)
        self.pixels = set(convolutions) if fit else set()
        """Convolutions of images whose channels lie side by side: all there are, or none."""
        self.gated = {node for node in self.pixels if self._opens(node.all_input_nodes[0], after, taken)}
        """Those whose images come out of a ReLU that lets all slopes through."""
        self.rectified = {after[node.all_input_nodes[0]] for node in self.gated}
        """Those with that ReLU in them."""
        self.joins = {add: norm for add in after.values() if self.pixels and (norm := self._joined(add))}
        """Sums, with a ReLU after them, with the norm that takes both along."""
        order = {node: place for place, node in enumerate(nodes)}
        self.relays = {
            node: node.all_input_nodes[0]
            for node in self.pixels - self.gated
            if order[node] < order[_other_user(node, order)] and node.all_input_nodes[0] in order
        }
        """Convolutions with images that one node after them uses, too: they add its slopes to their own."""
        joined = {relu for relu, node in after.items() if node in self.joins}
        self.passed = taken | joined | {*self.joins.values()} | {node.all_input_nodes[0] for node in self.gated}
        """What leaves its work to a node after it, or has left it to one before."""

    def _is_norm(self, node: fx.Node) -> bool:
        layer: Any = layer_of(node, self._layers)
        return type(layer) is nn.GroupNorm and layer.affine

    def _opens(self, relu: fx.Node, after: dict[fx.Node, fx.Node], taken: set[fx.Node]) -> bool:
        """Whether a ReLU stands between two convolutions and serves nobody else."""
        return after.get(relu) in self.pixels and relu not in taken and only_user(relu) is not None

    def _joined(self, add: fx.Node) -> fx.Node | None:
        """The norm whose result is added to something else, and used for nothing else."""
        if name_of(add) != "add" or add.kwargs or len({*add.all_input_nodes}) < 2:
            return None
        return next((node for node in add.all_input_nodes if self._is_norm(node) and only_user(node) is add), None)


def _other_user(node: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """Who else uses what a node reads, or itself if that is nobody, or more than one, or not one of the nodes."""
    users = [user for user in node.all_input_nodes[0].users if user is not node]
    return users[0] if len(users) == 1 and users[0] in order else node


def in_sixteens(layer: Any) -> bool:
    """True for a small kernel over images that makes multiples of 16 channels out of such, or out of a few colours."""
    if not isinstance(layer, nn.Conv2d) or not plain(layer) or max(layer.kernel_size) > 3:
        return False
    return layer.out_channels % 16 == 0 and (layer.in_channels % 16 == 0 or layer.in_channels <= COLOURS)
