"""How the report looks, light and dark, and how its tables are sorted. Nothing is fetched from anywhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5b6570; --paper: #fff; --line: #d9dee3; --faint: #e8ebee;
  --head: #f4f6f8; --dcar: #fdf3f0; --better: #eaf2fb; --worse: #fcebe7; --wrong: #fbe0d8; --gone: #69727b;
  --link: #185593; --warn: #fff4d6; --warn-line: #d9a400; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --soft: #a3adb7; --paper: #141414; --line: #39424b; --faint: #2a3138; --head: #212427;
    --dcar: #33211d; --better: #17304a; --worse: #46231c; --wrong: #6b3126; --gone: #98a2ac; --link: #8fc1f0;
    --warn: #3a2f10; --warn-line: #b98c12; }
  img { filter: invert(.92) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 68rem; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 1.2rem 0 .3rem; } p { margin: .4rem 0 .8rem; }
.soft { color: var(--soft); font-size: .9rem; } .best { font-size: 1.1rem; }
.warn { background: var(--warn); border-left: 4px solid var(--warn-line); padding: .5rem .8rem; }
a { color: var(--link); } :focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -100rem; } .skip:focus { position: static; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; list-style: none; font-size: .9rem; }
img { width: 100%; max-width: 52rem; height: auto; display: block; }
.wide { overflow-x: auto; } .wide img { min-width: 36rem; max-width: 60rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .8rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; min-width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
th { font-weight: 600; } thead th { background: var(--head); white-space: normal; vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 0; }
th:first-child { text-align: left; position: sticky; left: 0; } tbody th { background: var(--paper); }
tr.reference > * { color: var(--soft); } tr.dcar > * { background: var(--dcar); }
tr.reference th { max-width: 11rem; white-space: normal; }
.more { mask-image: linear-gradient(to right, #000 calc(100% - 2.5rem), #0003); }
@media (max-width: 40rem) { th, td { padding: .4rem .4rem; }
  tbody th { white-space: normal; max-width: 7.5rem; overflow-wrap: normal; } }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; overflow-wrap: normal; }
th button::after { content: "\\a0↕"; color: var(--soft); font-weight: 400; }
th[aria-sort=ascending] button::after { content: "\\a0↑"; color: inherit; }
th[aria-sort=descending] button::after { content: "\\a0↓"; color: inherit; }
.files { font-size: .85rem; margin: .3rem 0 1rem; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .9rem; margin: 1rem 0; }
.card h3 { margin-top: 0; }
.voice { border-top: 1px solid var(--faint); padding: .7rem 0 .3rem; } .voice:last-child { padding-bottom: 0; }
.voice .name { font-weight: 600; }
audio { width: 100%; max-width: 26rem; height: 2.4rem; display: block; margin: .35rem 0; }
.bar { display: flex; height: 1.15rem; border-radius: 3px; overflow: hidden; margin: .35rem 0; }
.bar span { display: block; min-width: 0; border-right: 1px solid var(--paper); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem .9rem; font-size: .85rem; } .legend i { display: inline-block;
  width: 1rem; height: .8rem; border-radius: 2px; margin-right: .3rem; vertical-align: -1px; }
ins { text-decoration: none; background: var(--wrong); border-radius: 2px; padding: 0 .15em; }
del { color: var(--gone); } details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
.lengths { display: grid; grid-template-columns: minmax(6rem, 10rem) 1fr 3rem; gap: .2rem .8rem; align-items: center; }
.lengths .bar { margin: .15rem 0; } .lengths .name { font-size: .88rem; font-weight: 600; }
.matrix td, .matrix th:not(:first-child) { text-align: center; } .matrix td.better { background: var(--better); }
.matrix td.worse { background: var(--worse); } .matrix td.sure { font-weight: 700; }
.matrix td.none { color: var(--gone); }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
pre { font-size: .78rem; overflow-x: auto; background: var(--head); border-radius: 8px; padding: .7rem; }
"""

SCRIPT = """
// A button in every column's title sorts the table: up, down, as it was. Cells without a number stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows], titles = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim().replace("\\u2212", "-").replace(/^</, "");
    return /^[-+]?\\d/.test(text) ? parseFloat(text) : text;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), undefined, {numeric: true});
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const next = {ascending: "descending", descending: ""}[title.getAttribute("aria-sort")] ?? "ascending";
      titles.forEach(other => other.removeAttribute("aria-sort"));
      const rows = [...original];
      if (next) {
        title.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1, missing = row => ["\\u2013", ""].includes(value(row, column));
        rows.sort((a, b) => missing(a) - missing(b) || sign * compare(value(a, column), value(b, column)));
      }
      body.append(...rows);
    });
  });
}
// What scrolls fades at its right edge as long as there is more to come.
for (const box of document.querySelectorAll(".scroll, .wide")) {
  const look = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
  box.addEventListener("scroll", look, {passive: true});
  new ResizeObserver(look).observe(box);
  for (const inner of box.children) new ResizeObserver(look).observe(inner);
}
"""
