"""The report as one self-contained HTML page."""

from __future__ import annotations

from html import escape

from .findings import Verdict
from .run import Report

_COLORS = {
    Verdict.OK: "#2e7d32",
    Verdict.SLOW: "#b26a00",
    Verdict.WRONG: "#c62828",
    Verdict.NOT_TRIED: "#757575",
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .4em .8em; border-bottom: 1px solid #8884 }
b { white-space: nowrap }
"""


def to_page(report: Report) -> str:
    """A table with a row for each line, and the measured prices.

    >>> to_page(Report(()))[:15]
    '<!DOCTYPE html>'
    """
    counts = {v: sum(line.verdict is v for line in report.lines) for v in Verdict}
    head = ", ".join(f"{number} {verdict.value}" for verdict, number in counts.items() if number)
    rows = "".join(
        f"<tr><td>{escape(line.item)}</td>"
        f'<td><b style="color:{_COLORS[line.verdict]}">{line.verdict.value}</b></td>'
        f"<td>{escape(line.measured)}</td><td>{escape(line.expected)}</td>"
        f"<td>{escape(line.advice)}</td></tr>\n"
        for line in report.lines
    )
    prices = "".join(
        f"<li>{escape(name)}: {seconds * 1e6:.3g} us</li>"
        for name, seconds in report.prices.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>jaxpipe doctor</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>jaxpipe doctor: {escape(report.kind or 'no device')}</h1><p>{head}</p>\n"
        "<table><tr><th>item</th><th>verdict</th><th>measured</th><th>expected</th>"
        f"<th>what to do</th></tr>\n{rows}</table>\n"
        + (f"<h2>Measured prices</h2><ul>{prices}</ul>\n" if prices else "")
        + "</body></html>\n"
    )
