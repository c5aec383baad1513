"""The page of a run over its plan in a real browser: bars, buttons, tooltips, and what a screenshot
shows.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

import jaxpipe as jp
from jaxpipe.render import to_html

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no Chromium here: none of {', '.join(NAMES)} is on the PATH"
)

WIDTH, HEIGHT = 1200, 900
# What a reader would do, and what the page looks like then; written where `--dump-dom` shows it.
DRIVER = """
<script>
const byId = (name) => document.getElementById(name);
const boxes = (svg) => [...svg.querySelectorAll("rect")].filter((r) => r.querySelector("title")).map((r) => {
  const box = r.getBoundingClientRect();
  return [r.querySelector("title").textContent, box.x, box.y, box.width, box.height, getComputedStyle(r).fill];
});
const [run, plan] = [...document.querySelectorAll(".frame svg")];
const seen = {run: boxes(run), plan: boxes(plan), width: data.width, frame: frame.clientWidth};
seen.unit = data.unit * run.getBoundingClientRect().width / data.width;
const hover = (x, y) => {
  frame.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y}));
  return [tip.style.display, tip.textContent];
};
const critical = () => [...new Set([...run.querySelectorAll(".critical")].map((e) => getComputedStyle(e).display))];
const press = (what) => document.querySelector(`[data-zoom="${what}"]`).click() ?? run.getBoundingClientRect().width;
const paper = () => [byId("theme").textContent, getComputedStyle(document.body).backgroundColor];
seen.tips = seen.run.map(([, x, y, width, height]) => hover(x + width / 2, y + height / 2)[1]);
seen.idle = hover(seen.run.find(([text]) => text.startsWith("1F0"))[1] - 3, seen.run.find(([text]) => text.startsWith("1F0"))[2] + 3)[1];
seen.outside = hover(0, 0)[0];
seen.path = [critical(), (byId("path").click(), critical()), (byId("path").click(), critical())];
seen.zoom = [press("full"), press("1.25"), press("0.8"), press("fit")];
seen.widths = [plan.getBoundingClientRect().width, plan.width.baseVal.value];
seen.themes = [paper(), (byId("theme").click(), paper()), (byId("theme").click(), paper()), (byId("theme").click(), paper())];
const probe = document.createElement("pre");
probe.id = "probe";
probe.textContent = JSON.stringify(seen);
document.body.append(probe);
</script>
"""


def browse(path, *options):
    """What headless Chromium prints for a page."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # containers have little shared memory
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
    ]
    command += [
        f"--window-size={WIDTH},{HEIGHT}",
        f"--user-data-dir={path.parent / 'profile'}",
        *options,
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The page, what the driver saw on it, and the two timelines that it draws."""
    schedule = jp.schedules.build("1f1b", devices=3, microbatches=4)
    planned = jp.simulate(schedule, jp.Costs(transfer=0.25))
    ran = jp.simulate(schedule, jp.Costs(forward=[1, 1.5, 1], transfer=0.5))
    page = tmp_path_factory.mktemp("page") / "page.html"
    text = to_html(ran, over=planned, width=1000)
    page.write_text(text, "utf-8")
    driven = page.with_name("driven.html")
    driven.write_text(text.replace("</body>", f"{DRIVER}</body>"), "utf-8")
    found = re.search(r'<pre id="probe">(.*?)</pre>', browse(driven, "--dump-dom"), re.DOTALL)
    assert found, "the page's script or the driver has failed"
    return page, json.loads(unescape(found[1])), ran, planned


def times(boxes):
    """Of each bar, its text and place."""
    return {text.split(":")[0]: tuple(place) for text, *place, _ in boxes}


def test_bars_are_where_the_run_and_the_plan_have_them(seen):
    _, found, ran, planned = seen
    run, plan = times(found["run"]), times(found["plan"])
    assert len(run) == len(plan) == ran.schedule.encoded.num_actions
    unit = found["unit"]  # pixels of one unit of time
    for boxes, timeline in ((run, ran), (plan, planned)):
        zero = boxes["0F0"][0]
        for text, (x, _, width, _) in boxes.items():
            # A bar is a pixel shorter than its time, so that there is a gap to the next; numbers in
            # the SVG have few digits.
            assert x - zero == pytest.approx(unit * timeline.start[text], abs=0.2)
            assert width == pytest.approx(
                unit * (timeline.end[text] - timeline.start[text]) - 1, abs=0.2
            ), "the plan has the run's scale"
    assert run["0F0"][0] == pytest.approx(plan["0F0"][0], abs=0.5), (
        "the plan begins under the run's begin"
    )
    assert plan["0F0"][1] > max(y + height for _, y, _, height in run.values()), (
        "and is drawn below it"
    )


def test_hovering_tells_each_bar_and_each_gap(seen):
    _, found, ran, _ = seen
    for (text, *_), tip in zip(found["run"], found["tips"], strict=True):
        assert tip.startswith(text.split(":")[0] + ":")
    assert len(found["tips"]) == ran.schedule.encoded.num_actions
    assert found["idle"].startswith("idle: warmup\ndevice 1")
    assert found["outside"] == "none"


def test_the_buttons_zoom_and_show_the_critical_path_and_the_theme(seen):
    _, found, _, _ = seen
    full, larger, back, fit = found["zoom"]
    assert full == back == pytest.approx(found["width"], abs=0.5)
    assert larger == pytest.approx(1.25 * full, abs=0.5)
    assert fit == pytest.approx(found["frame"], abs=0.5)
    plan, own = found["widths"]
    assert plan == pytest.approx(own * fit / full, abs=0.5), "the plan keeps the run's scale"
    hidden, shown, again = found["path"]
    assert hidden == again == ["none"]
    assert "none" not in shown
    assert shown
    names, papers = zip(*found["themes"], strict=True)
    assert names == ("theme: system", "theme: light", "theme: dark", "theme: system")
    assert papers[1] == "rgb(246, 247, 249)"
    assert papers[2] == "rgb(11, 14, 18)"
    assert papers[0] == papers[3]


def test_a_screenshot_shows_the_bars_of_both(seen, tmp_path):
    image = pytest.importorskip("PIL.Image")
    page, found, _, _ = seen
    browse(page, f"--screenshot={tmp_path / 'page.png'}")
    picture = image.open(tmp_path / "page.png").convert("RGB")
    assert picture.size == (WIDTH, HEIGHT)
    checked = 0
    for _, x, y, _, height, fill in (*found["run"], *found["plan"]):
        if y + height > HEIGHT:
            continue
        colour = tuple(map(int, re.findall(r"\d+", fill)[:3]))
        # Inside the bar's corner, beside its text.
        pixel = picture.getpixel((round(x) + 5, round(y) + 5))
        assert max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) <= 2
        checked += 1
    assert checked > len(found["run"]), "bars of the plan are in the picture too"
