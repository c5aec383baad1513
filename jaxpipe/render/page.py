"""The template of the HTML page: `html.to_html` fills in each `$name`; `$$` is a dollar sign."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>$title</title>
<style>
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--muted:#667080;
--line:#d5dae1;--accent:#2563c9}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){
--page:#0b0e12;--card:#12161c;--text:#e6eaf0;--muted:#95a0b0;--line:#303845;--accent:#6ea3f2}}
:root[data-theme=light]{color-scheme:light}
:root[data-theme=dark]{color-scheme:dark;
--page:#0b0e12;--card:#12161c;--text:#e6eaf0;--muted:#95a0b0;--line:#303845;--accent:#6ea3f2}
*{box-sizing:border-box}
body{margin:0;padding:24px clamp(12px,3vw,40px);background:var(--page);color:var(--text);
font:15px/1.5 ui-sans-serif,system-ui,"Segoe UI",Arial,sans-serif}
header,.tools,.cards{display:flex;flex-wrap:wrap;gap:10px;align-items:center}
header{justify-content:space-between}
h1{font-size:22px;margin:0}
h2{font-size:16px;margin:28px 0 8px}
.muted{color:var(--muted)}
.cards{margin:16px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 16px;
min-width:112px}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:13px}
button,label.toggle{font:inherit;font-size:14px;color:var(--text);background:var(--card);
border:1px solid var(--line);
border-radius:6px;padding:4px 12px;cursor:pointer}
button:hover,label.toggle:hover{border-color:var(--accent)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.frame{overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;
margin-top:10px}
.frame svg{display:block;height:auto}
.frame:not(.path) .critical{display:none}
#tip{position:fixed;z-index:2;pointer-events:none;display:none;max-width:320px;
background:var(--text);color:var(--page);border-radius:6px;
padding:6px 10px;font-size:13px;line-height:1.4;white-space:pre-line}
.scroll{overflow:auto}
table{border-collapse:collapse;background:var(--card);font-variant-numeric:tabular-nums;
  font-size:14px}
th,td{border:1px solid var(--line);padding:4px 12px;text-align:right}
th{color:var(--muted);font-weight:500}
pre{overflow:auto;max-height:320px;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:12px;font-size:12.5px}
$style
</style>
</head>
<body>
<header><h1>$title</h1><button id="theme" type="button">theme: system</button></header>
<div class="cards">$cards</div>
<div class="tools">
<button type="button" data-zoom="0.8" aria-label="zoom out">−</button>
<button type="button" data-zoom="1.25" aria-label="zoom in">+</button>
<button type="button" data-zoom="fit">fit</button>
<button type="button" data-zoom="full">full size</button>
<label class="toggle"><input id="path" type="checkbox"> critical path</label>
<span class="muted">costs: $costs;
the grey area under a device is the activation memory it holds</span>
</div>
<div class="frame" id="frame" tabindex="0">$chart</div>
$over
<h2>Devices</h2>
<div class="scroll"><table>
$devices
</table></div>
<h2>The table as CSV</h2>
<details><summary>show it</summary><pre>$table</pre></details>
<div id="tip" role="status"></div>
<script type="application/json" id="data">$data</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const frame = document.getElementById("frame"), svg = frame.querySelector("svg"),
  tip = document.getElementById("tip");
const show = (value) => String(Math.round(value * 1e6) / 1e6);
// The run's chart, and the plan's below it where there is one: at one scale.
const frames = [...document.querySelectorAll(".frame")];
const charts = frames.map((each) => each.querySelector("svg")),
  widths = charts.map((chart) => chart.width.baseVal.value);
let zoom = 1;
function setZoom(to) {
  const middle = (frame.scrollLeft + frame.clientWidth / 2) / (data.width * zoom);
  zoom = Math.min(Math.max(to, 0.02), 40);
  charts.forEach((chart, i) => { chart.style.width = widths[i] * zoom + "px"; });
  frame.scrollLeft = middle * data.width * zoom - frame.clientWidth / 2;
}
const fit = () => setZoom(frame.clientWidth / data.width);
for (const button of document.querySelectorAll("[data-zoom]")) {
  const by = button.dataset.zoom;
  button.onclick = () => by === "fit" ? fit() : setZoom(by === "full" ? 1 : zoom * Number(by));
}
document.getElementById("path").onchange = (event) => frame.classList.toggle("path",
  event.target.checked);
const themes = ["system", "light", "dark"];
document.getElementById("theme").onclick = (event) => {
  const next = themes[(themes.indexOf(event.target.textContent.slice(7)) + 1) % 3];
  event.target.textContent = "theme: " + next;
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
};
// The last bar that starts at or before a time: the bars of a device are in order of their starts,
// but for the transfers.
const rows = data.rows.map((row) => row.filter((bar) => bar[6] !== 3));
function before(row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle][0] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}
function tell(device, time, lower) {
  const row = rows[device], at = before(row, time);
  let bar = row[at];
  if (bar && bar[6] === 2 && !lower) bar = row[at - 1];
  if (bar && bar[6] === 1 && lower) bar = row[at + 1];
  if (bar && time < bar[1]) {
    const [start, end, kind, stage, microbatch, chunk] = bar;
    return stage + data.kinds[kind] + microbatch + ": " + data.words[kind] + "\\nstage " + stage +
      " (chunk " + chunk +
      "), microbatch " + microbatch + "\\ndevice " + device +
      ", " + show(start) + " to " + show(end);
  }
  const from = bar ? bar[1] : 0, next = row[at + 1], to = next ? next[0] : data.makespan;
  const why = !bar ? "warmup" : next ? "waiting" : "drain";
  return "idle: " + why + "\\ndevice " + device + ", " + show(from) + " to " + show(to);
}
frame.addEventListener("pointermove", (event) => {
  const box = svg.getBoundingClientRect(), scale = data.width / box.width;
  const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
  const time = (x - data.left) / data.unit, device = Math.floor((y - data.top) / data.pitch);
  const inside = y - data.top - device * data.pitch;
  const hit = time >= 0 && time < data.makespan && device >= 0 && device < rows.length &&
    inside <= data.row;
  tip.style.display = hit ? "block" : "none";
  if (!hit) return;
  tip.textContent = tell(device, time, inside > data.row / 2);
  const left = event.clientX + 14, top = event.clientY + 14;
  tip.style.left = Math.min(left, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(top, innerHeight - tip.offsetHeight - 8) + "px";
});
frame.addEventListener("pointerleave", () => { tip.style.display = "none"; });
// A chart a little too wide is shrunk to fit; a much wider one is read at full size, by scrolling.
if (data.width > frame.clientWidth && data.width < 2 * frame.clientWidth) fit();
</script>
</body>
</html>
"""
