"""Pictures of a simulated schedule: SVG, a self-contained HTML page, a trace for Perfetto and
chrome://tracing.
"""

from .html import to_html, to_trace
from .svg import Theme, to_svg

__all__ = ["Theme", "to_html", "to_svg", "to_trace"]

IMPORTS = ("engine", "errors", "table")
