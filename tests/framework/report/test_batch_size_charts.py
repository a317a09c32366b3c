from io import BytesIO, TextIOWrapper

import pytest
from rich.console import Console

from partita.report.batch_size_charts import print_sizes
from partita_trainers.batch_size.probe import BatchSize


def shown(*, width: int = 80, encoding: str = "utf8", **sizes: BatchSize) -> list[str]:
    """Return the printed lines without trailing spaces."""
    raw = BytesIO()
    file = TextIOWrapper(raw, encoding=encoding)
    print_sizes(sizes, Console(file=file, width=width, markup=False))
    file.flush()
    return [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]


def test_a_tuned_size_has_a_heading_a_table_the_speeds_and_two_charts(generation: BatchSize) -> None:
    assert shown(generation=generation) == GENERATION.splitlines()


GENERATION = """\
generation: 24 rows (fits 148, best 24), tuned in 1.23 s on cpu; prompts of at
most 461 tokens and 32 new tokens, 1.20 GB may be taken
rows      peak   prefill s   decode s   rows/s   verdict
────   ───────   ─────────   ────────   ──────   ─────────
   1   68.0 MB      0.0050     0.0022     42.9   fits
   4   91.0 MB      0.0140     0.0026      120   fits
 152   1.23 GB       0.458     0.0203      235   too large
 148   1.20 GB       0.446     0.0199      235   fits
rows/s: 42.9 at 1, 120 at 4, 218 at 16, 240 at 24, 244 at 64, 235 at 148

memory taken                             rows a second
1.20 GB │╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌+   244 │                  ▂ ▇     █     ▆
        │                            █       │                  █ █     █     █
        │                            █       │                  █ █     █     █
        │                            █       │         ▄        █ █     █     █
        │                            █       │         █        █ █     █     █
        │                            █       │▂        █        █ █     █     █
        │▃       ▄                   █       │█        █        █ █     █     █
      0 └─────────────────────────────     0 └─────────────────────────────────
         1   2   4   8  16  32  64 152        1   2    4   8    16  32  64  152
                           ▲         △                            ▲           △
▲ best 24   △ fits 148   ╌╌ budget 1.20 GB   + too large
"""


def test_an_encoding_without_block_characters_gets_ascii(generation: BatchSize) -> None:
    assert shown(generation=generation, encoding="ascii") == PLAIN.splitlines()
    assert shown(generation=generation, encoding="latin-1") == PLAIN.splitlines()


PLAIN = """\
generation: 24 rows (fits 148, best 24), tuned in 1.23 s on cpu; prompts of at
most 461 tokens and 32 new tokens, 1.20 GB may be taken
rows      peak   prefill s   decode s   rows/s   verdict
----   -------   ---------   --------   ------   ---------
   1   68.0 MB      0.0050     0.0022     42.9   fits
   4   91.0 MB      0.0140     0.0026      120   fits
 152   1.23 GB       0.458     0.0203      235   too large
 148   1.20 GB       0.446     0.0199      235   fits
rows/s: 42.9 at 1, 120 at 4, 218 at 16, 240 at 24, 244 at 64, 235 at 148

memory taken                             rows a second
1.20 GB |----------------------------*   244 |                    #     #     #
        |                            #       |                  # #     #     #
        |                            #       |                  # #     #     #
        |                            #       |                  # #     #     #
        |                            #       |         #        # #     #     #
        |                            #       |         #        # #     #     #
        |#       #                   #       |#        #        # #     #     #
      0 +-----------------------------     0 +---------------------------------
         1   2   4   8  16  32  64 152        1   2    4   8    16  32  64  152
                           b         f                            b           f
b best 24   f fits 148   -- budget 1.20 GB   * too large
"""


def test_out_of_memory_is_a_cross_at_the_budget(training: BatchSize) -> None:
    lines = shown(training=training)
    assert any(line.startswith("140 GB │╌╌╌╌") and "╌✗" in line for line in lines)
    assert lines[-1] == "▲ best and fits 120   ╌╌ budget 140 GB   ✗ out of memory"


def test_a_budget_far_above_is_reported_in_the_title(evaluation: BatchSize) -> None:
    lines = shown(evaluation=evaluation)
    assert any(line.startswith("memory taken, of 40.0 GB") for line in lines)
    assert "╌" not in "".join(lines)
    assert lines[-1] == "▲ best and fits 64"


def test_a_configured_size_is_one_line_and_sizes_are_separated(written: BatchSize, evaluation: BatchSize) -> None:
    assert shown(evaluation=written) == ["evaluation: 8 rows, as the file says"]
    lines = shown(generation=written, evaluation=evaluation)
    assert lines[0] == "generation: 8 rows, as the file says"
    assert lines[1] == ""
    assert lines[2].startswith("evaluation: 64 rows (fits 64, best 64), cached and checked again")


@pytest.mark.parametrize("encoding", ["ascii", "utf8"])
@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_80_characters(
    generation: BatchSize, training: BatchSize, evaluation: BatchSize, width: int, encoding: str
) -> None:
    sizes = {"generation": generation, "training": training, "evaluation": evaluation}
    lines = shown(width=width, encoding=encoding, **sizes)
    assert 70 < max(len(line) for line in lines) <= 80


def test_a_narrow_terminal_gets_charts_below_each_other_with_all_digits(generation: BatchSize) -> None:
    lines = shown(width=50, generation=generation)
    assert [line for line in lines if line in ("memory taken", "rows a second")] == ["memory taken", "rows a second"]
    assert any(line.split() == ["152", "1.23", "GB", "0.458", "0.0203", "235", "too", "large"] for line in lines)


def test_the_size_that_is_used_is_bold_on_a_terminal(training: BatchSize) -> None:
    file = TextIOWrapper(BytesIO(), encoding="utf8")
    console = Console(file=file, width=80, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        print_sizes({"training": training}, console)
    assert [line.split()[1] for line in capture.get().splitlines() if "\x1b[1m" in line] == ["120"]
