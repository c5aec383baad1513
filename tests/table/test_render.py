"""Pictures: every action is drawn once, where and as long as the timeline says; the page and the
trace hold the same numbers.
"""

from __future__ import annotations

import json
import re
import runpy
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from golden import check_golden

import jaxpipe as jp
from jaxpipe.render import Theme, to_html, to_svg, to_trace
from jaxpipe.render.chart import BarPart, Chart, bars_of, number, title_of
from jaxpipe.render.svg import COLOURS, DARK, LIGHT, MOST_ELEMENTS, SHADES, ink_on, shade

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name="1f1b", *, devices=4, microbatches=8, costs=None, **options):
    return jp.simulate(
        jp.schedules.build(name, devices=devices, microbatches=microbatches, **options),
        costs or jp.Costs(),
    )


def pair_table():
    """Two devices in whose middle a forward and a backward overlap."""
    rows = ["0F0,0F1,,,0B0,0B1", ",1F0,(1F1;1B0)OVERLAP_F_B,1B1"]
    return jp.simulate(jp.Schedule.from_csv("\n".join(rows), name="pair"))


def drawn(svg):
    """Text of each bar -> (class, x, y, width, height)."""
    root = ElementTree.fromstring(svg)
    found = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            text = title.text.split(":")[0]
            assert text not in found, f"{text} is drawn twice"
            found[text] = (
                box.get("class"),
                *(float(box.get(k)) for k in ("x", "y", "width", "height")),
            )
    return found


TIMELINES = {
    "1f1b": lambda: timeline(),
    "uneven": lambda: timeline(
        costs=jp.Costs(forward=[1, 2, 1.5, 0.5], input_grad=1.25, transfer=0.3)
    ),
    "interleaved": lambda: timeline("interleaved_1f1b", chunks=2),
    "zero bubble": lambda: timeline("zb_h1"),
    "pair": pair_table,
}


@pytest.mark.parametrize("name", TIMELINES)
@pytest.mark.parametrize("memory", [False, True])
def test_every_action_is_drawn_where_it_runs(name, memory):
    t = TIMELINES[name]()
    chart = Chart(t, memory=memory)
    boxes = drawn(to_svg(t, memory=memory))
    assert sorted(boxes) == sorted(str(action) for _, _, action in t.schedule.actions())
    for device, _, action in t.schedule.actions():
        kind, x, y, width, height = boxes[str(action)]
        start, end = t.start[str(action)], t.end[str(action)]
        # Coordinates are rounded to a hundredth of a pixel, and a bar gives up one pixel to the gap
        # between neighbours.
        assert x == pytest.approx(chart.x(start) + 0.5, abs=0.02)
        assert width == pytest.approx((end - start) * chart.unit - 1, abs=0.02)
        assert chart.y(device) - 0.02 <= y
        assert y + height <= chart.y(device) + chart.row + 0.02
        assert kind == f"{action.kind.name}{t.schedule.placement.chunk_of(action.stage, device)}"


def test_a_pair_is_split_forward_above_backward():
    boxes = drawn(to_svg(pair_table()))
    _, x, y, width, height = boxes["1F1"]
    assert boxes["1B0"][1:] == (x, y + height, width, height)
    assert boxes["1F0"][4] == 2 * height


@pytest.mark.parametrize("name", TIMELINES)
def test_numbers_are_microbatches_and_stay_in_their_bars(name):
    t = TIMELINES[name]()
    root = ElementTree.fromstring(to_svg(t))
    chart = Chart(t)
    labels = [
        (float(g.get("font-size")), e)
        for g in root.iter(f"{SVG}g")
        if g.get("font-size")
        for e in g
    ]
    bars = [b for b in bars_of(t) if b.part is not BarPart.STRIP]
    assert len(labels) == len(bars), (
        "at the default width every bar of these has room for its number"
    )
    for bar in bars:
        left, top, width, height = chart.box(bar)
        inside = [
            (size, e)
            for size, e in labels
            if left < float(e.get("x")) < left + width and top < float(e.get("y")) < top + height
        ]
        assert [e.text for _, e in inside] == [str(bar.action.microbatch)]
        assert inside[0][0] * 0.58 * len(inside[0][1].text) <= width


def test_numbers_are_left_out_where_they_do_not_fit():
    t = timeline(microbatches=64)
    assert not [
        g
        for g in ElementTree.fromstring(to_svg(t, width=400)).iter(f"{SVG}g")
        if g.get("font-size")
    ]


