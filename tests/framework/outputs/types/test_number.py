import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.base import ReadError
from partita.outputs.types.number import NumberMetrics, NumberReader
from partita_schema.sections.outputs.number import NumberDecoder


def read(text: str, **options: Any) -> float:
    return NumberReader(NumberDecoder.model_validate(options)).read(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 72.", 72),
        ("$1,234,567.50", 1234567.5),
        ("-3.5 degrees", -3.5),
        ("\u22127", -7),
        ("1.5e-3 m", 0.0015),
        ("about .25", 0.25),
        ("12\u202f500 km", 12500),
        ("12\u2009500 km", 12500),
        ("5-3", 5),
        ("12, 13 and 14", 12),
        ("on 3, 5 people came", 3),
        ("10.5.", 10.5),
        ("3.5%", 3.5),
        ("**10**", 10),
        ("it is...5", 5),
        ("1e\u22125", 0.00001),
        ("#### 72", 72),
        ("-$5", -5),
        ("- $5", -5),
        ("- 5", -5),
        (" \u2013 5 degrees", -5),
        ("\u20135", -5),
        ("\uff0d7", -7),
        ("- 5 apples\n- 3 pears", 5),
        ("it is - 5", 5),
        ("(5)", 5),
        ("-\u20ac 5.50", -5.5),
        ("$-5", -5),
        ("5-$3", 5),
        ("+$5", 5),
        ("1 000", 1000),
        ("-12 500.5 km", -12500.5),
        ("1\u00a0000 and 2\u00a0000", 1000),
        ("1 0000", 1),
        ("2024 100 times", 2024),
        ("1_000_000", 1000000),
        ("1'000", 1000),
        ("1,000 500", 1000),
        ("12.5k", 12500),
        ("$12.5k a year", 12500),
        ("0.1k", 100),
        ("1.0001k", 1000.1),
        ("5 k", 5000),
        ("5km", 5),
        ("5 m", 5),
        ("300 Km", 300),
        ("2.5 million people", 2500000),
        ("3-Million", 3000000),
        ("4 millions", 4000000),
        ("1.5 Thousands", 1500),
        ("2 billions", 2000000000),
        ("2024-05-03: 7", 7),
        ("on 2024/5/3 at 12:30, 8 came", 12),
        ("2024-05-03T12:30:01.5, then 9", 9),
        ("3.5.2024 -> 10", 10),
        ("03/05/2024 11 12", 11),
        ("10-4-2", 10),
        ("2024", 2024),
    ],
)
def test_the_first_number_is_read(text: str, number: float) -> None:
    assert read(text) == number


def test_a_whole_number_is_an_int_and_another_is_not() -> None:
    assert isinstance(read("42"), int)
    assert isinstance(read("42.0"), float)
    assert isinstance(read("1e2"), float)


def test_a_whole_number_keeps_all_its_digits() -> None:
    assert read("id 9007199254740993") == 9007199254740993
    assert read("-123,456,789,012,345,678,901") == -123456789012345678901
    assert read("0" * 5000 + "1") == 1


@pytest.mark.parametrize(
    ("truth", "value", "right"),
    [
        (1700000000, 1700000000, True),
        (1700000000, 1700000001, False),
        (1700000000, 1700000001.0, False),
        (1700000000, 1700000000.5, False),
        (9007199254740992, 9007199254740993, False),
        (10**23, 1e23, True),
        (3, 3.0, True),
        (3, 3.0000000000000004, True),
        (0.3, 0.1 + 0.2, True),
        (1234567.5, 1234567.5001, True),
        (1e-13, 7e-13, False),
        (1e-13, 0, False),
        (0, 1e-13, True),
        (0, 1e-6, False),
    ],
)
def test_whole_numbers_match_exactly_and_others_up_to_rounding(truth: float, value: float, right: bool) -> None:
    metrics = NumberMetrics()
    assert metrics.add(truth, value, valid=True) == right
    assert metrics.results(1)["exact_match"] == right


def test_the_last_number_is_read_if_requested() -> None:
    assert read("3 + 4 = 7", pick="last") == 7


def test_a_minus_after_a_digit_is_not_a_sign() -> None:
    assert read("10-4", pick="last") == 4


@pytest.mark.parametrize("text", ["pages 3 - 5", "pages 3\u20135", "3%\u20135%", "3\u20ac-5\u20ac", "$3-$5"])
def test_a_dash_in_a_range_is_not_a_sign(text: str) -> None:
    assert read(text, pick="last") == 5


