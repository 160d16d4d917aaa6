// What the theme leaves out: names of its dialog and of boxes to tick, and boxes that scroll also by the keyboard.
document.querySelector(".md-search").setAttribute("aria-label", "Search")
addEventListener("load", () => setTimeout(() => {
  for (const tick of document.querySelectorAll(".task-list-item input")) tick.ariaLabel = "done"
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .highlight-ipynb")) box.tabIndex = 0
}))
