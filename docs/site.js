// What the theme leaves out: names of its dialog and of boxes to tick, boxes that scroll also by the keyboard, and
// pictures that open at their own size, for phones.
document.querySelector(".md-search").setAttribute("aria-label", "Search")
for (const picture of document.querySelectorAll(".md-content p > img:not([src*=badges])")) {
  const link = document.createElement("a")
  link.href = picture.src
  picture.replaceWith(link)
  link.append(picture)
}
addEventListener("load", () => setTimeout(() => {
  for (const tick of document.querySelectorAll(".task-list-item input")) tick.ariaLabel = "done"
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .highlight-ipynb")) box.tabIndex = 0
}))
