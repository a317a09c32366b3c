"""From files to batches: sources, splits, prompts, tokenization, planning, and a data position that survives kills.

This package exports `DataLoader`, and what users implement: sources, formatters and collators.
"""

from typing import TYPE_CHECKING

from partita_schema.common.lazy import lazy_exports

if TYPE_CHECKING:
    from partita.data.batching.collate import collate
    from partita.data.batching.plan import PlannedBatch
    from partita.data.contract import Collator, DataSource, RowFormatter, ShardedDataSource
    from partita.data.data_loader import DataLoader
    from partita.data.formatting.base import FormattedText, Segment
    from partita.data.ledger import RowCounts
    from partita.data.tokenized import TokenizedDataset
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "partita.data.batching.collate": ("collate",),
            "partita.data.batching.plan": ("PlannedBatch",),
            "partita.data.contract": ("Collator", "DataSource", "RowFormatter", "ShardedDataSource"),
            "partita.data.data_loader": ("DataLoader",),
            "partita.data.formatting.base": ("FormattedText", "Segment"),
            "partita.data.ledger": ("RowCounts",),
            "partita.data.tokenized": ("TokenizedDataset",),
        },
    )

__all__ = [
    "Collator",
    "DataLoader",
    "DataSource",
    "FormattedText",
    "PlannedBatch",
    "RowCounts",
    "RowFormatter",
    "Segment",
    "ShardedDataSource",
    "TokenizedDataset",
    "collate",
]
