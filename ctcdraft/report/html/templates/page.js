// The page works without this script: tokens are links to their steps. The script keeps the scroll position, marks
// the tokens of the steps that are shown, and lets the arrow keys move from step to step.
"use strict";
function mark() {
  const shown = [...document.querySelectorAll(".pass")].filter((pass) => getComputedStyle(pass).display !== "none");
  const links = new Set(shown.map((pass) => `#${pass.id}`));
  for (const token of document.querySelectorAll("a.token")) {
    token.classList.toggle("now", links.has(token.getAttribute("href")));
  }
}
function chosen() {
  const opening = document.querySelector("details[open] .pass.opening");
  return document.querySelector(".pass:target") || !opening ? location.hash : `#${opening.id}`;
}
function go(hash) {
  const place = [scrollX, scrollY];
  location.hash = hash;
  scrollTo(...place);
}
document.addEventListener("click", (event) => {
  const token = event.target.closest("a.token");
  if (!token) return;
  event.preventDefault();
  go(token.getAttribute("href"));
});
document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const found = /^#a(\d+)p(\d+)$/.exec(chosen());
  if (!step || !found || event.altKey || event.ctrlKey || event.metaKey) return;
  const next = `a${found[1]}p${Number(found[2]) + step}`;
  if (!document.getElementById(next)) return;
  event.preventDefault();
  go(`#${next}`);
});
addEventListener("hashchange", mark);
mark();
