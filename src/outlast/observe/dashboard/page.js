"use strict";
(() => {
  const body = document.body;
  const status = document.getElementById("status");
  const say = (text) => { if (status && status.textContent !== text) status.textContent = text; };
  const ago = (seconds) => {
    if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes} min ago`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min ago`;
    return `${Math.floor(minutes / 1440)} days ago`;
  };
  const age = (root) => {
    for (const one of root.querySelectorAll(".age")) one.textContent = ` (${ago(Date.now() / 1000 - one.dataset.at)})`;
  };
  const swap = (id, html) => {
    const old = document.getElementById(id);
    if (!old) { location.reload(); return; }
    const box = document.createElement("template");
    box.innerHTML = html;
    const fresh = box.content.firstElementChild;
    const held = document.activeElement;
    const focus = held && old.contains(held) ? held.id : "";
    for (const one of old.querySelectorAll("details[id]")) {
      const same = fresh.querySelector(`#${CSS.escape(one.id)}`);
      if (same) same.open = one.open;
    }
    const places = [...old.querySelectorAll(".wide")].map((one) => one.scrollLeft);
    age(fresh);
    old.replaceWith(fresh);
    fresh.querySelectorAll(".wide").forEach((one, at) => { one.scrollLeft = places[at] || 0; });
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    if (fresh.dataset.news && fresh.dataset.news !== old.dataset.news) say(fresh.dataset.news);
  };
  for (const form of document.querySelectorAll("form")) {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const button = form.querySelector("button");
      button.disabled = true;
      say("Asked; the launcher looks once a second.");
      try {
        const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
        say(await answer.text());
      } catch (error) {
        say(`The request was not sent: ${error.message}`);
      }
      button.disabled = false;
    });
  }
  age(document);
  setInterval(() => age(document), 1000);
  if (!body.dataset.events) return;
  let lost = false;
  const listen = () => {
    const source = new EventSource(`${body.dataset.events}?since=${encodeURIComponent(body.dataset.version)}`);
    source.onopen = () => { if (lost || !status.textContent) say("Live."); lost = false; };
    source.onmessage = (event) => {
      body.dataset.version = event.lastEventId;
      for (const [id, html] of Object.entries(JSON.parse(event.data))) swap(id, html);
    };
    source.onerror = () => {
      lost = true;
      say(`No connection since ${new Date().toLocaleTimeString()}; it is tried again. What is shown may be old.`);
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    };
  };
  listen();
})();
