"""Draw the pictures of the documentation: `python docs/make_images.py` writes docs/images/*.svg
through the public API.
"""

from __future__ import annotations

from pathlib import Path

import jaxpipe as jp
from jaxpipe.render import to_svg

IMAGES = Path(__file__).parent / "images"
# File -> schedule, devices, microbatches, slices.  All at forward = input gradient = weight
# gradient = 1.
SCHEDULES = {
    "1f1b_4x8.svg": ("1f1b", 4, 8, 1),
    "interleaved_4x8x2.svg": ("interleaved_1f1b", 4, 8, 1),
    "zbv_4x8.svg": ("zbv", 4, 8, 1),
    "dualpipe_8x20.svg": ("dualpipe", 8, 20, 1),
    "slices_4x12x4.svg": ("1f1b", 4, 12, 4),
}


def pictures() -> dict[str, str]:
    """File name -> SVG text of every picture."""
    found = {}
    for file, (schedule, devices, microbatches, slices) in SCHEDULES.items():
        table = jp.schedules.build(
            schedule, devices=devices, microbatches=microbatches, slices=slices
        )
        found[file] = to_svg(jp.simulate(table, jp.Costs())) + "\n"
    return found


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(exist_ok=True)
    for file, text in pictures().items():
        (IMAGES / file).write_text(text, encoding="utf-8")
        print(f"wrote {IMAGES / file}")


if __name__ == "__main__":
    main()
