"""Charts as inline SVG: they need no script and no network, and follow light and dark mode.

A chart is 360 units wide and shown at about that many pixels, so its text is as large as the text around it. Colors
are CSS variables of the page (`CHART_STYLE`), the palette of Okabe and Ito (2008), which color-blind readers can tell
apart; curves also differ by their dashes. Every chart has its numbers as a table.
"""

from partita.report.charts.bars import bars_chart, histogram_chart
from partita.report.charts.chart import CHART_STYLE, Chart, Table
from partita.report.charts.curves import SHARES, Curve, Mark, curve_chart
from partita.report.charts.matrix import matrix_chart
from partita.report.charts.parallel import Dimension, parallel_chart
from partita.report.charts.scatter import scatter_chart
from partita.report.charts.shares import shares_chart

__all__ = [
    "CHART_STYLE",
    "SHARES",
    "Chart",
    "Curve",
    "Dimension",
    "Mark",
    "Table",
    "bars_chart",
    "curve_chart",
    "histogram_chart",
    "matrix_chart",
    "parallel_chart",
    "scatter_chart",
    "shares_chart",
]
