"""Numbers as an operator says them. Used by the endpoint and by the command line."""


def duration(seconds: float) -> str:
    """`seconds` in its two largest units: "3 h 5 min", "12 s"; less than a second is "0 s"."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    said = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(said[:2]) or "0 s"


def many(number: int, thing: str) -> str:
    """`number` of a thing whose plural takes an s: "1 room", "2 rooms"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
