"""Lists of texts: the shipped ones, wrong lines, whose prompts they are spoken with."""

from collections import Counter

import pytest
from tiny_data import counting, tiny_split

from dcar.errors import DataError
from dcar.prepare.columns import Split
from dcar.prompts.items import make_prompts
from dcar.prompts.texts import LISTS, read_texts, text_list, text_prompts
from dcar.text.english.phonemes import text_to_ids


def test_the_shipped_lists_are_what_their_description_says():
    texts = read_texts("hard")
    assert Counter(t.category for t in texts) == {
        "repeated": 40,
        "twister": 40,
        "names": 40,
        "long": 80,
    }
    lines = text_list("hard").read_text().splitlines()
    assert all(line.isascii() for line in lines)
    assert len(set(lines)) == len({t.id for t in texts}) == 200
    lengths = [len(line.split("\t")[1].split()) for line in lines if line.startswith("long")]
    assert 30 <= min(lengths) < 35 and 55 < max(lengths) <= 60
    # numbers are measured as they are said
    assert not any(c.isdigit() for t in texts for c in t.text)

    short = read_texts("short")
    assert Counter(t.category for t in short) == {
        "one word": 24,
        "two words": 31,
        "three or four": 25,
    }
    lines = [line.split("\t")[1].split() for line in text_list("short").read_text().splitlines()]
    assert {len(words) for words in lines} == {1, 2, 3, 4}
    assert len({t.text for t in short}) == 80

    thousand = read_texts("thousand")
    kinds = ("names", "numbers", "clauses", "lists", "dialogue")
    assert Counter(t.category for t in thousand) == dict.fromkeys(kinds, 200)
    lengths = [
        len(line.split("\t")[1].split()) for line in text_list("thousand").read_text().splitlines()
    ]
    assert (min(lengths), max(lengths)) == (5, 21)
    assert len({t.text for t in thousand}) == 1000
    assert not {t.text for t in thousand} & {t.text for t in (*texts, *short)}
    assert set(LISTS) == {"hard", "short", "thousand"}


def test_wrong_lines_are_named_with_their_numbers(tmp_path):
    path = tmp_path / "my.txt"
    path.write_text("The tide came in.\n\nnames\tDr. No\textra\nкошка\n\tno category\n")
    with pytest.raises(DataError) as caught:
        read_texts(path)
    said = str(caught.value)
    assert all(f"{path}:{number}: " in said for number in (3, 4, 5))
    path.write_text("\ufeffnames\tAnna\u2028speaks.\n", encoding="utf-8")
    assert [(t.id, t.text, t.category) for t in read_texts(path)] == [
        ("names-0001", "Anna speaks.", "names")
    ]
    path.write_text("\n")
    with pytest.raises(DataError, match="my.txt: "):
        read_texts(path)
    with pytest.raises(DataError, match="missing.txt: .*texts="):
        read_texts(tmp_path / "missing.txt")


@pytest.mark.parametrize("bos", [True, False])
def test_speakers_take_turns_with_the_prompts_of_the_split(tmp_path, bos):
    path = tmp_path / "my.tsv"
    path.write_text("".join(f"numbers\tChapter {i}.\n" for i in range(1, 8)))
    items = make_prompts(Split.of(tiny_split("test", 5, counting)), 6, seed=0, bos=bos)
    spoken = text_prompts(read_texts(path), items)
    # s0 has three utterances
    assert [s.speaker for s in spoken] == ["s0", "s1", "s0", "s1", "s0", "s0", "s1"]
    assert spoken == text_prompts(read_texts(path), items[::-1])
    own = {(i.prompt_ids, i.prompt_utterance_id): i for i in items}
    for number, item in enumerate(spoken, 1):
        source = own[item.prompt_ids, item.prompt_utterance_id]
        assert item.speaker_embedding is source.speaker_embedding
        assert list(item.target_text_ids) == text_to_ids(f"Chapter {number}.")
        assert (
            item.text_ids[: item.prompt_text_units] == source.text_ids[: source.prompt_text_units]
        )
        assert (item.utterance_id, item.category) == (f"numbers-{number:04d}", "numbers")
        assert item.reference_tokens == [] and item.duration == 0
    assert spoken[0].text == "Chapter one."
