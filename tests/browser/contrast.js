// What is hard to read on the page: text and icons whose contrast with what lies behind them is below WCAG's AA.
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const colour = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const line = (at) => (at ? [...line(at.parentElement), at] : []);
  const behind = (at) => line(at).reduce(
    (below, one) => over(colour(getComputedStyle(one).backgroundColor), below), [255, 255, 255, 1]);
  const opacity = (at) => line(at).reduce((all, one) => all * Number(getComputedStyle(one).opacity), 1);
  const shown = (at) => at.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })
    && at.getBoundingClientRect().width > 1 && at.getBoundingClientRect().height > 1;
  const judge = (at, css, least, what) => {
    const ground = behind(at);
    const [r, g, b, a] = colour(css);
    const found = ratio(over([r, g, b, a * opacity(at)], ground), ground);
    return found < least ? `${what}: ${found.toFixed(2)} of ${least}` : '';
  };
  const wrong = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let looked = 0;
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const at = node.parentElement;
    if (!node.data.trim() || at.closest('script, style, title, :disabled') || !shown(at)) continue;
    const style = getComputedStyle(at);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (at.closest('svg')) continue; // letters on shapes: the colours' own test
    looked += 1;
    wrong.add(judge(at, style.color, large ? 3 : 4.5, `“${node.data.trim().slice(0, 40)}”`));
  }
  for (const at of document.querySelectorAll('button svg')) {
    const button = at.closest('button');
    if (!shown(at) || button.disabled) continue;
    const name = button.getAttribute('aria-label') || button.innerText || button.className;
    wrong.add(judge(at, getComputedStyle(at).color, 3, `icon of “${name.trim().slice(0, 40)}”`));
    looked += 1;
  }
  wrong.delete('');
  return { looked, wrong: [...wrong] };
}
