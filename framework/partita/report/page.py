"""The HTML of reports: one file that needs neither a network nor scripts, for light and dark mode."""

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, StrictUndefined, Template

from partita.report.charts import CHART_STYLE
from partita.report.page_head import HEAD
from partita.report.section import Section

STYLE = """\
:root { --loss: #0072b226; --removed: #d55e0026; --added: #00785a2e; --warning: #a14600; }
@media (prefers-color-scheme: dark) {
  :root { --loss: #56b4e93d; --removed: #e69f003d; --added: #2fc49a3d; --warning: #f0b052; } }
body { max-width: 70rem; }
section { display: flex; flex-wrap: wrap; column-gap: 4rem; align-items: flex-start; }
section > * { width: 100%; }
section > .table { width: auto; max-width: 100%; margin-bottom: 1.25rem; }
section > .table > .note { width: 0; min-width: 100%; }
p, .passage { max-width: 46rem; }
h1 { margin: 0; overflow-wrap: anywhere; }
h2 { margin: 2.75rem 0 1rem; padding-bottom: .3rem; overflow-wrap: anywhere; }
.facts { margin: .25rem 0 0; opacity: .75; font-size: .9rem; overflow-wrap: anywhere; }
.lead { font-size: 1.2rem; line-height: 1.4; margin: 1.25rem 0 0; overflow-wrap: anywhere; }
p { margin: .6rem 0; overflow-wrap: anywhere; }
.warning { color: var(--warning); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 1.5rem;
  margin: 1.25rem 0; }
figure { margin: 0; min-width: 0; }
figcaption, .caption { font-weight: 600; margin-bottom: .4rem; overflow-wrap: anywhere; }
figure p, .note { font-size: .85rem; opacity: .8; margin: .3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .25rem 0 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .3rem; font-size: 1rem; }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint);
  overflow-wrap: anywhere; min-width: 3.5rem; }
th { font-weight: 400; }
thead th { font-size: .85rem; opacity: .8; vertical-align: bottom; }
.numbers td, .numbers th:not(:first-child) { text-align: right; white-space: nowrap; }
.numbers tbody th { overflow-wrap: break-word; max-width: 18rem; }
tbody th { min-width: 6.5rem; }
td:last-child, th:last-child { padding-right: 0; }
details { margin: .35rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
figure summary { font-size: .85rem; opacity: .8; }
pre { overflow-x: auto; padding: .75rem 1rem; background: var(--shade); border-radius: 4px; font-size: .85rem;
  margin: .5rem 0; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
.passage { margin: .4rem 0 1.1rem; padding-left: .9rem; border-left: 3px solid var(--faint); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; font-size: .92rem; }
.turn { display: flex; gap: 1rem; border-bottom: 1px solid var(--faint); padding: .15rem .9rem; }
.turn > .before { flex: 0 0 5.5rem; font-size: .92rem; margin: .3rem 0; overflow-wrap: anywhere; }
.said { display: flex; flex-wrap: wrap; column-gap: 2rem; flex: 1; min-width: 0; }
.said > .text { flex: 1 1 16rem; min-width: 0; }
.right { opacity: .75; }
.wrong { color: var(--warning); }
.before { opacity: .75; }
mark { color: inherit; border-radius: 2px; padding: 0 .1em; }
mark.loss { background: var(--loss); border-bottom: 2px solid var(--c0); }
mark.removed { background: var(--removed); text-decoration: line-through; }
mark.added { background: var(--added); text-decoration: underline; }
@media print { body { max-width: none; } }
"""

