"""A drive as a small animation that lives in its page: a drawing surface, a slider, a few lines of script; no player, no request."""
import json
from html import escape

PAGE = """<div class="car-replay"><canvas width="560" height="420" style="width:100%;max-width:560px" role="img"
aria-label="__ALT__"></canvas><div style="display:flex;gap:.7em;align-items:center;max-width:560px"><button type="button" style="min-width:4em">play</button>
<input type="range" min="0" value="0" aria-label="time" style="flex:1;min-width:4em">
<output style="white-space:nowrap;font-variant-numeric:tabular-nums;font-size:.9em"></output></div>
<script>(() => {
const data = __DATA__, box = document.currentScript.parentElement, canvas = box.querySelector("canvas"), pen = canvas.getContext("2d");
const button = box.querySelector("button"), bar = box.querySelector("input"), out = box.querySelector("output");
const all = data.left.concat(data.right), xs = all.map(p => p[0]), ys = all.map(p => p[1]);
const x0 = Math.min(...xs), y1 = Math.max(...ys), scale = Math.min(540 / (Math.max(...xs) - x0), 400 / (y1 - Math.min(...ys)));
const at = p => [10 + (p[0] - x0) * scale, 10 + (y1 - p[1]) * scale];
const path = (points, colour, width) => { pen.beginPath(); points.forEach((p, i) => pen[i ? "lineTo" : "moveTo"](...at(p)));
  pen.strokeStyle = colour; pen.lineWidth = width; pen.stroke(); };
let frame = 0, timer = null;
const draw = () => { pen.clearRect(0, 0, 560, 420); path(data.left, "#8a8f98", 1.2); path(data.right, "#8a8f98", 1.2);
  path([data.left[0], data.right[0]], "#8a8f98", 3);
  path(data.path.slice(Math.max(0, frame - 60), frame + 1), "#3b82c4", 2);
  const here = at(data.path[frame]); pen.beginPath(); pen.arc(...here, 5, 0, 7); pen.fillStyle = "#c0392b"; pen.fill();
  bar.value = frame; out.value = (frame * data.step).toFixed(1) + " s, " + data.speed[frame].toFixed(1) + " units/s"; };
bar.max = data.path.length - 1; bar.oninput = () => { frame = +bar.value; draw(); };
button.onclick = () => { if (timer) { clearInterval(timer); timer = null; button.textContent = "play"; return; }
  button.textContent = "stop"; timer = setInterval(() => { frame = (frame + 1) % data.path.length; draw(); }, 1000 * data.step); };
draw(); })();</script></div>"""


def replay(data: dict, alt: str = "Replay of a drive, seen from above") -> str:
    "The frames of `rlnb.car.pictures.replay_data` as HTML."
    return PAGE.replace("__DATA__", json.dumps(data).replace("</", "<\\/")).replace("__ALT__", escape(alt))
