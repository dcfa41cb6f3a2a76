"""A picture of the wafer: how busy each PE or router was, as an SVG of at most about 200 x 200 cells."""

import numpy as np

MAX_CELLS = 200
CELL = 4  # pixels


def heat_map(values: np.ndarray, title: str) -> str:
    """SVG of values [height, width], each cell the mean of the PEs it covers; dark is zero, bright the largest."""
    block = max(1, -(-max(values.shape) // MAX_CELLS))
    height, width = (-(-size // block) for size in values.shape)
    rows = np.arange(values.shape[0]) // block
    columns = np.arange(values.shape[1]) // block
    sums, counts = np.zeros((height, width)), np.zeros((height, width))
    np.add.at(sums, (rows[:, None], columns[None, :]), values)
    np.add.at(counts, (rows[:, None], columns[None, :]), 1)
    means = sums / counts
    top = float(means.max()) or 1.0
    cells = [
        f'<rect x="{x * CELL}" y="{y * CELL + 20}" width="{CELL}" height="{CELL}" fill="{_colour(means[y, x] / top)}">'
        f"<title>PE ({x * block}, {y * block}): {means[y, x]:.4g}</title></rect>"
        for y in range(height)
        for x in range(width)
    ]
    size = f'width="{max(width * CELL, 240)}" height="{height * CELL + 24}"'
    text = f'<text x="2" y="14" font-family="sans-serif" font-size="12">{title}, at most {top:.4g}</text>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', text, *cells, "</svg>\n"])


def _colour(share: float) -> str:
    """From dark blue over red to yellow."""
    red = min(255, round(40 + 430 * share))
    green = max(0, round(255 * (2 * share - 1)))
    blue = max(0, round(90 - 180 * share))
    return f"#{red:02x}{green:02x}{blue:02x}"
