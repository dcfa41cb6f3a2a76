"""A picture of the wafer: how busy each PE was. An SVG has cells to point at, a PNG has every PE.

From the top: title, what is shown, the map, a colour bar from zero to the largest, the numbers.
"""

import struct
import zlib
from html import escape

import numpy as np

from openwafer.fabric.letters import HEIGHT, WIDTH, written

SUFFIXES = (".svg", ".png")
SHOWN = "share of cycles each PE was busy"
MAX_CELLS = 200  # along the longer side of an SVG
MIN_CELL = 4  # pixels of an SVG, so that one can point at it
LONG_SIDE, SHORT_SIDE = 600, 40  # pixels that a map has at least: few PEs are no stamp, a row of PEs is no hair
MARGIN, GAP, LINE = 12, 8, 22  # pixels: around everything, between map, bar and text, from line to line
MAP_X, MAP_Y = MARGIN, MARGIN + 2 * LINE + GAP
BAR_LENGTH, BAR_HEIGHT = 400, 14
TEXT_SCALE = 2  # pixels to a pixel of a letter


def heat_map(shares: np.ndarray, title: str, suffix: str) -> bytes:
    """The file for shares [height, width] of PEs, from 0 to 1; dark is zero, bright the largest."""
    assert suffix in SUFFIXES, suffix
    return svg(shares, title).encode() if suffix == ".svg" else png(shares, title)


def svg(shares: np.ndarray, title: str) -> str:
    """At most about 200 x 200 cells, each the mean of the PEs it covers."""
    block = max(1, -(-max(shares.shape) // MAX_CELLS))
    means = _block_means(shares, block)
    wide, high = _cell(means.shape, MIN_CELL)
    fills = _colours(means / _top(means))
    cells = [
        f'<rect x="{MAP_X + x * wide}" y="{MAP_Y + y * high}" width="{wide}" height="{high}" '
        f'fill="#{fills[y, x].tobytes().hex()}">'
        f"<title>PE ({x * block}, {y * block}): {_percent(float(means[y, x]))}</title></rect>"
        for y, x in np.ndindex(means.shape)
    ]
    shown = SHOWN if block == 1 else f"{SHOWN}, mean of {block} x {block} PEs in a cell"
    below = MAP_Y + means.shape[0] * high + GAP
    stops = [
        f'<stop offset="{share}" stop-color="#{_colours(np.array(share)).tobytes().hex()}"/>'
        for share in np.linspace(0, 1, 33).tolist()
    ]
    bar = f'<rect x="{MARGIN}" y="{below}" width="{BAR_LENGTH}" height="{BAR_HEIGHT}" fill="url(#scale)"/>'
    texts = [(MARGIN, MARGIN, title), (MARGIN, MARGIN + LINE, shown), *_legend(shares, means, below)]
    width = 2 * MARGIN + max(means.shape[1] * wide, BAR_LENGTH + 60, 8 * max(len(title), len(shown)))
    size = f'width="{width}" height="{below + BAR_HEIGHT + 2 * LINE + MARGIN}"'
    style = 'style="background:#fff" font-family="sans-serif" font-size="14"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>']
        + ['<defs><linearGradient id="scale">', *stops, "</linearGradient></defs>", bar]
        + [f'<text x="{x}" y="{y + 14}">{escape(text)}</text>' for x, y, text in texts]
        + [*cells, "</svg>\n"]
    )


def png(shares: np.ndarray, title: str) -> bytes:
    """One rectangle of pixels per PE, none averaged; the title is in the file's metadata too."""
    wide, high = _cell(shares.shape, 1)
    pixels = _colours(shares / _top(shares)).repeat(high, axis=0).repeat(wide, axis=1)
    below = MAP_Y + len(pixels) + GAP
    texts = [(MARGIN, MARGIN, title), (MARGIN, MARGIN + LINE, SHOWN), *_legend(shares, shares, below)]
    letter = WIDTH * TEXT_SCALE
    width = MARGIN + max(MAP_X + pixels.shape[1], *(x + len(text) * letter for x, _, text in texts))
    page = np.full((below + BAR_HEIGHT + 2 * LINE + MARGIN, width, 3), 255, np.uint8)
    page[MAP_Y : MAP_Y + len(pixels), MAP_X : MAP_X + pixels.shape[1]] = pixels
    page[below : below + BAR_HEIGHT, MARGIN : MARGIN + BAR_LENGTH] = _colours(np.linspace(0, 1, BAR_LENGTH))
    for x, y, text in texts:
        page[y : y + HEIGHT * TEXT_SCALE, x : x + len(text) * letter][written(text, TEXT_SCALE)] = 0
    return _png_file(page, f"{title}: {SHOWN}")


def _legend(shares: np.ndarray, drawn: np.ndarray, below: int) -> list[tuple[int, int, str]]:
    """Texts under the bar, whose top is at `below`, with their x and y: what its colours mean, and of all PEs."""
    top, y = _top(drawn), below + BAR_HEIGHT + 4
    ticks = [(MARGIN + round(part * BAR_LENGTH), y, _percent(part * top)) for part in (0, 0.5, 1)]
    least, mean, most = (_percent(float(value)) for value in (shares.min(), shares.mean(), shares.max()))
    return [*ticks, (MARGIN, y + LINE, f"PEs: min {least}, mean {mean}, max {most}")]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _top(shares: np.ndarray) -> float:
    """What is brightest."""
    return float(shares.max()) or 1.0


def _cell(shape: tuple[int, ...], least: int) -> tuple[int, int]:
    """Pixels of a cell from west to east and from north to south: square, but for a row or a column of PEs."""
    side = max(least, LONG_SIDE // max(shape))
    high, wide = (max(side, SHORT_SIDE // count) for count in shape)
    return wide, high


def _block_means(shares: np.ndarray, block: int) -> np.ndarray:
    rows, columns = (np.arange(0, size, block) for size in shares.shape)
    sums = np.add.reduceat(np.add.reduceat(shares, rows, axis=0), columns, axis=1)
    heights, widths = (np.diff([*starts, size]) for starts, size in zip((rows, columns), shares.shape, strict=True))
    return sums / np.outer(heights, widths)


def _png_file(page: np.ndarray, title: str) -> bytes:
    """Pixels uint8 [height, width, 3] as a file."""
    height, width, _ = page.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = page.reshape(height, -1)
    text = f"Title\0{title}".encode("latin-1", "replace")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = [(b"IHDR", header), (b"tEXt", text), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _colours(share: np.ndarray) -> np.ndarray:
    """From dark blue over red to yellow: uint8 [..., 3]."""
    channels = (40 + 430 * share, 255 * (2 * share - 1), 90 - 180 * share)
    return np.stack([np.clip(np.rint(channel), 0, 255) for channel in channels], axis=-1).astype(np.uint8)
