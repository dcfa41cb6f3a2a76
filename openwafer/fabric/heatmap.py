"""A picture of the wafer: how busy each PE or router was. An SVG has cells to point at, a PNG has every PE."""

import struct
import zlib

import numpy as np

MAX_CELLS = 200  # along the longer side of an SVG
CELL = 4  # pixels
MIN_PNG_SIDE = 600  # pixels along the longer side, so that few PEs are not a stamp
SUFFIXES = (".svg", ".png")


def heat_map(values: np.ndarray, title: str, suffix: str) -> bytes:
    """The file for values [height, width] of PEs; dark is zero, bright the largest."""
    assert suffix in SUFFIXES, suffix
    return svg(values, title).encode() if suffix == ".svg" else png(values, title)


def svg(values: np.ndarray, title: str) -> str:
    """At most about 200 x 200 cells, each the mean of the PEs it covers."""
    block = max(1, -(-max(values.shape) // MAX_CELLS))
    height, width = (-(-size // block) for size in values.shape)
    rows = np.arange(values.shape[0]) // block
    columns = np.arange(values.shape[1]) // block
    sums, counts = np.zeros((height, width)), np.zeros((height, width))
    np.add.at(sums, (rows[:, None], columns[None, :]), values)
    np.add.at(counts, (rows[:, None], columns[None, :]), 1)
    means = sums / counts
    top = float(means.max()) or 1.0
    fills = _colours(means / top)
    square = f'width="{CELL}" height="{CELL}"'
    cells = [
        f'<rect x="{x * CELL}" y="{y * CELL + 20}" {square} fill="#{fills[y, x].tobytes().hex()}">'
        f"<title>PE ({x * block}, {y * block}): {means[y, x]:.4g}</title></rect>"
        for y in range(height)
        for x in range(width)
    ]
    size = f'width="{max(width * CELL, 240)}" height="{height * CELL + 24}"'
    text = f'<text x="2" y="14" font-family="sans-serif" font-size="12">{title}, at most {top:.4g}</text>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', text, *cells, "</svg>\n"])


def png(values: np.ndarray, title: str) -> bytes:
    """One square of pixels per PE, none averaged; the title is in the file's metadata."""
    top = float(values.max()) or 1.0
    side = max(1, MIN_PNG_SIDE // max(values.shape))
    pixels = _colours(values / top).repeat(side, axis=0).repeat(side, axis=1)
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    text = f"Title\0{title}, at most {top:.4g}".encode("latin-1", "replace")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green and blue
    chunks = [(b"IHDR", header), (b"tEXt", text), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _colours(share: np.ndarray) -> np.ndarray:
    """From dark blue over red to yellow: uint8 [..., 3]."""
    channels = (40 + 430 * share, 255 * (2 * share - 1), 90 - 180 * share)
    return np.stack([np.clip(np.rint(channel), 0, 255) for channel in channels], axis=-1).astype(np.uint8)
