// Tokens of an answer, with their probabilities in a tooltip on hover and on the arrow keys.

const LEVELS = [[0.9, ""], [0.5, "p1"], [0.2, "p2"], [0, "p3"]]; // smallest probability and class

// Return a function that appends tokens to `container`. A character whose bytes are in several tokens is one span.
export function tokenWriter(container) {
  const decoder = new TextDecoder();
  let waiting = [];
  return tokens => {
    for (const token of tokens) {
      waiting.push(token);
      const text = token.bytes ? decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
      if (!text) continue;
      const span = document.createElement("span");
      span.textContent = text;
      const least = Math.min(...waiting.map(probability));
      span.className = `token ${LEVELS.find(([bound]) => least >= bound)[1]}`;
      span.tokens = waiting;
      container.append(span);
      waiting = [];
    }
  };
}

function probability(token) {
  return Math.exp(token.logprob);
}

// Return lines with a token, its probability, and the most probable tokens at its position.
function description(tokens) {
  const line = one => `${percent(probability(one))}  ${JSON.stringify(one.token)}`;
  return tokens.map(one => [line(one), ...(one.top_logprobs ?? []).map(top => `  ${line(top)}`)].join("\n")).join("\n");
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`.padStart(7);
}

// Show the tooltip for tokens in `log`: on hover, and on the arrow keys in a focused answer.
export function watchTokens(log, tooltip) {
  let current = null;
  const hide = () => {
    current?.classList.remove("current");
    current = null;
    tooltip.hidden = true;
  };
  const show = span => {
    hide();
    current = span;
    current.classList.add("current");
    tooltip.textContent = description(span.tokens);
    tooltip.hidden = false;
    place();
  };
  const place = () => {
    if (!current) return;
    const [at, own] = [current.getBoundingClientRect(), tooltip.getBoundingClientRect()];
    const below = at.bottom + own.height + 4 < innerHeight;
    tooltip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - own.width - 4))}px`;
    tooltip.style.top = `${below ? at.bottom + 4 : Math.max(4, at.top - own.height - 4)}px`;
  };
  log.addEventListener("mouseover", event => (event.target.tokens ? show(event.target) : hide()));
  log.addEventListener("mouseleave", hide);
  log.addEventListener("focusout", hide);
  log.addEventListener("scroll", place);
  log.addEventListener("keydown", event => {
    const answer = event.target;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !answer.querySelector(":scope > .token")) return;
    const spans = [...answer.children];
    const next = current && answer.contains(current) ? spans.indexOf(current) + step : step > 0 ? 0 : spans.length - 1;
    if (spans[next]) {
      spans[next].scrollIntoView({ block: "nearest" });
      show(spans[next]);
    }
    event.preventDefault();
  });
}
