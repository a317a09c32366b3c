"""Numbers with nouns."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as `1 row` or `2,000 rows`. Pass `plural` for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
