"use strict";

(() => {
  const KINDS = [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1], ["B", 0, 0]];

  function bytesText(count) {
    const [unit, size, digits] = KINDS.find(([, size]) => Math.abs(count) >= size);
    return `${(count / (size || 1)).toFixed(digits)} ${unit}`;
  }

  function secondsText(seconds) {
    if (seconds >= 0.9995) return `${seconds.toFixed(2)} s`;
    const [scale, unit] = seconds >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
  }

  function followTimeline(figure, data) {
    const stack = figure.querySelector(".stack");
    const cursor = figure.querySelector(".cursor");
    const sizes = [...figure.querySelectorAll(".legend b:not([data-of])")].reverse();
    const place = Object.fromEntries([...figure.querySelectorAll("[data-of]")].map((e) => [e.dataset.of, e]));
    const count = data.start.length;

    function momentAt(seconds) {
      let low = 0, high = count - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (data.start[middle] <= seconds) low = middle;
        else high = middle - 1;
      }
      return low;
    }

    function spanOfCall(moment) {
      let first = moment, last = moment;
      while (data.continues[first]) first -= 1;
      while (data.continues[last + 1]) last += 1;
      return [data.start[first], last + 1 < count ? data.start[last + 1] : data.seconds];
    }

    function show(moment, seconds) {
      const [start, end] = spanOfCall(moment);
      const name = data.names[data.name[moment]];
      const again = data.recomputes[moment] ? ", computed again" : "";
      cursor.style.left = `${(100 * (seconds ?? data.start[moment])) / data.seconds}%`;
      place.name.textContent = name;
      place.when.textContent = `at ${secondsText(start)}, for ${secondsText(end - start)}${again}`;
      place.total.textContent = bytesText(data.bands.reduce((sum, band) => sum + band[moment], 0));
      data.bands.forEach((band, i) => (sizes[i].textContent = bytesText(band[moment])));
      if (place.file) place.file.textContent = bytesText(data.file[moment]);
      if (place.transfers) place.transfers.textContent = transfersDuring(start, end);
      stack.setAttribute("aria-valuenow", moment);
      stack.setAttribute("aria-valuetext", name);
    }

    function transfersDuring(start, end) {
      return data.transfers
        .filter(([, , , from, to]) => from < end && start < to)
        .map(([way, name, nbytes, from, to]) =>
          `${way === "out" ? "paged out" : "paged in"}: ${name}, ${bytesText(nbytes)}, ` +
          `from ${secondsText(from)} to ${secondsText(to)}`)
        .join("; ");
    }

    function follow(event) {
      const box = stack.getBoundingClientRect();
      const seconds = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * data.seconds;
      show(momentAt(seconds), seconds);
    }

    stack.addEventListener("pointermove", follow);
    stack.addEventListener("pointerdown", follow);
    stack.addEventListener("keydown", (event) => {
      const now = Number(stack.getAttribute("aria-valuenow"));
      const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: count - 1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(Math.min(count - 1, Math.max(0, next)));
    });
  }

  function followFrontier(figure) {
    const REACH = 40;
    const readout = figure.querySelector("[data-of=point]");

    function distance(dot, event) {
      const box = dot.getBoundingClientRect();
      return Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
    }

    function follow(event) {
      const dots = [...event.currentTarget.querySelectorAll("[data-text]:not([hidden])")];
      const away = new Map(dots.map((dot) => [dot, distance(dot, event)]));
      const least = Math.min(...away.values());
      const near = least < REACH ? dots.filter((dot) => away.get(dot) < least + 1) : [];
      dots.forEach((dot) => dot.classList.toggle("near", near.includes(dot)));
      if (near.length) readout.textContent = near.map((dot) => dot.dataset.text).join("; ");
    }

    for (const plot of figure.querySelectorAll(".plot")) {
      plot.addEventListener("pointermove", follow);
      plot.addEventListener("pointerdown", follow);
    }
    for (const box of figure.querySelectorAll("input[type=checkbox]")) {
      box.addEventListener("change", () => {
        for (const shape of figure.querySelectorAll(`.plot [data-planner="${box.dataset.planner}"]`)) {
          shape.toggleAttribute("hidden", !box.checked);
        }
      });
    }
    for (const choice of figure.querySelectorAll("input[type=radio]")) {
      choice.addEventListener("change", () => {
        for (const stack of figure.querySelectorAll(".stack")) stack.hidden = stack.dataset.measure !== choice.value;
      });
    }
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  const timeline = document.getElementById("timeline");
  const frontier = document.getElementById("frontier");
  if (timeline) followTimeline(timeline, data);
  if (frontier) followFrontier(frontier);
})();