@pytest.mark.parametrize("text", ["2024-05-03", "due 3.5.2024", "5/3/2024", "2024-05-03 12:30"])
def test_a_date_is_not_a_number(text: str) -> None:
    with pytest.raises(ReadError, match="no number in"):
        read(text)


@pytest.mark.parametrize("text", ["3M", "$300K", "2B", "1.5bn", "about 4mn", "$3 M", "5 K", "3 B", "5 bn", "5 mn"])
def test_an_ambiguous_letter_after_a_number_is_an_error(text: str) -> None:
    with pytest.raises(ReadError) as error:
        read(text)
    number = text.strip("about $")
    assert str(error.value) == (
        f"{number!r} may hold a scale or a unit; ask for all digits in the prompt, or say with decoder.regex what "
        "counts"
    )
    assert read(text, regex=r"([0-9.]+) ?[KMBbm]") == float(number.rstrip(" KMBbmn"))


@pytest.mark.parametrize("text", ["5 hundred", "2 dozens", "3 lakh", "4 Crores"])
def test_a_number_word_without_a_scale_is_an_error(text: str) -> None:
    with pytest.raises(ReadError, match="may hold a scale or a unit"):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        *("12,5", "0,75", "0,500", "2,5", "1,2,3", "1,2345", "1.234,56", "1 250,00", "1.250.000", "1,00,000"),
        *(
            "12,34,567",
            "1_00",
            "1.2.3",
            "1{,}000",
            r"1\,000",
            "2\u00bd",
            "10^6",
            "10\u2076",
            "10**6",
            "1e3k",
            "2e3 million",
        ),
        *("1.5 \u00d7 10^6", "1.5x10^6", r"1.5 \times 10^{6}", "1.5 x 10^-6", "1.5\u00b710\u2076"),
    ],
)
@pytest.mark.parametrize("pick", ["first", "last"])
def test_a_number_that_goes_on_with_several_readings_is_an_error(text: str, pick: str) -> None:
    with pytest.raises(ReadError) as error:
        read(f"total {text}", pick=pick)
    assert str(error.value) == (
        f"{text!r} has several readings or is not supported; ask for plain digits with a decimal point in the prompt, "
        "or say with decoder.regex what counts"
    )


def test_only_the_picked_number_must_have_one_reading() -> None:
    assert read("1 of 2,50") == 1
    with pytest.raises(ReadError, match="'2,50' has several readings"):
        read("1 of 2,50", pick="last")


def test_a_scaled_whole_number_is_an_int() -> None:
    assert isinstance(read("12.5k"), int)
    assert isinstance(read("0.0001k"), float)


def test_a_regex_selects_the_number() -> None:
    assert read("1 then #### 1,234", regex=r"####\s*(\S+)") == 1234
    assert read("a=1 a=2 b=3", regex=r"a=\d", pick="last") == 2


def test_a_regex_that_matches_words_is_reported() -> None:
    with pytest.raises(ReadError, match="the regex found 'many', which is not a number"):
        read("answer: many", regex=r"answer: (\w+)")
    with pytest.raises(ReadError, match="the regex found '2024-05-03', which is not a number"):
        read("due 2024-05-03", regex=r"due (\S+)")


def test_a_text_without_numbers_is_reported() -> None:
    with pytest.raises(ReadError, match="no number in 'none at all'"):
        read("none at all")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("7", "7 is above the maximum 5"), ("-2", "-2 is below the minimum 0"), ("1e999", "the number is too large")],
)
def test_a_number_out_of_range_is_reported(text: str, reason: str) -> None:
    with pytest.raises(ReadError, match=reason):
        read(text, minimum=0, maximum=5)


@pytest.mark.parametrize("text", ["0", "5", "5.0"])
def test_a_range_includes_its_ends(text: str) -> None:
    assert read(text, minimum=0, maximum=5) == float(text)


def test_an_integer_beyond_all_floats_is_too_large() -> None:
    with pytest.raises(ReadError, match="too large"):
        NumberReader(NumberDecoder()).check(10**400)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back(number: float) -> None:
    assert read(f"it is {number!r} in all") == number


@given(st.integers(min_value=-(2**53) + 1, max_value=2**53 - 1))
def test_every_whole_number_is_read_back_with_separators(number: int) -> None:
    assert read(f"it is {number:,} in all") == number


@given(st.text(alphabet=st.characters() | st.sampled_from("0123456789.,-+eE ")))
def test_any_text_gives_a_finite_number_or_a_reason(text: str) -> None:
    try:
        number = read(text)
    except ReadError:
        with pytest.raises(ReadError, match=r"number|scale or a unit|several readings"):
            read(text)
        number = read(f"{text} 0", pick="last")
    assert math.isfinite(number)
