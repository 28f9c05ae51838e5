"use strict";
// What a drawing cannot do by itself: read values under a cursor, zoom the timeline, step through rounds, follow a run.
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  // ---- the cursor of a chart: its numbers are those of the table beneath --------------------------------------
  function cursor(plot) {
    const table = plot.closest("figure").querySelector("details table");
    const output = plot.parentElement.querySelector("output");
    const rows = table ? all("tbody tr[data-x]", table) : [];
    if (!rows.length) return;
    const places = rows.map(row => Number(row.dataset.x));
    const names = all("thead th", table).map(cell => cell.textContent);
    const line = document.createElement("div");
    line.className = "cursor";
    line.hidden = true;
    plot.append(line);
    let at = rows.length - 1;
    function show(index) {
      at = clamp(index, 0, rows.length - 1);
      line.hidden = false;
      line.style.left = 100 * places[at] + "%";
      output.textContent = all("td", rows[at]).map((cell, i) => names[i] + " " + cell.textContent).join(" · ");
    }
    function nearest(x) {
      let best = 0;
      places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
      return best;
    }
    plot.addEventListener("pointermove", event => {
      const box = plot.getBoundingClientRect();
      show(nearest((event.clientX - box.left) / box.width));
    });
    plot.addEventListener("focus", () => show(at));
    plot.addEventListener("keydown", event => {
      const far = Math.max(1, Math.round(rows.length / 10));
      const go = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - far, PageDown: at + far, Home: 0, End: rows.length - 1 };
      if (event.key in go) { show(go[event.key]); event.preventDefault(); }
    });
  }

  // ---- the timeline: a lane a rank, drawn on a canvas because there may be tens of thousands of spans -----------
  function timeline(box) {
    const found = JSON.parse(box.querySelector("script").textContent);
    const canvas = box.querySelector("canvas"), output = box.querySelector("output"), pick = box.querySelector("select");
    const pen = canvas.getContext("2d");
    const lanes = found.lanes.map(lane => {
      // Starts are differences in tenths of a microsecond; [start, length, name, depth] four by four.
      const spans = [];
      let clock = 0;
      for (let i = 0; i < lane.spans.length; i += 4) {
        clock += lane.spans[i];
        spans.push({ from: clock / 1e7, to: (clock + lane.spans[i + 1]) / 1e7, name: lane.spans[i + 2], depth: lane.spans[i + 3] });
      }
      return { name: lane.name, spans };
    });
    const whole = [found.steps[0][1], found.steps[found.steps.length - 1][2]];
    const left = 54, height = lanes.length > 32 ? 12 : lanes.length > 12 ? 20 : 38, top = 22;
    let view = [...whole], lane = 0, chosen = -1;
    const words = s => Math.abs(s) >= 1 ? s.toFixed(3) + " s" : Math.abs(s) >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " µs";

    function draw() {
      const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
      const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, tall = top + height * lanes.length + 4;
      canvas.style.height = tall + "px";
      canvas.width = width * ratio;
      canvas.height = tall * ratio;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.font = "12px system-ui, sans-serif";
      const scale = (width - left) / (view[1] - view[0]), x = time => left + (time - view[0]) * scale;
      pen.fillStyle = colour("--soft");
      lanes.forEach((_, i) => pen.fillRect(left, top + i * height, width - left, height - 2));
      lanes.forEach((one, i) => {
        const y = top + i * height;
        one.spans.forEach((span, j) => {
          if (span.to < view[0] || span.from > view[1]) return;
          const kind = found.names[span.name][1], from = Math.max(left, x(span.from)), to = Math.min(width, x(span.to));
          const inset = span.depth ? height * (height > 30 ? 0.5 : 0.25) : 0;
          pen.fillStyle = colour("--c" + found.kinds[kind][1]);
          pen.fillRect(from, y + inset, Math.max(0.6, to - from - 0.4), height - 2 - inset);
          if (to - from > 46 && height > 14) {
            pen.fillStyle = colour("--t" + found.kinds[kind][1]);
            pen.save();
            pen.beginPath();
            pen.rect(from, y, to - from, height);
            pen.clip();
            pen.fillText(found.names[span.name][0], from + 4, y + (height > 30 ? 14 + inset * 0.9 : height / 2 + 3));
            pen.restore();
          }
          if (i === lane && j === chosen) {
            pen.strokeStyle = colour("--fg");
            pen.lineWidth = 2;
            pen.strokeRect(from, y + 1, Math.max(2, to - from), height - 3);
          }
        });
      });
      pen.fillStyle = colour("--quiet");
      lanes.forEach((one, i) => { if (height > 14 || i % 4 === 0) pen.fillText(one.name, 0, top + i * height + height / 2 + 3); });
      found.steps.forEach(step => {
        const at = x(step[1]);
        if (at < left - 1 || at > width) return;
        pen.fillRect(at, top - 4, 1, tall);
        pen.fillText(step[0], at + 3, 12);
      });
    }
    function move(from, to) {
      const span = clamp(to - from, (whole[1] - whole[0]) / 5e5, whole[1] - whole[0]);
      const begin = clamp(from, whole[0], whole[1] - span);
      view = [begin, begin + span];
      // The list says what is shown, and nothing where that is no step.
      const near = (a, b) => Math.abs(a - b) < 1e-9 + 1e-6 * span;
      const shown = found.steps.findIndex(step => near(step[1], view[0]) && near(step[2], view[1]));
      pick.selectedIndex = near(span, whole[1] - whole[0]) ? 0 : shown < 0 ? -1 : shown + 1;
      draw();
    }
    const zoom = (by, about = (view[0] + view[1]) / 2) => move(about - (about - view[0]) * by, about + (view[1] - about) * by);
    const pan = by => move(view[0] + by * (view[1] - view[0]), view[1] + by * (view[1] - view[0]));
    function say(span) {
      if (!span) return;
      output.textContent = `${lanes[lane].name} · ${found.names[span.name][0]} (${found.names[span.name][1]}) · ${words(span.to - span.from)}, from ${words(span.from - view[0])} into the view`;
    }
    function choose(by) {
      const spans = lanes[lane].spans;
      if (chosen < 0) chosen = Math.max(0, spans.findIndex(span => span.from >= view[0]));
      else chosen = clamp(chosen + by, 0, spans.length - 1);
      const span = spans[chosen];
      if (span && (span.to > view[1] || span.from < view[0])) {
        const half = Math.max(view[1] - view[0], (span.to - span.from) * 1.2) / 2, middle = (span.from + span.to) / 2;
        move(middle - half, middle + half);
      }
      say(span);
      draw();
    }
    const keys = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
      ArrowUp: () => { lane = clamp(lane - 1, 0, lanes.length - 1); chosen = -1; choose(0); },
      ArrowDown: () => { lane = clamp(lane + 1, 0, lanes.length - 1); chosen = -1; choose(0); },
      n: () => choose(1), p: () => choose(-1), "0": () => move(...whole), Home: () => move(...whole),
    };
    canvas.addEventListener("keydown", event => {
      if (event.key in keys && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
    });
    all("button", box).forEach(button => button.addEventListener("click", () => keys[button.dataset.key]()));
    pick.addEventListener("change", () => {
      const step = found.steps[pick.selectedIndex - 1];
      step ? move(step[1], step[2]) : move(...whole);
    });
    const timeAt = event => view[0] + (event.offsetX - left) / (canvas.clientWidth - left) * (view[1] - view[0]);
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // scrolling the page stays scrolling
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
      event.preventDefault();
    }, { passive: false });
    let grabbed = null;
    canvas.addEventListener("pointerdown", event => { grabbed = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { grabbed = null; });
    canvas.addEventListener("pointermove", event => {
      if (grabbed !== null) {
        pan((grabbed - event.offsetX) / (canvas.clientWidth - left));
        grabbed = event.offsetX;
        return;
      }
      const time = timeAt(event), row = Math.floor((event.offsetY - top) / height);
      if (row < 0 || row >= lanes.length) return;
      const inside = lanes[row].spans.map((span, i) => [span, i]).filter(([span]) => span.from <= time && time <= span.to);
      if (inside.length) { lane = row; chosen = inside[inside.length - 1][1]; say(lanes[row].spans[chosen]); draw(); }
    });
    new ResizeObserver(draw).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    const last = found.steps[found.steps.length - 1];
    move(last[1], last[2]);
  }

  // ---- rounds of a schedule, one at a time -----------------------------------------------------------------------
  function rounds(box) {
    const slider = box.querySelector("input[type=range]"), shown = all(".round", box), output = box.querySelector("output");
    const show = () => {
      shown.forEach((round, i) => round.classList.toggle("on", i === Number(slider.value)));
      output.textContent = shown[Number(slider.value)].dataset.words;
    };
    slider.addEventListener("input", show);
    show();
  }

  function start(where, kept = []) {
    all(".plot[tabindex]", where).forEach(cursor);
    all(".timeline", where).filter(one => !kept.includes(one)).forEach(timeline);
    all(".rounds", where).forEach(rounds);
  }

  // ---- a run in progress: fetch the page again when its folder has changed, and keep what the reader had opened ----
  function follow(main) {
    let version = main.dataset.live;
    const say = words => { const note = document.getElementById("state"); if (note) note.textContent = words; };
    async function look() {
      try {
        const now = (await (await fetch("state", { cache: "no-store" })).text()).trim();
        if (now !== version) {
          const answer = await fetch("./", { cache: "no-store" }), text = await answer.text();
          if (!answer.ok) { say("This is the last that could be read: " + text); setTimeout(look, 2000); return; }
          const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main");
          const open = new Set(all("details[open]", main).map(one => one.dataset.key || all("details", main).indexOf(one)));
          const focused = all("[tabindex],summary,button,select,a", main).indexOf(document.activeElement);
          const scroll = window.scrollY;
          // A timeline of the same spans stays as it is: whoever has zoomed into it is not thrown out.
          const spans = one => one.querySelector("script").textContent, before = all(".timeline", main), kept = [];
          all(".timeline", fresh).forEach((one, i) => {
            if (before[i] && spans(before[i]) === spans(one)) { one.replaceWith(before[i]); kept.push(before[i]); }
          });
          main.replaceChildren(...fresh.childNodes);
          all("details", main).forEach((one, i) => { one.open = open.has(one.dataset.key || i); });
          start(main, kept);
          const again = all("[tabindex],summary,button,select,a", main)[focused];
          if (again) again.focus({ preventScroll: true });
          window.scrollTo(0, scroll);
          version = now;
        }
      } catch (error) {
        say("The server has gone: this is the last it said.");
      }
      setTimeout(look, 2000);
    }
    setTimeout(look, 2000);
  }

  const main = document.getElementById("main");
  start(main);
  if ("live" in main.dataset) follow(main);
})();
