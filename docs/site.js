document.querySelector(".md-search").setAttribute("aria-label", "Search") // the theme gives its dialog no name
