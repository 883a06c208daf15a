"""Numbers, clock times, prices and dates in French and English words, built from the tables of grammar/numerals.yaml.

Every function gives a French form and its English renderings, the canonical one first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agreement import GRAMMAR, read_yaml

TABLES: dict = read_yaml(GRAMMAR / "numerals.yaml")  # type: ignore[assignment]
_FRENCH, _ENGLISH = TABLES["french"], TABLES["english"]


@dataclass(frozen=True)
class Numeral:
    """One French form (masculine and feminine) and its English renderings."""

    french: str
    english: tuple[str, ...]
    feminine: str


def french_number(value: int, *, feminine: bool = False, ordinal: bool = False) -> str:
    """`value` (0 to 999,999) in French. `ordinal`: as in "chambre quatre-vingt", where the plural s is dropped."""
    if value >= 1000:
        thousands, rest = divmod(value, 1000)
        head = "mille" if thousands == 1 else f"{french_number(thousands, ordinal=True)} mille"
        return f"{head} {french_number(rest, feminine=feminine, ordinal=ordinal)}" if rest else head
    if value >= 100:
        hundreds, rest = divmod(value, 100)
        head = _FRENCH["hundred"] if hundreds == 1 else f"{_FRENCH['units'][hundreds]} {_FRENCH['hundred']}"
        if rest == 0:
            return head + ("s" if hundreds > 1 and not ordinal else "")
        return f"{head} {french_number(rest, feminine=feminine, ordinal=ordinal)}"
    if value < 20:
        return "une" if value == 1 and feminine else _FRENCH["units"][value]
    ten = value // 10 * 10
    base = ten if ten in _FRENCH["tens"] else ten - 10  # seventy counts from sixty, ninety from eighty
    word, rest = _FRENCH["tens"][base], value - base
    if rest == 0:
        return word + ("s" if base == 80 and not ordinal else "")
    unit = french_number(rest, feminine=feminine)
    joined = rest in (1, 11) and base != 80
    return f"{word} et {unit}" if joined else f"{word}-{unit}"


def english_number(value: int) -> tuple[str, ...]:
    """`value` (0 to 999,999) in English, canonical first ("one hundred and twelve", then "one hundred twelve")."""
    if value >= 1000:
        thousands, rest = divmod(value, 1000)
        head = f"{english_number(thousands)[0]} {_ENGLISH['thousand']}"
        tail = english_number(rest)[0]
        return (f"{head} and {tail}" if rest < 100 else f"{head} {tail}",) if rest else (head,)
    if value >= 100:
        hundreds, rest = divmod(value, 100)
        head = f"{_ENGLISH['units'][hundreds]} {_ENGLISH['hundred']}"
        if rest == 0:
            return (head, f"a {_ENGLISH['hundred']}") if hundreds == 1 else (head,)
        tail = english_number(rest)[0]
        return f"{head} and {tail}", f"{head} {tail}"
    if value < 20:
        return (_ENGLISH["units"][value],)
    ten, rest = value // 10 * 10, value % 10
    word = _ENGLISH["tens"][ten]
    return (f"{word}-{_ENGLISH['units'][rest]}" if rest else word,)


def english_ordinal(value: int) -> str:
    """`value` (1 to 39) as an English ordinal."""
    listed = _ENGLISH["ordinals"]
    if value in listed:
        return listed[value]
    if value < 20:
        return _ENGLISH["units"][value] + "th"
    return f"{_ENGLISH['tens'][value // 10 * 10]}-{english_ordinal(value % 10)}"


def numbers(values: list[int], *, ordinal: bool = False) -> Iterator[Numeral]:
    """Plain numbers."""
    for value in values:
        yield Numeral(
            french_number(value, ordinal=ordinal),
            english_number(value),
            french_number(value, feminine=True, ordinal=ordinal),
        )


def years(first: int, last: int) -> Iterator[Numeral]:
    """Years from `first` to `last`, of the eighteenth century to the twenty-first."""
    for value in range(first, last + 1):
        french, (hundreds, rest) = french_number(value), divmod(value, 100)
        if 2000 <= value < 2010:
            english = english_number(value)
        elif rest < 10:
            tails = (_ENGLISH["hundred"],) if rest == 0 else (f"oh {_ENGLISH['units'][rest]}", _ENGLISH["units"][rest])
            english = tuple(f"{english_number(hundreds)[0]} {tail}" for tail in tails)
        else:
            english = (f"{english_number(hundreds)[0]} {english_number(rest)[0]}",)
        yield Numeral(french, english, french)


def _hour(hour: int) -> str:
    return f"{french_number(hour, feminine=True)} heure{'s' if hour > 1 else ''}"


def _clock(minutes: dict, french: str, hour: tuple[str, ...], before: str) -> Numeral:
    text = minutes["fr"].format(h=french)
    english = tuple(dict.fromkeys(form.format(h=h, b=before) for form in minutes["en"] for h in hour))
    return Numeral(text, english, text)


def plain_times(hours: Sequence[int], *, noon: bool, midnight: bool) -> Iterator[Numeral]:
    """Clock times by twelve hours, without the part of the day; midi and minuit on demand."""
    clock = TABLES["clock"]
    units = _ENGLISH["units"]
    for hour in hours:
        before = units[(hour - 2) % 12 + 1]
        for minutes in clock["minutes"]:
            yield _clock(minutes, _hour(hour), (units[hour],), before)
    for special in [clock["noon"]] * noon + [clock["midnight"]] * midnight:
        yield Numeral(special["fr"], tuple(special["en"]), special["fr"])
        for minutes in clock["minutes"][1:]:
            french = minutes["fr"].replace("et demie", special["demi"])
            english = [form for form in minutes["en"] if special["base"] == "twelve" or not form.startswith("{h}")]
            yield _clock({"fr": french, "en": english}, special["fr"], (special["base"],), special["before"])


def times() -> Iterator[Numeral]:
    """Clock times by twelve hours, with and without the part of the day."""
    clock, units = TABLES["clock"], _ENGLISH["units"]
    yield from plain_times(clock["hours"], noon=True, midnight=True)
    for period in clock["periods"]:
        for hour in period["hours"]:
            for minutes in clock["minutes"]:
                if minutes["fr"] in clock["period_minutes"]:
                    plain = _clock(minutes, _hour(hour), (units[hour],), "")
                    # "three in the afternoon" before "three o'clock in the afternoon"
                    forms = plain.english[::-1] if minutes["fr"] == "{h}" else plain.english[:1] + plain.english[-1:]
                    english = tuple(f"{form} {period['en']}" for form in forms)
                    yield Numeral(f"{plain.french} {period['fr']}", english, plain.french)


def timetable() -> Iterator[Numeral]:
    """Twenty-four hour times as a timetable gives them."""
    table = TABLES["clock"]["timetable"]
    for hour, part in table["hours"].items():
        for minute in table["minutes"]:
            french = f"{_hour(hour)} {french_number(minute) if minute else ''}".strip()
            twelve = english_number(hour - 12)[0]
            tail = f"in the {part}"
            if minute == 0:
                yield Numeral(french, (f"{twelve} {tail}", f"{twelve} o'clock {tail}"), french)
            else:
                yield Numeral(french, (f"{twelve} {english_number(minute)[0]} {tail}",), french)


def prices() -> Iterator[Numeral]:
    """Prices in euros, with and without cents."""
    table = TABLES["price"]
    whole = [*range(table["euros"]["from"], table["euros"]["to"] + 1), *table["hundreds"]]
    for value in whole:
        french = f"{french_number(value)} euros"
        yield Numeral(french, tuple(f"{form} euros" for form in english_number(value)), french)
    for value in range(table["with_cents"]["from"], table["with_cents"]["to"] + 1):
        euro = "euro" if value == 1 else "euros"
        for cents in table["cents"]:
            french = f"{french_number(value)} {euro} {french_number(cents, ordinal=True)}"
            number, fraction = english_number(value)[0], english_number(cents)[0]
            english = (f"{number} {euro} {fraction}", f"{number} {euro} and {fraction} cents", f"{number} {fraction}")
            yield Numeral(french, english, french)


def dates() -> Iterator[Numeral]:
    """Dates: "le trois mai" is "the third of May" or "May third"."""
    table = TABLES["date"]
    for month, name in table["months"].items():
        for day in range(table["days"]["from"], table["days"]["to"] + 1):
            if (day > 30 and month in ("avril", "juin", "septembre", "novembre")) or (day > 28 and month == "février"):
                continue
            number = "premier" if day == 1 else french_number(day)
            ordinal = english_ordinal(day)
            yield Numeral(f"le {number} {month}", (f"the {ordinal} of {name}", f"{name} {ordinal}"), month)
