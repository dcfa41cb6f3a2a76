"""Stop strings: end a text where one begins, without ever showing a part of it."""


class StopFinder:
    """Passes text on piece by piece. What could be the beginning of a stop string waits for the next piece."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was found: then nothing follows)."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = self._unsafe(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text that waited, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _unsafe(self, text: str) -> int:
        """How many characters at the end could begin a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - size :]) for stop in self._stops):
                return size
        return 0
