"use strict";
(function () {
  const form = document.querySelector("form.filters"), table = document.querySelector("table.runs");
  if (!form || !table) return;
  const rows = Array.from(table.tBodies[0].rows), count = document.getElementById("count"), empty = document.querySelector(".empty");

  function filter() {
    const want = Object.fromEntries(new FormData(form));
    let shown = 0;
    for (const row of rows) {
      const d = row.dataset, day = d.date.slice(0, 10);
      const fits = (!want.stage || d.stage === want.stage) && (!want.verdict || d.verdict === want.verdict) && (!want.seed || d.seed === want.seed) &&
        (!want.from || day >= want.from) && (!want.to || (day && day <= want.to)) &&
        (!want.text || row.textContent.toLowerCase().includes(want.text.toLowerCase()));
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = shown + " of " + rows.length + " runs";
    empty.hidden = shown > 0;
    const words = new URLSearchParams(Object.entries(want).filter(([, v]) => v)).toString();
    try { history.replaceState(null, "", words ? "#" + words : location.pathname + location.search); } catch (error) { /* some browsers forbid it for files */ }
  }

  function sort(button) {
    const head = button.closest("th"), key = button.dataset.key;
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    table.querySelectorAll("th[aria-sort]").forEach(th => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const value = row => row.dataset[key];
    rows.sort((a, b) => direction * value(a).localeCompare(value(b), "en", { numeric: true }));
    table.tBodies[0].append(...rows);
  }

  const remembered = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of remembered) if (form.elements[name]) form.elements[name].value = value;
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  table.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => sort(button)));
  filter();
})();
