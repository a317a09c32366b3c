"""HTML page of batch size tuning: one file, no scripts, for light and dark mode."""

from collections.abc import Mapping

from jinja2 import Environment, StrictUndefined

from partita.report.batch_sizes import heading, probe_table, speed_points
from partita.report.number_text import digits
from partita.report.page_head import HEAD
from partita_trainers.batch_size.probe import BatchSize

PAGE = (
    HEAD
    + """\
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; border-bottom: 1px solid var(--faint); }
th:last-child, td:last-child { text-align: left; }
.speeds td, .speeds th { text-align: right !important; }
tr.used { font-weight: 700; background: var(--shade); }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for part in parts %}
<section>
<h2>{{ part.name }}</h2>
<p>{{ part.sentence }}</p>
{% if part.picture %}<div class="scroll">{{ part.picture | safe }}</div>{% endif %}
{% if part.table.rows %}
<div class="scroll"><table>
<caption>Sizes that were tried, in this order</caption>
<thead><tr>{% for cell in part.table.titles %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.table.rows %}
<tr{% if part.table.used[loop.index0] %} class="used"{% endif %}>
{% for cell in row %}<td>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if part.speeds %}
<div class="scroll"><table class="speeds">
<caption>Rows of the data a second</caption>
<tbody>
<tr><th scope="row">rows</th>{% for rows, _ in part.speeds %}<td>{{ rows }}</td>{% endfor %}</tr>
<tr><th scope="row">rows/s</th>{% for _, speed in part.speeds %}<td>{{ speed }}</td>{% endfor %}</tr>
</tbody>
</table></div>
{% endif %}
</section>
{% endfor %}
</body>
</html>
"""
)


def page(sizes: Mapping[str, BatchSize], *, title: str, pictures: Mapping[str, str]) -> str:
    """Return HTML with a section for each size; `pictures` contains SVG by purpose."""
    parts = [
        {
            "name": name,
            "sentence": heading(name, size),
            "picture": pictures.get(name),
            "table": probe_table(name, size),
            "speeds": [(f"{rows:,}", digits(speed)) for rows, speed in speed_points(size)],
        }
        for name, size in sizes.items()
    ]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(title=title, parts=parts)
