"""Tables as text, good and wrong."""

from __future__ import annotations

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
DUPLICATE = GOOD.replace("0B1", "0B0")
# Device 0 wants 1B0 before it sends microbatch 1, device 1 wants microbatch 1 before it runs 1B0.
DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"


def table(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path
