// A button in every column's title sorts the table: up, down, as it was. Cells without a number stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows], titles = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim().replace("\u2212", "-").replace(/^</, "");
    return /^[-+]?\d/.test(text) ? parseFloat(text) : text;
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
        const sign = next === "ascending" ? 1 : -1, missing = row => ["\u2013", ""].includes(value(row, column));
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
// A link to a section that is folded unfolds it.
const unfold = () => {
  const section = document.getElementById(location.hash.slice(1));
  if (section instanceof HTMLDetailsElement) section.open = true;
};
addEventListener("hashchange", unfold);
unfold();
