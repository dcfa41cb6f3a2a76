"""Which submodules become Units: the repeated blocks of a model, found from its module tree alone.

Containers (ModuleList, Sequential, ModuleDict) hold the blocks. A container's child is a block, unless it is a
container itself or a one-off wrapper around a deeper stack of repeated layers; then the search goes inside.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Path → module, in definition order; disjoint subtrees of `root`, never `root` itself."""
    blocks = dict(_blocks_inside(root, ""))
    if blocks or not any(True for _ in root.children()):
        return blocks
    # No container anywhere: a hand-written chain of layers. Its direct children are the blocks.
    path, module = "", root
    while len(children := [(n, c) for n, c in module.named_children() if _has_weights(c)]) == 1:
        name, module = children[0]
        path = f"{path}{name}."
        if not any(True for _ in module.children()):
            return {}
    return {f"{path}{name}": child for name, child in children}


def is_heavy(module: nn.Module) -> bool:
    """Whether a module holds a matrix or a convolution: the things worth streaming on their own."""
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def _blocks_inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    in_container = isinstance(module, _CONTAINERS)
    classes = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_container = isinstance(child, _CONTAINERS)
        if in_container and not is_container and (classes[type(child)] > 1 or not _holds_stack(child)):
            yield path, child
        elif is_container or _holds_stack(child) or (not in_container and _holds_container(child)):
            yield from _blocks_inside(child, f"{path}.")


def _holds_stack(module: nn.Module) -> bool:
    """Whether some container below repeats a composite layer: the sign of a stack of blocks."""
    for container in module.modules():
        if isinstance(container, _CONTAINERS):
            classes = Counter(
                type(child)
                for child in container.children()
                if _has_weights(child) and any(True for _ in child.children())
            )
            if classes and max(classes.values()) > 1:
                return True
    return False


def _holds_container(module: nn.Module) -> bool:
    return any(isinstance(child, _CONTAINERS) and len(child) > 0 for child in module.modules())


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
