// The contrast of an element's text with its background (WCAG 2.2, success criterion 1.4.3), from 1 to 21.
function channels(color) {
  const numbers = color.match(/[\d.]+/g).map(Number);
  const scale = color.startsWith("color(") ? 255 : 1;
  return [...numbers.slice(0, 3).map(one => one * scale), numbers.length > 3 ? numbers[3] : 1];
}
function over(front, back) { return front.slice(0, 3).map((one, i) => one * front[3] + back[i] * (1 - front[3])); }
function luminance(color) {
  const [r, g, b] = color.map(one => one / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function background(element) {
  const layers = [];
  for (let one = element; one; one = one.parentElement) layers.push(channels(getComputedStyle(one).backgroundColor));
  return layers.reverse().reduce((back, layer) => over(layer, back), [255, 255, 255]);
}
function contrast(element) {
  const style = getComputedStyle(element), back = background(element);
  const color = channels(element.closest("svg") ? style.fill : style.color);
  for (let one = element; one; one = one.parentElement) color[3] *= Number(getComputedStyle(one).opacity);
  const [high, low] = [luminance(over(color, back)), luminance(back)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}
