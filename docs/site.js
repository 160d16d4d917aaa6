// What the theme leaves out: a name for its dialog, and boxes that scroll also by the keyboard.
document.querySelector(".md-search").setAttribute("aria-label", "Search")
addEventListener("load", () => setTimeout(() => {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .highlight-ipynb")) box.tabIndex = 0
}))