def test_idle_time_shows_as_hatched_background():
    t = timeline()
    chart = Chart(t)
    root = ElementTree.fromstring(to_svg(t))
    hatched = [
        r
        for r in root.iter(f"{SVG}rect")
        if r.get("fill") == "url(#jaxpipe-hatch)" and float(r.get("height")) == chart.row
    ]
    assert [(float(r.get("x")), float(r.get("y"))) for r in hatched] == [
        (chart.left, chart.y(d)) for d in range(4)
    ]
    assert {float(r.get("width")) for r in hatched} == {33 * chart.unit}
    assert root.find(f"{SVG}defs/{SVG}pattern").get("id") == "jaxpipe-hatch"


def texts(svg):
    return [e.text for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_heading_axis_legend_and_device_numbers():
    words = texts(to_svg(timeline()))
    assert words[:2] == ["idle", "peak act."]
    assert "1f1b: 4 devices, 8 microbatches" in words
    assert "makespan 33  ·  bubble 27.3%  ·  peak activations 4  ·  F 1, B 2, transfer 0" in words
    assert {
        "device 0",
        "device 3",
        "0",
        "5",
        "30",
        "27%",
        "F  forward",
        "B  backward",
        "idle",
        "number: microbatch",
    } <= set(words)
    assert "W  weight gradient" not in words
    assert {"I  input gradient", "W  weight gradient"} <= set(texts(to_svg(timeline("zb_h1"))))
    assert "number: microbatch, shade: chunk" in texts(
        to_svg(timeline("interleaved_1f1b", chunks=2))
    )
    assert "number: microbatch, shade: direction" in texts(to_svg(timeline("dualpipe")))
    assert "activations held" in texts(to_svg(timeline(), memory=True))


def test_width_is_kept_and_the_legend_breaks():
    root = ElementTree.fromstring(to_svg(timeline(), width=400))
    assert root.get("width") == "400"
    entries = Chart(timeline(), 400).legend
    assert len({entry.y for entry in entries}) > 1
    assert max(entry.y for entry in entries) + 15 < float(root.get("height"))
    with pytest.raises(
        jp.JaxpipeError, match=r"width=200 leaves no room for the chart; give \d+ to 100,000 pixels"
    ):
        to_svg(timeline(), width=200)
    with pytest.raises(jp.JaxpipeError, match="leaves no room"):
        to_svg(timeline(), width=float("nan"))


def test_a_title_is_text_not_markup():
    svg = to_svg(timeline(), title="<b>&amp;")
    assert "<b>&amp;" in texts(svg)
    page = to_html(timeline(), title="</script><b>$x")
    assert "<b>" not in page.replace("<b>33", "").split("<div class=card")[0]
    assert "&lt;/script&gt;&lt;b&gt;$x" in page


def test_memory_is_drawn_to_scale():
    t = timeline()
    chart = Chart(t, memory=True)
    areas = [
        p.get("d")
        for p in ElementTree.fromstring(to_svg(t, memory=True)).iter(f"{SVG}path")
        if p.get("class") == "memory"
    ]
    assert len(areas) == 4
    for device, area in enumerate(areas):
        heights = [float(v) for v in re.findall(r"V([\d.]+)", area)]
        depth = chart.row * 0.6 - 2
        base = chart.y(device) + chart.row + depth + 2
        assert base - min(heights) == pytest.approx(
            depth * t.peak_activations[device] / 4, abs=0.02
        )


def test_critical_path_is_outlined():
    t = timeline()
    path = [
        p
        for p in ElementTree.fromstring(to_svg(t, critical_path=True)).iter(f"{SVG}path")
        if p.get("class") == "critical"
    ]
    assert path[0].get("d").count("M") == len(t.critical_path)
    assert not [
        p
        for p in ElementTree.fromstring(to_svg(t)).iter(f"{SVG}path")
        if p.get("class") == "critical"
    ]


def test_a_big_table_is_one_path_a_colour():
    t = timeline(devices=8, microbatches=300)
    assert t.schedule.encoded.num_actions > MOST_ELEMENTS
    root = ElementTree.fromstring(to_svg(t))
    paths = {
        p.get("class"): p.get("d")
        for p in root.iter(f"{SVG}path")
        if p.get("class") in ("F0", "B0")
    }
    assert {kind: d.count("M") for kind, d in paths.items()} == {"F0": 2400, "B0": 2400}
    assert float(root.get("width")) <= 12000


def test_transfers_are_thin_strips():
    rows = ["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"]
    schedule = jp.Schedule.from_csv("\n".join(rows))
    t = jp.simulate(schedule, jp.Costs(transfer=1), transfers=jp.Transfers.RENDEZVOUS)
    boxes = drawn(to_svg(t))
    assert boxes["0SEND_F0"][0] == "transfer"
    assert boxes["0SEND_F0"][4] == 4
    assert "transfer" in texts(to_svg(t))
    assert "0SEND_F0" not in drawn(to_svg(jp.simulate(schedule))), "what takes no time has no width"


@pytest.mark.parametrize(
    ("theme", "light", "dark"),
    [(Theme.LIGHT, True, False), (Theme.DARK, False, True), (Theme.AUTO, True, True)],
)
def test_themes(theme, light, dark):
    sheet = ElementTree.fromstring(to_svg(timeline(), theme=theme)).find(f"{SVG}style").text
    assert (f".page{{fill:{COLOURS['page'][LIGHT]}" in sheet) is light
    assert (f".page{{fill:{COLOURS['page'][DARK]}" in sheet) is dark
    assert ("prefers-color-scheme:dark" in sheet) is (theme is Theme.AUTO)


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", [LIGHT, DARK])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_colours_differ_and_numbers_can_be_read(page, chunks):
    colours = [shade(page, kind, chunk=v, chunks=chunks) for kind in SHADES for v in range(chunks)]
    assert len(set(colours)) == len(colours)
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(ink_on(colour))))
        # WCAG 2.2 asks 3 to 1 of graphics and large figures.
        assert (high + 0.05) / (low + 0.05) >= 3


