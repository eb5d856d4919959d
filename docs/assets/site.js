// Names, roles and tab stops that the theme leaves out: for keyboards and screen readers.
(() => {
  const all = (selector) => document.querySelectorAll(selector);

  const scrolls = (each) => each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight;

  function complete() {
    all(".md-search[role=dialog]").forEach((each) => each.setAttribute("aria-label", "Search"));
    all(".md-code__nav").forEach((each) => each.setAttribute("role", "none"));
    all(".md-nav[aria-labelledby]").forEach((each) => {
      const title = document.getElementById(each.getAttribute("aria-labelledby"));
      each.setAttribute("aria-label", title.textContent.trim());
      each.removeAttribute("aria-labelledby");
    });
    all(".md-typeset pre > code, .md-typeset__scrollwrap").forEach((each) => {
      if (scrolls(each)) each.tabIndex = 0;
      else each.removeAttribute("tabindex");
    });
  }

  let waiting = false;
  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      complete();
    });
  }

  new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", soon);
  complete();
})();
