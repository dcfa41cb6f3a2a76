"""Heat maps: every PE is in the picture, with the colour of its value."""

import struct
import zlib

import numpy as np

from openwafer.fabric.heatmap import heat_map, png


def decode(data: bytes) -> tuple[np.ndarray, bytes]:
    """Pixels [height, width, 3] and text of a PNG as the standard defines it, with its check sums."""
    assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(data[at + 4 : at + 8 + length]),)
        chunks[kind] = content
        at += 12 + length
    assert [*chunks] == [b"IHDR", b"tEXt", b"IDAT", b"IEND"]
    width, height, depth, colours, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colours, rest) == (8, 2, [0, 0, 0])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3), chunks[b"tEXt"]


def test_the_png_has_every_pe_in_its_colour() -> None:
    values = np.zeros((4, 6))
    values[1, 2], values[3, 5] = 1.0, 0.5
    picture, text = decode(png(values, "busy"))
    assert picture.shape == (400, 600, 3)
    pixels = picture[50::100, 50::100]  # the middle of each PE
    assert tuple(pixels[0, 0]) == (40, 0, 90)
    assert tuple(pixels[1, 2]) == (255, 255, 0)
    assert tuple(pixels[3, 5]) == (255, 0, 0)
    assert text == b"Title\0busy, at most 1"


def test_a_large_wafer_keeps_one_pixel_per_pe_in_a_png_and_few_cells_in_an_svg() -> None:
    values = np.random.default_rng(0).random((994, 750))
    assert decode(heat_map(values, "whole", ".png"))[0].shape == (994, 750, 3)
    assert heat_map(values, "whole", ".svg").count(b"<rect") == 150 * 199


def test_an_idle_wafer_is_dark() -> None:
    assert decode(png(np.zeros((3, 3)), "idle"))[0].reshape(-1, 3).max(axis=0).tolist() == [40, 0, 90]