MACROS = """\
{% macro table(caption, table, numbers) %}
<div class="scroll"><table{% if numbers %} class="numbers"{% endif %}>
{% if caption %}<caption>{{ caption }}</caption>{% endif %}
{% if table.titles | select | list %}
<thead><tr>{% for title in table.titles %}<th scope="col">{{ title }}</th>{% endfor %}</tr></thead>
{% endif %}
<tbody>{% for row in table.rows %}
<tr>{% for cell in row %}
{%- if loop.first %}<th scope="row">{{ cell }}</th>{% else %}<td>{{ cell }}</td>{% endif %}{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
{% endmacro %}
{% macro marked(pieces) %}
{%- for piece in pieces -%}
{%- if piece.kind == "plain" %}{{ piece.text }}{% else %}<mark class="{{ piece.kind }}">{{ piece.text }}</mark>
{%- endif %}{% endfor %}
{% endmacro %}
{% macro passage(one) %}
<div class="passage">
{% if one.before %}<div class="text before">{{ one.before }}</div>{% endif %}
{% if one.pieces %}<div class="text">{{ marked(one.pieces) }}</div>{% endif %}
{% for name, value in one.facts %}<div class="text"><span class="before">{{ name }}:</span> {{ value }}</div>
{% endfor %}
</div>
{% endmacro %}
{% macro show(item) %}
{% if item.part == "paragraph" %}<div><p class="{{ item.kind }}">{{ item.text }}</p></div>
{% elif item.part == "table" %}<div class="{{ "folded" if item.folded else "table" }}">
{% if item.folded %}<details><summary>{{ item.caption }}</summary>{{ table("", item.table, item.numbers) }}</details>
{% else %}{{ table(item.caption, item.table, item.numbers) }}{% endif %}
{% if item.note %}<p class="note">{{ item.note }}</p>{% endif %}
</div>
{% elif item.part == "charts" %}<div class="charts">
{% for chart in item.charts %}<figure>
<figcaption>{{ chart.title }}</figcaption>
{{ chart.svg | safe }}
{% if chart.note %}<p>{{ chart.note }}</p>{% endif %}
<details><summary>Numbers</summary>{{ table("", chart.table, true) }}</details>
</figure>
{% endfor %}</div>
{% elif item.part == "folded" %}<details><summary>{{ item.caption }}</summary><pre>{{ item.text }}</pre></details>
{% elif item.part == "command" %}<div>
<p class="caption">{{ item.caption }}</p><pre class="command">{{ item.text }}</pre></div>
{% elif item.part == "passages" %}<div>
<p class="caption">{{ item.caption }}</p>
{% if item.legend %}<p class="note">{{ marked(item.legend) }}</p>{% endif %}
{% for one in item.passages %}
{% if item.folded %}
<details{% if loop.index <= item.unfolded %} open{% endif %}>
<summary>{{ one.title }}</summary>{{ passage(one) }}</details>
{% else %}<p class="note">{{ one.title }}</p>{{ passage(one) }}{% endif %}
{% endfor %}
</div>
{% elif item.part == "dialogues" %}<div>
<p class="caption">{{ item.caption }}</p>
{% for dialogue in item.dialogues %}
<details{% if loop.first %} open{% endif %}>
<summary>{{ dialogue.title }}</summary>
{% for turn in dialogue.turns %}
<div class="turn"><div class="before">{{ turn.speaker }}</div><div class="said"><div class="text">{{ turn.text }}</div>
{% if turn.note %}<div class="text {{ turn.kind }}">{{ turn.note }}</div>{% endif %}</div></div>
{% endfor %}
</details>
{% endfor %}
</div>
{% elif item.part == "link" %}<div><p>{{ item.before }} <a href="{{ item.path }}">{{ item.text }}</a>.</p></div>
{% endif %}
{% endmacro %}
"""

PAGE = (
    MACROS
    + HEAD
    + CHART_STYLE
    + STYLE
    + """\
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if facts %}<p class="facts">{{ facts }}</p>{% endif %}
<p class="lead">{{ lead }}</p>
{% for section in sections %}
<section>
<h2>{{ section.title }}</h2>
{% for item in section.parts %}{{ show(item) }}{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
)


def render_page(title: str, *, lead: str, sections: Sequence[Section], facts: str = "") -> str:
    """Return a page as HTML. All texts are escaped; only the pictures of charts are inserted as they are.

    Args:
        title: Title of the page.
        lead: The most important sentence.
        sections: The sections in order.
        facts: A quiet line below the title.
    """
    text = page_template().render(title=title, lead=lead, facts=facts, sections=sections)
    return text.encode("utf8", "replace").decode()  # half of a surrogate pair, which JSON can hold, is no UTF-8


@cache
def page_template() -> Template:
    """Return the compiled template of a page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE)
