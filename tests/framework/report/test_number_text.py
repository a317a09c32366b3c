"""Numbers are written with the digits that a reader needs."""

import pytest

from partita.report.number_text import age_text, as_number, bytes_text, digits, duration


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (512, "512 B"),
        (999.6, "1.00 kB"),
        (67_740_000, "67.7 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (1_200_000_000, "1.20 GB"),
        (138_000_000_000, "138 GB"),
        (2_500_000_000_000, "2.50 TB"),
    ],
)
def test_bytes_have_three_digits(number: float | None, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, ""), (0, "0"), (0.00514, "0.0051"), (0.31, "0.310"), (0.9996, "1.00"), (9.996, "10.0"), (99.97, "100")],
)
def test_numbers_have_three_digits(number: float | None, text: str) -> None:
    assert digits(number) == text
    assert digits(12345.6) == "12,346"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.5, "0.500"),
        ("loss", 0.00004, "4.0e-05"),
        ("loss", 0.0, "0.000"),
        ("bleu", 69.333, "69.33"),
        ("price.mse", 12345.6, "12,346"),
        ("team.n", 400.0, "400"),
        ("dialogues.n", 1200.0, "1,200"),
        ("order.field.n", 0.6667, "0.667"),
        ("order.slot.drinks.skipped", 0.25, "0.250"),
        ("loss", None, ""),
        ("loss", float("nan"), ""),
    ],
)
def test_metrics_have_up_to_four_digits_and_counts_none_after_the_point(
    name: str, value: float | None, text: str
) -> None:
    assert as_number(name, value) == text


@pytest.mark.parametrize(
    ("seconds", "text", "age"),
    [(0.04, "0.0 s", "0 s"), (99.4, "99.4 s", "1 min"), (125.0, "2 min 05 s", "2 min"), (7_320, "2 h 02 min", "2 h")],
)
def test_times_have_two_units_and_ages_one(seconds: float, text: str, age: str) -> None:
    assert (duration(seconds), age_text(seconds)) == (text, age)
