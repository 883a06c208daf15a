"""The phrasebook's text: split, spelling, agreement, numbers. Needs neither espeak-ng nor flite."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[3] / "data" / "build"
sys.path.insert(0, str(BUILD))

import agreement  # noqa: E402
import lexicon  # noqa: E402
import numerals  # noqa: E402
import phrasebook  # noqa: E402
import recording  # noqa: E402
import sampler  # noqa: E402
import splits  # noqa: E402
import tatoeba  # noqa: E402
from grammar import read_patterns  # noqa: E402
from tables import read_journal  # noqa: E402


@pytest.fixture(scope="module")
def sentences() -> list[splits.Sentence]:
    return splits.read_sentences()


@pytest.fixture(scope="module")
def french(sentences: list[splits.Sentence]) -> str:
    return "\n".join(f" {sentence.french.lower()} " for sentence in sentences)


@pytest.fixture(scope="module")
def some(sentences: list[splits.Sentence]) -> list[splits.Sentence]:
    return sentences[::7]


def test_the_grammar_has_enough_pairs(sentences: list[splits.Sentence]) -> None:
    forms = {word for sentence in sentences for word in splits.words(sentence.french)}
    assert len(forms) >= 560
    assert sum("-" not in form for form in forms) >= 560
    assert sum(bool(pattern.slots) for pattern in read_patterns()) >= 70
    assert len(sentences) > 60_000
    assert len({sentence.pattern.topic for sentence in sentences}) >= 12


def test_no_pattern_dominates(sentences: list[splits.Sentence]) -> None:
    train = [sentence for sentence in sentences if sentence.split == "train"]
    drawn = Counter(sentence.pattern.name for sentence in splits.in_order(train, 0)[:6000])
    assert max(drawn.values()) < 0.06 * 6000


def test_most_sentences_have_three_to_twelve_words(sentences: list[splits.Sentence]) -> None:
    lengths = [len(sentence.key.split()) for sentence in sentences]
    assert sum(3 <= length <= 12 for length in lengths) > 0.97 * len(lengths)


def test_split_is_a_property_of_the_sentence(sentences: list[splits.Sentence]) -> None:
    again = {sentence.key: sentence.split for sentence in splits.read_sentences()}
    assert again == {sentence.key: sentence.split for sentence in sentences}
    assert len(again) == len(sentences)  # so no normalised sentence has two splits
    for seed in (0, 1):
        chosen = splits.in_order([s for s in sentences if s.split == "test"], seed)[:50]
        assert all(again[sentence.key] == "test" for sentence in chosen)


def test_splits_have_their_shares_of_the_sentences(sentences: list[splits.Sentence]) -> None:
    count = Counter(sentence.split for sentence in sentences)
    assert 0.02 < count["dev"] / len(sentences) < 0.04
    assert 0.06 < count["test"] / len(sentences) < 0.12


def test_held_out_pairs_never_train(sentences: list[splits.Sentence]) -> None:
    held = splits.held_out_pairs(read_patterns())
    assert sum(len(slot) for slots in held.values() for slot in slots) > 50
    for sentence in sentences:
        if sentence.split != "test":
            for pattern, choice in sentence.derivations:
                assert not any(index in slot for index, slot in zip(choice, held[pattern.name], strict=True))


def test_every_word_can_be_learned(sentences: list[splits.Sentence]) -> None:
    def forms(split: str) -> set[str]:
        return {word for sentence in sentences if sentence.split == split for word in splits.words(sentence.french)}

    assert not (forms("test") | forms("dev")) - forms("train")


def test_a_training_sample_is_distinct_and_follows_its_seed(sentences: list[splits.Sentence]) -> None:
    train = [sentence for sentence in sentences if sentence.split == "train"][::8]
    chosen = splits.sample_train(train, 1200, 0)
    assert len({sentence.key for sentence in chosen}) == 1200
    assert [s.key for s in chosen] == [s.key for s in splits.sample_train(train, 1200, 0)]
    assert [s.key for s in chosen] != [s.key for s in splits.sample_train(train, 1200, 1)]
    assert min(splits.recordings_of(chosen, 2)) == 2


@pytest.mark.parametrize(
    "fault",
    [
        r" (de le|de les|à le|à les) ",
        r" (le|la|de|que|je|me|te|se|ne|jusque) (?!onze|oui|huit|haricot|hall|hors|yaourt)[aeiouyhàâéèêëîïôœù]",
        r"['’ ](l|d|qu|j|m|s|n)' ",
        r" ce (?!onze|huit)[aeiouhéèêîôœ]",
        r" cet (?![aeiouhéèêîôœ])",
        r" (ma|sa) [aeiouhéèêîôœ]",
        r" (beau|nouveau|vieux) (?!et |à |aujourd|ici)[aeiouhéèêîôœ]",
        r"l'(onze|huit)",
        r"(?<=\S)  +(?=\S)",
        r"\w ?[.?!] ?[.?!]",
        r"\w [,.]",
        r"\w[?!]",
        r"[{}|~#@&*/0-9_]",
    ],
)
def test_no_sentence_has_a_known_french_fault(french: str, fault: str) -> None:
    result = re.search(fault, french.replace("\n", "\n "))
    assert result is None, french[max(result.start() - 40, 0) : result.end() + 40]


@pytest.mark.parametrize(
    ("word", "feminine"),
    [
        ("gare", True),
        ("hôtel", False),
        ("plage", True),
        ("musée", False),
        ("clé", True),
        ("lettre", True),
        ("pain", False),
    ],
)
def test_gender_agrees(french: str, word: str, feminine: bool) -> None:
    wrong = r"\b(le|un|du|au|ce|mon)" if feminine else r"\b(la|une|cette|ma)"
    assert re.search(rf"{wrong} {word}\b", french) is None


def test_adjectives_agree(french: str) -> None:
    for noun, right in {
        "chemise": {"verte", "blanche", "noire", "bleue", "grise"},
        "chaussures": {"vertes", "blanches", "noires", "bleues", "grises"},
        "manteau": {"vert", "blanc", "noir", "bleu", "gris"},
        "soupe est": {"froide", "chaude", "bonne", "mauvaise", "délicieuse", "excellente"},
    }.items():
        after = set(re.findall(rf"\b{noun} (\w+)", french))
        assert after & right
        for good in right:
            stem = good.rstrip("es")[:4]
            assert {form for form in after if form.startswith(stem)} <= right


def test_english_spelling(some: list[splits.Sentence]) -> None:
    for sentence in some:
        assert 1 <= len(sentence.renderings) <= 64
        assert len(set(sentence.renderings)) == len(sentence.renderings)
        for text in sentence.renderings:
            assert re.fullmatch(r"[A-Z][A-Za-z',.?! -]*[.?!]", text), text
            assert not re.search(r"\b[Aa] (?!one way)[aeio]|\b[Aa] u(?!ni)|\b[Aa]n [^aeiouh]", text), text
            assert not re.search(r"  | [,.?!]|\bi\b", text), text
            assert not re.search(r"\b(two|three|four|five) (ticket|night|week|kilo|stamp|brother)\b", text), text


def test_punctuation_matches(some: list[splits.Sentence]) -> None:
    for sentence in some:
        assert {text[-1] for text in sentence.renderings} <= {sentence.french[-1]}


def test_canonical_is_deterministic(some: list[splits.Sentence]) -> None:
    for sentence in some[::5]:
        pattern, choice = sentence.derivations[0]
        assert sentence.renderings[0] == pattern.render_english(choice)[0]


@pytest.mark.parametrize(
    ("value", "french_text", "english_text"),
    [
        (0, "zéro", "zero"), (1, "un", "one"), (16, "seize", "sixteen"), (21, "vingt et un", "twenty-one"),
        (30, "trente", "thirty"), (47, "quarante-sept", "forty-seven"), (70, "soixante-dix", "seventy"),
        (71, "soixante et onze", "seventy-one"), (79, "soixante-dix-neuf", "seventy-nine"),
        (80, "quatre-vingts", "eighty"), (81, "quatre-vingt-un", "eighty-one"), (91, "quatre-vingt-onze", "ninety-one"),
        (99, "quatre-vingt-dix-neuf", "ninety-nine"), (100, "cent", "one hundred"),
        (200, "deux cents", "two hundred"), (203, "deux cent trois", "two hundred and three"),
        (318, "trois cent dix-huit", "three hundred and eighteen"), (1000, "mille", "one thousand"),
        (2020, "deux mille vingt", "two thousand and twenty"), (80_000, "quatre-vingt mille", "eighty thousand"),
        (3_400, "trois mille quatre cents", "three thousand four hundred"),
    ],
)  # fmt: skip
def test_numbers_are_spelled_in_both_languages(value: int, french_text: str, english_text: str) -> None:
    assert numerals.french_number(value) == french_text
    assert numerals.english_number(value)[0] == english_text


@pytest.mark.parametrize(
    ("year", "french_text", "english_texts"),
    [
        (1984, "mille neuf cent quatre-vingt-quatre", ("nineteen eighty-four",)),
        (1905, "mille neuf cent cinq", ("nineteen oh five", "nineteen five")),
        (1900, "mille neuf cents", ("nineteen hundred",)),
        (2003, "deux mille trois", ("two thousand and three",)),
        (2012, "deux mille douze", ("twenty twelve",)),
    ],
)
def test_years_are_spelled_in_both_languages(year: int, french_text: str, english_texts: tuple[str, ...]) -> None:
    assert next((item.french, item.english) for item in numerals.years(year, year)) == (french_text, english_texts)


@pytest.mark.parametrize("folder", ["assistant", "records"])
def test_sentences_of_other_folders_are_spelt(folder: str) -> None:
    for sentence in splits.in_order(splits.read_sentences(folder), 0)[:2000]:
        for text in (sentence.french, *sentence.renderings[:2]):
            assert text[0] == text[0].upper(), text
            assert text[-1] in ".?!", text
            assert not re.search(r"[{}|()#~@&/=]|  |\bde (le|les) |\bà (le|les) [a-z]", text), text


def test_verbs_are_said_to_tu_and_to_vous() -> None:
    result = {s.french: s.renderings for s in splits.read_sentences("assistant")}
    assert result["Ouvre les volets, s'il te plaît."] == result["Ouvrez les volets, s'il vous plaît."]
    assert "Can you open the shutters?" in result["Peux-tu ouvrir les volets ?"]


def test_pairs_that_a_table_holds_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("1\t1\tOUVRE les volets\t-\n2\t2\t-\tClose the gate!\n", encoding="utf-8")
    sentences = splits.read_sentences("assistant")
    left = {sentence.french for sentence in phrasebook.without(sentences, [tmp_path / "test.tsv"])}
    gone = {sentence.french for sentence in sentences} - left
    assert {"Ouvre les volets.", "Ferme le portail."} <= gone
    assert "Allume la télé." in left


@pytest.mark.parametrize(
    ("french_text", "canonical", "another"),
    [
        ("trois heures", "three o'clock", "three"),
        ("une heure", "one o'clock", "one"),
        ("trois heures et demie", "half past three", "three thirty"),
        ("une heure moins le quart", "quarter to one", "twelve forty-five"),
        ("onze heures et quart", "quarter past eleven", "eleven fifteen"),
        ("midi", "noon", "midday"),
        ("midi et demi", "half past twelve", "twelve thirty"),
        ("minuit moins dix", "ten to midnight", "eleven fifty"),
        ("huit heures du matin", "eight in the morning", "eight o'clock in the morning"),
        ("cinq heures vingt", "twenty past five", "five twenty"),
    ],
)
def test_times_have_every_english_reading(french_text: str, canonical: str, another: str) -> None:
    known = {item.french: item.english for item in numerals.times()}
    assert known[french_text][0] == canonical
    assert another in known[french_text]


def test_prices_dates_and_timetables_are_spelled() -> None:
    prices = {item.french: item.english for item in numerals.prices()}
    assert prices["douze euros cinquante"][:1] == ("twelve euros fifty",)
    assert prices["un euro vingt"][0] == "one euro twenty"
    assert "quatre-vingts euros" in prices
    dates = {item.french: item.english for item in numerals.dates()}
    assert dates["le premier mai"] == ("the first of May", "May first")
    assert len(dates) == 365
    timetable = {item.french: item.english for item in numerals.timetable()}
    assert timetable["dix-huit heures vingt"] == ("six twenty in the evening",)


@pytest.mark.parametrize(
    ("raw", "finished"),
    [
        ("près de le hôtel .", "Près de l'hôtel."),
        ("à côté de le arrêt", "À côté de l'arrêt"),
        ("jusqu'à le marché", "Jusqu'au marché"),
        ("je aime ce hôtel , madame !", "J'aime cet hôtel, madame !"),
        ("ma amie a un beau appartement", "Mon amie a un bel appartement"),
        ("le onze, les clés de les huit chambres", "Le onze, les clés des huit chambres"),
    ],
)
def test_french_is_elided_and_punctuated(raw: str, finished: str) -> None:
    assert agreement.finish_french(raw) == finished


def test_english_gets_its_articles_and_capitals() -> None:
    assert (
        agreement.finish_english("a umbrella , a university and a hour ?") == "An umbrella, a university and an hour?"
    )


def test_text_only_prints_test_sentences(sentences: list[splits.Sentence]) -> None:
    command = [sys.executable, str(BUILD / "phrasebook.py"), "--text-only", "40", "--seed", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout.splitlines()
    known = {sentence.french: sentence for sentence in sentences}
    for line in printed:
        french_text, *english = line.split("\t")
        assert known[french_text].split == "test"
        assert tuple(english) == known[french_text].renderings
    tests = [sentence for sentence in sentences if sentence.split == "test"]
    assert [line.split("\t")[0] for line in printed] == [s.french for s in splits.in_order(tests, 1)[:40]]
    assert splits.in_order(tests, 1)[:40] != splits.in_order(tests, 2)[:40]


def test_text_only_rejects_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert phrasebook.print_text(1_000_000, 0) == 2
    assert "`--text-only` must be" in capsys.readouterr().err


def test_samples_are_test_sentences(sentences: list[splits.Sentence]) -> None:
    """They come from the phrasebook or, by the rule of Tatoeba's pairs, from everyday French."""
    folder = BUILD.parent / "samples"
    known = {sentence.key: sentence for sentence in sentences}
    lines = (folder / "samples.tsv").read_text(encoding="utf-8").splitlines()
    assert [line.partition("\t")[0] for line in lines] == [f"{sample.name}.wav" for sample in sampler.SAMPLES]
    assert len(lines) == 8
    for line in lines:
        name, french_text, *english = line.split("\t")
        sentence = known.get(splits.normalise(french_text))
        if sentence is None:
            assert tatoeba.split_of(min(map(tatoeba.key, english))) == "test"
        else:
            assert sentence.split == "test"
            assert tuple(english) == sentence.renderings
        assert 0 < (folder / name).stat().st_size < 120_000


