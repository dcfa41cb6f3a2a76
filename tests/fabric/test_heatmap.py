"""Heat maps: every PE is in the picture, with the colour of its share; title, scale and numbers can be read."""

import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np

from openwafer.fabric.heatmap import BAR_HEIGHT, BAR_LENGTH, GAP, LINE, MAP_X, MAP_Y, MARGIN, heat_map, png, svg
from openwafer.fabric.letters import HEIGHT, LETTERS, WIDTH

DARK, RED, YELLOW = (40, 0, 90), (255, 0, 0), (255, 255, 0)


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


def read_line(picture: np.ndarray, y: int) -> str:
    """The text whose top is at y, letter by letter as its pixels say; "~" is no letter."""
    ink = (picture[y : y + 2 * HEIGHT : 2, MARGIN::2] == 0).all(axis=2)
    known = {pixels.tobytes(): letter for letter, pixels in LETTERS.items()}
    assert len(known) == len(LETTERS)  # no two look the same
    cells = [ink[:, x : x + WIDTH] for x in range(0, ink.shape[1] - WIDTH + 1, WIDTH)]
    return "".join(known.get(cell.tobytes(), "~") for cell in cells).rstrip()


def test_the_png_has_every_pe_in_its_colour() -> None:
    shares = np.zeros((4, 6))
    shares[1, 2], shares[3, 5] = 0.8, 0.4
    picture, text = decode(png(shares, "busy"))
    pixels = picture[MAP_Y + 50 : MAP_Y + 400 : 100, MAP_X + 50 : MAP_X + 600 : 100]  # the middle of each PE
    assert tuple(pixels[0, 0]) == DARK
    assert tuple(pixels[1, 2]) == YELLOW
    assert tuple(pixels[3, 5]) == RED
    assert text == b"Title\0busy: share of cycles each PE was busy"


def test_the_png_has_a_title_a_colour_bar_and_numbers() -> None:
    shares = np.linspace(0.1, 0.8, 24).reshape(4, 6)
    picture, _ = decode(png(shares, "gemv on wse2, 6 x 4 PEs, 1,290 cycles"))
    assert read_line(picture, MARGIN) == "gemv on wse2, 6 x 4 PEs, 1,290 cycles"
    assert read_line(picture, MARGIN + LINE) == "share of cycles each PE was busy"
    below = MAP_Y + 400 + GAP
    bar = picture[below + BAR_HEIGHT // 2, MARGIN : MARGIN + BAR_LENGTH]
    assert tuple(bar[0]) == DARK
    assert tuple(bar[-1]) == YELLOW
    assert (np.diff(bar.astype(int), axis=0)[:, :2] >= 0).all()  # it only grows brighter
    ticks = read_line(picture, below + BAR_HEIGHT + 4)
    assert ticks.startswith("0 %")
    assert read_line(picture, below + BAR_HEIGHT + 4 + LINE) == "PEs: min 10 %, mean 45 %, max 80 %"


def test_the_svg_has_a_title_a_colour_bar_and_numbers() -> None:
    shares = np.linspace(0.1, 0.8, 24).reshape(4, 6)
    root = ElementTree.fromstring(svg(shares, "a < b"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    numbers = "PEs: min 10 %, mean 45 %, max 80 %"
    assert texts == ["a < b", "share of cycles each PE was busy", "0 %", "40 %", "80 %", numbers]
    stops = [element.get("stop-color") for element in root.iter() if element.tag.endswith("stop")]
    assert (stops[0], stops[16], stops[-1]) == ("#28005a", "#ff0000", "#ffff00")
    cells = [element for element in root.iter() if len(element) and element.tag.endswith("rect")]
    assert cells[-1].get("fill") == "#ffff00"
    assert cells[-1][0].text == "PE (5, 3): 80 %"


def test_a_large_wafer_keeps_one_pixel_per_pe_in_a_png_and_few_cells_in_an_svg() -> None:
    shares = np.random.default_rng(0).random((994, 750))
    shares[17, 33] = 1.0
    picture, _ = decode(heat_map(shares, "whole", ".png"))
    assert tuple(picture[MAP_Y + 17, MAP_X + 33]) == YELLOW
    assert (picture[MAP_Y : MAP_Y + 994, MAP_X : MAP_X + 750] == 255).all(axis=2).sum() == 0
    drawn = heat_map(shares, "whole", ".svg").decode()
    cells = re.findall(r"<title>PE \((\d+), (\d+)\): ([\d.]+) %", drawn)
    assert len(cells) == 150 * 199
    for x, y, percent in cells[::997]:
        assert abs(shares[int(y) : int(y) + 5, int(x) : int(x) + 5].mean() - float(percent) / 100) < 0.001
    assert "mean of 5 x 5 PEs in a cell" in drawn


def test_a_row_of_pes_is_high_enough_to_be_seen() -> None:
    picture, _ = decode(png(np.full((1, 600), 0.5), "row"))
    assert (picture[MAP_Y : MAP_Y + 40, MAP_X : MAP_X + 600] == YELLOW).all()


def test_an_idle_wafer_is_dark() -> None:
    picture, _ = decode(png(np.zeros((3, 3)), "idle"))
    assert (picture[MAP_Y : MAP_Y + 600, MAP_X : MAP_X + 600] == DARK).all()
