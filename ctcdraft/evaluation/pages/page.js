// The page works without this: tokens are links to their passes. This keeps the place, marks a pass's tokens, and
// lets the arrow keys go from pass to pass.
"use strict";
function mark() {
  for (const token of document.querySelectorAll(".token.now")) token.classList.remove("now");
  const chosen = location.hash;
  if (!/^#a\d+p\d+$/.test(chosen)) return;
  for (const token of document.querySelectorAll(`a.token[href="${chosen}"]`)) token.classList.add("now");
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
  const found = /^#a(\d+)p(\d+)$/.exec(location.hash);
  if (!step || !found || event.altKey || event.ctrlKey || event.metaKey) return;
  const next = `a${found[1]}p${Number(found[2]) + step}`;
  if (!document.getElementById(next)) return;
  event.preventDefault();
  go(`#${next}`);
});
addEventListener("hashchange", mark);
mark();
