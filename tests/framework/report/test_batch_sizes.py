from dataclasses import replace

from partita.report.batch_sizes import (
    budget_in_sight,
    drawable_sizes,
    heading,
    memory_points,
    probe_table,
    speed_points,
)
from partita_trainers.batch_size.probe import BatchSize


def test_a_heading_shows_the_size_its_origin_and_the_worst_case(
    generation: BatchSize, training: BatchSize, evaluation: BatchSize, written: BatchSize
) -> None:
    assert heading("generation", generation) == (
        "generation: 24 rows (fits 148, best 24), tuned in 1.23 s on cpu; "
        "prompts of at most 461 tokens and 32 new tokens, 1.20 GB may be taken"
    )
    assert heading("training", training) == (
        "training: 120 rows (fits 120, best 120), tuned in 12.0 s on cuda:0; "
        "rows of at most 2,048 tokens, 140 GB may be taken"
    )
    assert heading("evaluation", evaluation) == (
        "evaluation: 64 rows (fits 64, best 64), cached and checked again in 0.310 s on cpu; "
        "rows of at most 461 tokens, 40.0 GB may be taken"
    )
    assert heading("evaluation", written) == "evaluation: 8 rows, as the file says"
    assert heading("training", BatchSize(1, "default", "cpu")) == "training: 1 row, the default"
    assert heading("training", BatchSize(4, "max_tokens", "cpu", max_tokens=512)) == (
        "training: 4 rows, as many of the longest as data.batching.max_tokens allows; max_tokens 512"
    )


def test_a_heading_reports_later_out_of_memory_but_not_values_in_the_table(
    written: BatchSize, training: BatchSize
) -> None:
    later = replace(written, out_of_memory=True)
    assert heading("generation", later) == "generation: 8 rows, as the file says; memory ran out since"
    assert "ran out" not in heading("training", training)


def test_a_table_has_a_row_for_each_probe_in_the_order_they_were_made(generation: BatchSize) -> None:
    table = probe_table("generation", generation)
    assert table.titles == ("rows", "peak", "prefill s", "decode s", "rows/s", "verdict")
    assert [row[0] for row in table.rows] == ["1", "4", "152", "148"]
    assert table.rows[2] == ("152", "1.23 GB", "0.458", "0.0203", "235", "too large")


def test_a_table_shows_reserved_memory_if_it_differs_and_decoding_if_there_is_any(training: BatchSize) -> None:
    table = probe_table("training", training)
    assert table.titles == ("rows", "peak", "taken", "step s", "rows/s", "verdict")
    assert table.rows[2] == ("128", "", "", "", "", "out of memory")
    assert table.rows[3] == ("120", "135 GB", "139 GB", "3.00", "40.0", "fits")
    assert table.used == [False, False, False, True]


def test_points_are_sorted_and_exclude_probes_that_did_not_run(training: BatchSize, generation: BatchSize) -> None:
    assert [(probe.rows, held) for probe, held in memory_points(training)] == [
        (1, 6_283_000_000),
        (4, 9_682_000_000),
        (120, 138_638_000_000),
    ]
    assert speed_points(training) == [(1, 3.0), (4, 11.0), (120, 40.0)]
    assert [rows for rows, _ in speed_points(generation)] == [1, 4, 16, 24, 64, 148, 152]


def test_a_budget_far_above_all_probes_is_outside_the_chart(generation: BatchSize, evaluation: BatchSize) -> None:
    assert budget_in_sight(generation) == 1_200_000_000
    assert budget_in_sight(evaluation) is None
    assert budget_in_sight(replace(generation, budget_bytes=None)) is None


def test_configured_sizes_are_not_measured(generation: BatchSize, written: BatchSize) -> None:
    assert drawable_sizes({"generation": generation, "training": written}) == {"generation": generation}
