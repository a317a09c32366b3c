"""The sections of a run's report, a file each, in the order of `partita.report.run_page`."""
