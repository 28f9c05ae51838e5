// What the tests ask of a page; evaluated in it before they do.
var checks = {
  // Words that nobody could read: smaller than 9.5 px.
  small() {
    return [...document.querySelectorAll("main *")].filter(one => {
      const size = parseFloat(getComputedStyle(one).fontSize);
      const isText = one.childElementCount === 0 && one.textContent.trim() && !one.closest("svg");
      return isText && one.getClientRects().length && size > 0 && size < 9.5;
    }).map(one => one.className + ": " + one.textContent);
  },
  // Drawings squeezed to nothing.
  squeezed() {
    return [...document.querySelectorAll(".plot svg, canvas")].filter(one => one.getBoundingClientRect().width < 150).length;
  },
  // Words of an axis that begin left of the page.
  cutOff: () => [...document.querySelectorAll(".ty, .tx, .note")].filter(one => one.getBoundingClientRect().left < 0).length,
  // Names of bars on more than one line: the pieces of their text do not all begin at one height.
  wrapped() {
    return [...document.querySelectorAll(".bars .who")].filter(one => {
      const range = document.createRange();
      range.selectNodeContents(one);
      return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
    }).map(one => one.textContent);
  },
  // Words on top of other words, or beyond the page's sides; signs may stand on signs.
  overlaps() {
    const places = [...document.querySelectorAll(".tx, .ty, .note, .sign, .xlabel, .ylabel, .who, .what, h1, h2, h3, p, summary, .legend li")]
      .filter(one => one.checkVisibility() && one.getClientRects().length && one.textContent.trim())
      .filter(one => one.tagName === "SUMMARY" || !one.closest("details:not([open])")).map(one => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return [one, range.getBoundingClientRect()];
      });
    const found = [], name = one => one.className + ": " + one.textContent.slice(0, 30);
    places.forEach(([one, a], i) => {
      if (a.left < -1 || a.right > innerWidth + 1) found.push(name(one) + " sticks out");
      for (const [other, b] of places.slice(i + 1)) {
        const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        const meant = one.contains(other) || other.contains(one) || (one.matches(".sign") && other.matches(".sign"))
          // Two slanted names are parallel: the boxes around them meet long before they do.
          || (one.matches(".slant") && other.matches(".slant") && Math.abs(a.right - b.right) * .7 > parseFloat(getComputedStyle(one).fontSize));
        if (width > 3 && height > 4 && !meant) found.push(name(one) + " | " + name(other));
      }
    });
    return found;
  },
  // The least contrast of words on their ground, as WCAG counts it.
  contrast() {
    const parse = text => {
      const found = text.match(/[\d.]+/g).map(Number), scale = text.startsWith("color") ? 1 : 255;
      return [...found.slice(0, 3).map(v => v / scale), found[3] === undefined ? 1 : found[3]];
    };
    const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = rgb => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
    const page = parse(getComputedStyle(document.documentElement).backgroundColor);
    const words = "h1, .quiet, .tx, .ty, td, th, summary, .verdict, dd, small, .bar span, button";
    return Math.min(...[...document.querySelectorAll(words)].filter(one => one.textContent.trim()).map(one => {
      let ground = page;
      for (let each = one; each; each = each.parentElement) {
        const here = parse(getComputedStyle(each).backgroundColor);
        if (here[3] > 0) { ground = over(here, page); break; }
      }
      const a = light(parse(getComputedStyle(one).color)), b = light(ground);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }));
  },
  // How many colours the canvas shows.
  colours() {
    const canvas = document.querySelector("canvas");
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const seen = new Set();
    for (let i = 0; i < data.length; i += 4) seen.add(data[i] + data[i + 1] * 256 + data[i + 2] * 65536);
    return seen.size;
  },
  picture: () => document.querySelector("canvas").toDataURL(),
  // What keys can reach, in all.
  reachable: () => [...document.querySelectorAll('a, summary, button, select, canvas, [tabindex="0"]')]
    .filter(one => one.checkVisibility()).length,
  focused() {
    const one = document.activeElement, box = one.getBoundingClientRect();
    return { tag: one.tagName, top: box.top + scrollY, outline: getComputedStyle(one).outlineStyle };
  },
};
