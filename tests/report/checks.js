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
  // The least contrast of words on the page's ground, as WCAG counts it.
  contrast() {
    const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
    const light = rgb => {
      const [r, g, b] = rgb.match(/[\d.]+/g).map(Number).map(linear);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = light(getComputedStyle(document.documentElement).backgroundColor);
    return Math.min(...[...document.querySelectorAll("h1, .quiet, .tx, .ty, td, summary")].map(one => {
      const ink = light(getComputedStyle(one).color);
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
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
