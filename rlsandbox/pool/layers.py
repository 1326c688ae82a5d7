"""Which layers exist, who stands on them, and which may go: least recently used first, under a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from .model import Layer


class LayerStore:
    """Sealed layers of a pool by name.

    A layer goes only when no member stands on it, no other layer lies on top of it and nobody pinned it.
    """

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.bytes = 0
        self.doomed: set[str] = set()
        # Apart from the layers: a member is on its way to a layer before it has been sealed.
        self._standing: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        """What layers measured, evicted ones too."""
        self._layers: OrderedDict[str, Layer] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        layer = self._layers.get(name)  # type: ignore[call-overload]
        return layer is not None and not layer.doomed

    def __len__(self) -> int:
        return len(self._layers)

    def get(self, name: str) -> Layer | None:
        return self._layers.get(name)

    def names(self) -> list[str]:
        return list(self._layers)

    def add(
        self, name: str, spec: str, size: int, now: float, *, pinned: bool = False, parent: str | None = None
    ) -> Layer:
        self._sizes[name] = size
        layer = self._layers.get(name)
        if layer is not None:
            self.bytes += size - layer.bytes
            layer.bytes, layer.used, layer.doomed = size, now, False
            self.doomed.discard(name)
            layer.pinned = layer.pinned or pinned
            self._layers.move_to_end(name)
            return layer
        layer = Layer(name, spec, size, now, pinned, parent)
        if parent is not None and parent in self._layers:
            self._layers[parent].children += 1
        self._layers[name] = layer
        self.bytes += size
        return layer

    def stand(self, name: str | None, count: int) -> None:
        """*count* more (or fewer) members stand on the layer or are on their way to it."""
        if name is not None:
            self._standing[name] = self._standing.get(name, 0) + count
            if not self._standing[name]:
                del self._standing[name]

    def standing(self, name: str) -> int:
        return self._standing.get(name, 0)

    def touch(self, name: str | None, now: float) -> None:
        if name is not None and (layer := self._layers.get(name)) is not None:
            layer.used = now
            self._layers.move_to_end(name)

    def doom(self, layer: Layer) -> None:
        """It goes as soon as nothing needs it in place, budget or not."""
        layer.pinned, layer.doomed = False, True
        self.doomed.add(layer.name)

    def remove(self, name: str) -> Layer:
        layer = self._layers.pop(name)
        self.doomed.discard(name)
        self.bytes -= layer.bytes
        if layer.parent is not None and (parent := self._layers.get(layer.parent)) is not None:
            parent.children -= 1
        return layer

    @property
    def over(self) -> bool:
        return self.budget is not None and self.bytes > self.budget

    def free(self, layer: Layer) -> bool:
        """Whether nothing needs it in place any more."""
        return layer.name not in self._standing and layer.children <= 0 and not layer.pinned

    def evictable(self, keep: Callable[[Layer], bool]) -> Layer | None:
        """The least recently used layer that may go and is not to be kept."""
        for layer in self._layers.values():
            if self.free(layer) and not keep(layer):
                return layer
        return None

    def fits(self, name: str, keep: Callable[[Layer], bool]) -> bool:
        """Whether *name* can be made without evicting a layer that is to be kept."""
        if self.budget is None:
            return True
        size = self._sizes.get(name)
        if size is None:
            size = self.bytes // len(self._layers) if self._layers else 0
        spare = 0
        if self.bytes + size > self.budget:
            spare = sum(y.bytes for y in self._layers.values() if self.free(y) and not keep(y))
        return self.bytes + size - spare <= self.budget

    def gone(self) -> list[Layer]:
        """Doomed layers that nothing needs in place any more."""
        layers = [self._layers[name] for name in self.doomed]
        return [layer for layer in layers if self.free(layer)]