def test_picture_golden():
    check_golden(
        "interleaved_1f1b_2x2.svg",
        to_svg(timeline("interleaved_1f1b", devices=2, microbatches=2, chunks=2)) + "\n",
    )


def test_documentation_shows_what_is_drawn_today():
    docs = Path(__file__).parents[2] / "docs"
    pictures = runpy.run_path(str(docs / "make_images.py"))["pictures"]()
    assert len(pictures) >= 4
    for name, picture in pictures.items():
        path = docs / "images" / name
        assert path.read_text() == picture, (
            f"docs/images/{name} is stale: run python docs/make_images.py and look at it"
        )


def test_an_odd_short_stage_does_not_stretch_the_picture():
    t = timeline(devices=8, costs=jp.Costs(forward=[0.01, *[1] * 7]))
    assert Chart(t).width < 3000


def test_nothing_to_draw():
    t = timeline(costs=jp.Costs(forward=0, input_grad=0, weight_grad=0))
    assert t.makespan == 0
    assert not drawn(to_svg(t))
    to_html(t)
    to_trace(t)


@pytest.mark.parametrize(
    ("value", "text"),
    [(33, "33"), (33.0, "33"), (1.25, "1.25"), (1 / 3, "0.3333"), (12345.678, "12345.7"), (0, "0")],
)
def test_number(value, text):
    assert number(value) == text


def test_title():
    assert title_of(timeline(devices=1, microbatches=1)) == "1f1b: 1 device, 1 microbatch"
    assert title_of(pair_table()) == "pair: 2 devices, 2 microbatches"


class Page(HTMLParser):
    """Collects table cells, the data of the script, and everything that a page could load from
    elsewhere.
    """

    def __init__(self, text):
        super().__init__()
        self.cells, self.data, self.loads, self.within = [], "", [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.within = given.get("id", tag) if tag == "script" else tag
        self.loads += [given[k] for k in ("src", "href", "xlink:href") if k in given]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, text):
        if self.within in ("td", "th"):
            self.cells[-1] += text.strip()
        if self.within == "data":
            self.data += text


def test_page_is_self_contained_and_holds_the_numbers():
    t = TIMELINES["uneven"]()
    text = to_html(t)
    page = Page(text)
    assert page.loads == []
    assert "@import" not in text
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.findall(r"\$\w+", re.sub(r"<script>.*?</script>", "", text, flags=re.S)), (
        "every placeholder is filled in"
    )
    head, rows = page.cells[:9], page.cells[9:]
    for device in range(4):
        row = dict(zip(head, rows[9 * device : 9 * device + 9], strict=True))
        assert row["device"] == str(device)
        assert row["busy"] == number(t.busy[device])
        assert float(row["warmup"]) == pytest.approx(t.idle[device].warmup, abs=1e-3)
        assert row["peak activations"] == str(t.peak_activations[device])
    assert f"<b>{t.bubble:.2%}</b>" in text
    assert t.schedule.to_csv() in text