def test_lexicon_finds_pronunciations_in_context() -> None:
    single = {"the": "dh ax", "end": "eh n d", "of": "ah v", "day": "d ey"}
    phrases = {"The day.": "dh ax d ey", "The end of the day!": "dh iy eh n d ah v dh ax d ey"}
    spoken = [(text, phones.split()) for text, phones in phrases.items()]
    entries, exact = lexicon.build_lexicon(spoken, lambda word: single[word].split())
    assert exact == 1.0
    assert ("the", ("dh", "iy")) in entries
    assert ("end", ("eh", "n", "d")) in entries
    assert lexicon.english_words("I'd like two twenty-five o'clock.") == [
        "i'd",
        "like",
        "two",
        "twenty-five",
        "o'clock",
    ]


def test_the_plan_has_as_many_recordings_of_each_split_as_asked(sentences: list[splits.Sentence]) -> None:
    plan = recording.Plan(sentences=60, recordings=2, dev=5, test=7, seed=0)
    rows = recording.plan_recordings(plan, sentences[::11])
    assert Counter(row.split for row in rows) == {"train": 120, "dev": 5, "test": 7, "test_voices": 7}
    assert [row.number for row in rows] == list(range(1, 140))
    first = [row for row in rows if row.split != "train" or row.number % 2 == 1]
    assert all(row.translation == row.sentence.renderings[0] for row in first)
    assert all(row.translation in row.sentence.renderings for row in rows)


def test_a_truncated_journal_loses_only_its_last_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal.tsv"
    journal.write_text("Yes.\tpau:0.1 y:0.2\nNo, thank you.\tpau:0.1 n:0.", encoding="utf-8")
    assert read_journal(journal) == {"Yes.": ["pau:0.1 y:0.2"]}
    assert journal.read_text(encoding="utf-8") == "Yes.\tpau:0.1 y:0.2\n"


def test_a_bad_synthesis_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(text: str, *_: object, **__: object) -> None:
        raise RuntimeError(f"no sound for {text!r}")

    monkeypatch.setattr(recording.english_voice, "synthesise", silent)
    monkeypatch.setattr(recording.voices, "record", silent)
    task = recording.Task("Yes.", ((1, "train", "Oui."), (2, "train", "Oui.")), known=False)
    _, alignment, failed = recording.run_task(tmp_path, 0, task)
    assert alignment == ""
    assert len(failed) == 3
    assert "Oui." in failed[1]
