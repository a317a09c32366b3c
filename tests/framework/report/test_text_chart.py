from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from partita.report.batch_size_charts import ASCII, UNICODE, Letters, TerminalChart, draw

EIGHT = TerminalChart(
    title="speed",
    bars=((1, 10.0), (2, 20.0), (4, 30.0), (8, 40.0)),
    max_rows=8,
    show=lambda value: f"{value:.0f}",
    marks={"best": 4, "fits": 8},
)


def drawn(chart: TerminalChart, *, width: int, height: int, letters: Letters) -> list[str]:
    return [line.rstrip() for line in draw(chart, width=width, height=height, letters=letters)]


def test_the_horizontal_axis_is_logarithmic_and_bars_have_the_height_of_their_values() -> None:
    assert drawn(EIGHT, width=14, height=4, letters=UNICODE) == [
        "speed",
        "40 │         █",
        "   │      █  █",
        "   │   █  █  █",
        "   │█  █  █  █",
        " 0 └──────────",
        "    1  2  4  8",
        "          ▲  △",
    ]


def test_bars_are_drawn_to_an_eighth_of_a_line() -> None:
    chart = replace(EIGHT, bars=((1, 0.5), (2, 4.0), (4, 5.0), (8, 8.0)), marks={})
    lines = drawn(chart, width=13, height=2, letters=UNICODE)
    assert lines[1] == "8 │      ▂  █"
    assert lines[2] == "  │▁  █  █  █"


def test_ascii_charts_draw_whole_lines_and_at_least_one_per_bar() -> None:
    chart = replace(EIGHT, bars=((1, 0.1), (2, 5.0), (4, 6.0), (8, 8.0)), level=8.0)
    lines = drawn(chart, width=13, height=2, letters=ASCII)
    assert lines[1:] == [
        "8 |---------#",
        "  |#  #  #  #",
        "0 +----------",
        "   1  2  4  8",
        "         b  f",
    ]


def test_a_level_is_drawn_behind_the_bars_with_a_label_and_with_signs_on_it() -> None:
    signs = ((4, "too large"), (8, "out of memory"))
    chart = replace(EIGHT, bars=((1, 10.0), (2, 30.0), (8, 40.0)), level=20.0, signs=signs, marks={"best": 8})
    assert drawn(chart, width=14, height=4, letters=UNICODE)[1:] == [
        "40 │         █",
        "   │   █     █",
        "20 │╌╌╌█╌╌+╌╌✗",
        "   │█  █     █",
        " 0 └──────────",
        "    1  2  4  8",
        "             ▲",
    ]


def test_the_highest_bar_of_a_column_is_drawn() -> None:
    chart = replace(EIGHT, bars=((1000, 40.0), (1024, 10.0)), max_rows=1024, marks={})
    assert [line[-1] for line in draw(chart, width=14, height=4, letters=UNICODE)[1:5]] == ["█"] * 4


def test_two_marks_at_one_place_are_drawn_as_one() -> None:
    assert (
        drawn(replace(EIGHT, marks={"best": 8, "fits": 8}), width=14, height=4, letters=UNICODE)[-1] == " " * 13 + "▲"
    )


def test_a_chart_may_have_a_single_bar() -> None:
    chart = replace(EIGHT, bars=((1, 3.0),), max_rows=1, marks={"best": 1})
    assert drawn(chart, width=9, height=1, letters=UNICODE)[1:] == ["3 │█", "0 └──────", "   1", "   ▲"]


@given(
    bars=st.lists(st.tuples(st.integers(1, 70_000), st.floats(0, 1e12)), max_size=20),
    level=st.none() | st.floats(0, 1e12),
    refused=st.lists(st.integers(1, 70_000), max_size=3),
    width=st.integers(24, 60),
    height=st.integers(1, 10),
    letters=st.sampled_from([ASCII, UNICODE]),
)
def test_every_chart_has_the_given_size_and_uses_only_its_characters(
    bars: list[tuple[int, float]],
    level: float | None,
    refused: list[int],
    width: int,
    height: int,
    letters: Letters,
) -> None:
    most = max([1, *refused, *(rows for rows, _ in bars)])
    signs = [(rows, "out of memory") for rows in refused]
    chart = TerminalChart("t", bars, most, "{:.3g}".format, {"best": 1, "fits": most}, level=level, signs=signs)
    lines = draw(chart, width=width, height=height, letters=letters)
    assert len(lines) == height + 4
    assert {len(line) for line in lines} == {width}
    assert letters is UNICODE or "".join(lines).isascii()
    body = "".join(lines[1 : height + 1])
    assert (letters.signs["out of memory"] in body) >= bool(refused)
    if any(value > 0 for _, value in bars) and level is None and not refused:
        # The highest bar reaches the top.
        assert letters.eighths[-1] in lines[1]