@pytest.mark.parametrize("name", TIMELINES)
def test_page_data_is_what_hovering_needs(name):
    t = TIMELINES[name]()
    data = json.loads(Page(to_html(t)).data)
    assert len(data["rows"]) == t.schedule.num_devices
    words = dict(zip(data["kinds"], data["descriptions"], strict=True))
    assert [words[kind] for kind in "FBIW"] == [
        "forward",
        "backward",
        "input gradient",
        "weight gradient",
    ]
    found = {}
    for row in data["rows"]:
        # The page finds the bar under the pointer by bisection on the starts.
        assert [bar[0] for bar in row] == sorted(bar[0] for bar in row)
        for start, end, kind, stage, microbatch, _, _ in row:
            found[f"{stage}{data['kinds'][kind]}{microbatch}"] = (start, end)
    assert found == {str(a): (t.start[str(a)], t.end[str(a)]) for _, _, a in t.schedule.actions()}


def test_page_follows_the_readers_theme():
    text = to_html(timeline())
    assert "@media(prefers-color-scheme:dark)" in text
    assert ":root[data-theme=dark] .jaxpipe .F0" in text


@pytest.mark.slow
def test_big_page_leaves_the_table_out():
    text = to_html(timeline("gpipe", devices=8, microbatches=2000))
    assert "write it with --format csv" in text


def events(t, phase, **options):
    return [e for e in json.loads(to_trace(t, **options))["traceEvents"] if e["ph"] == phase]


@pytest.mark.parametrize("name", TIMELINES)
def test_trace_slices(name):
    t = TIMELINES[name]()
    slices = {e["name"]: e for e in events(t, "X", unit_us=10)}
    assert len(slices) == t.schedule.encoded.num_actions
    for device, _, action in t.schedule.actions():
        e = slices[str(action)]
        assert (e["pid"], e["cat"]) == (device, action.kind.name)
        assert e["ts"] == pytest.approx(10 * t.start[str(action)])
        assert e["ts"] + e["dur"] == pytest.approx(10 * t.end[str(action)])
        assert (e["args"]["stage"], e["args"]["microbatch"]) == (action.stage, action.microbatch)


@pytest.mark.parametrize("name", TIMELINES)
def test_trace_slices_of_a_thread_do_not_overlap(name):
    threads = {}
    for e in events(TIMELINES[name](), "X"):
        threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in threads.values():
        spans.sort()
        # 1e-6 microseconds: only the rounding of sums of the costs.
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_trace_flows_join_producers_and_consumers_on_different_devices():
    t = timeline()
    starts, ends = ({e["id"]: e for e in events(t, phase)} for phase in "sf")
    assert len(starts) == len(ends) == 2 * 8 * 3, (
        "a message forward and one backward for 8 microbatches over 3 hops"
    )
    slices = events(t, "X")
    for number_of_flow, leaves in starts.items():
        arrives = ends[number_of_flow]
        assert leaves["pid"] != arrives["pid"]
        inside = [
            e
            for e in slices
            if e["pid"] == leaves["pid"] and e["ts"] <= leaves["ts"] < e["ts"] + e["dur"]
        ]
        reached = [e for e in slices if e["pid"] == arrives["pid"] and e["ts"] == arrives["ts"]]
        assert len(inside) == len(reached) == 1
        assert inside[0]["args"]["microbatch"] == reached[0]["args"]["microbatch"]
        assert inside[0]["args"]["kind"] == reached[0]["args"]["kind"]
        assert abs(inside[0]["args"]["stage"] - reached[0]["args"]["stage"]) == 1


def test_trace_counts_activations_and_names_devices():
    t = timeline()
    held = [max(e["args"]["held"] for e in events(t, "C") if e["pid"] == d) for d in range(4)]
    assert tuple(held) == t.peak_activations
    assert all(
        [e for e in events(t, "C") if e["pid"] == d][-1]["args"]["held"] == 0 for d in range(4)
    )
    assert [e["args"]["name"] for e in events(t, "M") if e["name"] == "process_name"] == [
        f"device {d}" for d in range(4)
    ]
    with pytest.raises(jp.JaxpipeError, match="unit_us must be positive, not 0"):
        to_trace(t, unit_us=0)


def test_trace_golden():
    t = timeline("gpipe", devices=2, microbatches=1)
    check_golden("gpipe_2x1.trace.json", json.dumps(json.loads(to_trace(t)), indent=1) + "\n")
