"""Numbers with their nouns."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 row`, `2,000 rows`. `plural` is for nouns that do not just take an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
