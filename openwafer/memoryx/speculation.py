"""Updates before it is known whether the step will be clipped: into spare memory, and taken over or dropped later.

The new state of a Unit goes to spare arrays, so nothing has to be undone: a guess that was right is swapped in, and
the old arrays are the next spare. What a clipped step costs is the guesses that are made again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from openwafer.errors import UserError
from openwafer.graph import Unit
from openwafer.memoryx.halves import Item, can_go_elsewhere, update_halves
from openwafer.memoryx.store import Store
from openwafer.memoryx.tier import DramTier, Key
from openwafer.memoryx.update import UpdateNumbers
from openwafer.memoryx.wire import REMAINDER, WIRE

# The most that spare arrays take: with 12 bytes of state and 2 of gradients, 24 bytes per parameter in all.
SPARE_BYTES_PER_PARAMETER = 9.5

Shape = tuple[tuple[str, int], ...]  # fields and lengths of a Unit's arrays


@dataclass(eq=False)
class Guess:
    """The state of a Unit as it is if the guess is right."""

    unit: Unit
    arrays: dict[Key, Tensor]
    is_finite: bool


class Speculation:
    """Spare arrays of a store whose fields all stay in DRAM. For one thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.limit_bytes = spare_bytes(store)
        self.num_bytes = 0
        self._spares: dict[Shape, list[dict[str, Tensor]]] = {}

    def has_room(self, unit: Unit) -> bool:
        """Whether a guess about this Unit can be made now."""
        shape = self._shape(unit)
        return bool(self._spares.get(shape)) or self.num_bytes + self._size(unit) <= self.limit_bytes

    def update(self, unit: Unit, gradients: Mapping[str, Tensor], numbers: UpdateNumbers) -> Guess:
        """What `Store.update` would make of the Unit; nothing is changed."""
        assert self.has_room(unit)
        own = self.store.arrays(unit)
        arrays = self._take(unit)
        olds, news = [], []
        for name in gradients:
            parts = self.store.segments[name]
            old = {field: segment.of(own[segment.key]) for field, segment in parts.items()}
            new = {field: segment.of(arrays[segment.key]) for field, segment in parts.items()}
            for items, views in ((olds, old), (news, new)):
                wire, remainder = views.pop(WIRE), views.pop(REMAINDER)
                items.append(Item(name, wire, remainder, gradients[name], views))
        untouched = [weight.name for weight in self.store.graph.owned(unit) if weight.name not in gradients]
        for name in untouched:  # frozen, or without a gradient in this step
            for segment in self.store.segments[name].values():
                segment.of(arrays[segment.key]).copy_(segment.of(own[segment.key]))
        try:
            update_halves(self.store.optimizer, olds, numbers, to=news)
        except UserError:
            return Guess(unit, arrays, is_finite=False)
        return Guess(unit, arrays, is_finite=True)

    def commit(self, guess: Guess) -> bool:
        """The guess was right: take it over. False: it cannot be, and was dropped; make the update itself."""
        if not guess.is_finite:
            self.drop(guess)
            return False
        self._put(guess.unit, self.store.swap(guess.arrays))
        return True

    def drop(self, guess: Guess) -> None:
        self._put(guess.unit, guess.arrays)

    def _take(self, unit: Unit) -> dict[Key, Tensor]:
        spares = self._spares.get(self._shape(unit))
        if spares:
            return {(unit.index, field): array for field, array in spares.pop().items()}
        self.num_bytes += self._size(unit)
        return self.store.like(unit)

    def _put(self, unit: Unit, arrays: Mapping[Key, Tensor]) -> None:
        self._spares.setdefault(self._shape(unit), []).append({key[1]: array for key, array in arrays.items()})

    def _shape(self, unit: Unit) -> Shape:
        return tuple((key[1], array.numel()) for key, array in self.store.arrays(unit).items())

    def _size(self, unit: Unit) -> int:
        return sum(array.nbytes for array in self.store.arrays(unit).values())


def can_speculate(store: Store) -> bool:
    """Whether updates of this store can go to other arrays than they come from."""
    in_dram = all(isinstance(tier, DramTier) for tier in store.tiers)
    has_limit = store.optimizer.config.max_grad_value is not None
    return in_dram and store.wire == "bf16" and not has_limit and can_go_elsewhere(store.optimizer)


def spare_bytes(store: Store) -> int:
    """The most that a speculation takes."""
    return int(SPARE_BYTES_PER_PARAMETER * store.graph.num_parameters)
