// Sends what is set as one query string and shows what comes back by the fields. One question is under way at a time:
// what is moved meanwhile is asked as soon as its answer is here.
"use strict";
(() => {
  document.documentElement.lang = "en";  // which the frame that Shiny makes leaves out
  const form = document.getElementById("controls");
  const status = document.getElementById("status");
  const budgets = [...form.querySelectorAll("[data-budget]")];
  const part = (kind, name) => document.getElementById(`${kind}-${name}`);
  let steps = {}, busy = false, again = false, asked = 0;

  function query() {
    const set = new URLSearchParams();
    for (const row of budgets) {
      const name = row.dataset.budget;
      if (part("use", name).checked) set.append("budget", `${name}<=${part("limit", name).value.trim()}`);
    }
    for (const one of form.querySelectorAll("[name][data-default]")) {
      const text = one.value.trim();
      if (text && text !== one.dataset.default) set.append(one.name, text);
    }
    const boxes = [...form.querySelectorAll("[name=topology]")];
    if (boxes.some((box) => !box.checked)) {
      for (const box of boxes) if (box.checked) set.append("topology", box.value);
    }
    return set.toString();
  }

  function ask() {
    if (busy) { again = true; return; }
    busy = true;
    again = false;
    asked += 1;
    window.Shiny.setInputValue("asked", { query: query(), number: asked }, { priority: "event" });
  }

  form.addEventListener("input", (event) => {
    const moved = event.target, row = moved.closest("[data-budget]"), name = row && row.dataset.budget;
    if (moved.type === "range") {
      const scale = row ? steps[name] || [] : moved.dataset.steps.split("|");
      const text = scale[moved.value];
      if (text === undefined) return;
      (row ? part("limit", name) : part("field", moved.id.slice("slide-".length))).value = text;
      moved.setAttribute("aria-valuetext", text);
      if (row) part("use", name).checked = true;
    } else if (row && moved.type === "text") {
      part("use", name).checked = moved.value.trim() !== "";
    } else if (row && moved.checked && !part("limit", name).value.trim()) {
      part("limit", name).value = (steps[name] || [])[part("slide", name).value] || "";
    } else if (moved.name && part("slide", moved.name)) {
      const at = part("slide", moved.name).dataset.steps.split("|").indexOf(moved.value.trim());
      if (at >= 0) part("slide", moved.name).value = at;
    }
    ask();
  });

  function mark(input, message) {
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }

  function show(told) {
    for (const place of form.querySelectorAll("[id^='error-']")) {
      place.textContent = told.errors[place.id.slice("error-".length)] || "";
    }
    for (const row of budgets) {
      mark(part("limit", row.dataset.budget), told.errors[`budget:${row.dataset.budget}`]);
    }
    for (const one of form.querySelectorAll("[name][data-default]")) mark(one, told.errors[one.name]);
    status.textContent = told.summary;
    status.classList.toggle("no", !told.good);
    document.getElementById("command").textContent = told.command;
    document.getElementById("call").textContent = told.call;
    history.replaceState(null, "", location.pathname + (told.query ? `?${told.query}` : ""));
    document.getElementById("link").textContent = location.href;
    document.body.dataset.answered = told.number;
    busy = false;
    if (again) ask();
  }

  function place({ steps: changed, positions, number }) {
    if (changed) steps = changed;
    for (const row of budgets) {
      const name = row.dataset.budget, slider = part("slide", name);
      if (name in positions && slider !== document.activeElement) slider.value = positions[name];
      if (steps[name]) slider.setAttribute("aria-valuetext", steps[name][slider.value]);
    }
    document.body.dataset.settled = number;
  }

  async function copy(button) {
    const place = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(place.textContent);
    } catch {  // no clipboard here: mark the text, so that the usual keys copy it
      getSelection().selectAllChildren(place);
      button.textContent = "Marked";
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  document.addEventListener("click", (event) => {
    if (event.target.dataset && event.target.dataset.copy) copy(event.target);
    if (event.target.id === "reset") location.assign(location.pathname);
  });
  window.Shiny.addCustomMessageHandler("told", show);
  window.Shiny.addCustomMessageHandler("sliders", place);
  $(document).on("shiny:sessioninitialized", ask);
  $(document).on("shiny:disconnected", () => {
    status.textContent = "The server has stopped: start `depthlaw explore` again, then reload this page.";
    status.classList.add("no");
  });
})();
