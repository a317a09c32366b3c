"""Checks of the labels in the file."""

from collections.abc import Iterable

from partita_schema.base import rule_error


def refuse_outer_spaces(labels: Iterable[str], *, at: str, blank: str = "remove it") -> None:
    """Raise an error for a label that begins or ends with a space: no row and no answer would have it.

    Args:
        labels: The labels.
        at: Path of their key in its section.
        blank: What to do about a blank label.
    """
    padded = next((label for label in labels if label != label.strip()), None)
    if padded is None:
        return
    raise rule_error(
        f"the label {padded!r} begins or ends with a space, which is removed in rows and answers; write "
        f"{padded.strip()!r}"
        if padded.strip()
        else f"a label is blank; {blank}",
        at=at,
    )
